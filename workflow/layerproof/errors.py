"""Errors that a user can cause, each with one line that says what is wrong, where, and what to do."""


def first_line(said: object) -> str:
    """The first line with something in it; of an exception that says nothing its type."""
    lines = str(said).strip().splitlines()
    return lines[0] if lines else type(said).__name__ if isinstance(said, BaseException) else ""


class UserError(Exception):
    """Bad input: the message names the file or key and the remedy. Shown without a traceback."""


class StageError(UserError):
    """A stage cannot be run or read. It ends as `error` in the report, and the other stages go on."""


class StageMissing(StageError):
    """A stage has nothing to run on or to be compared with, because another one failed: it ends as `missing`."""
