"""Errors that a user can cause; the message of each is one line that says what is wrong, where, and what to do."""


def first_line(said: object) -> str:
    """Returns the first non-empty line; for an exception without a message, its type."""
    lines = str(said).strip().splitlines()
    return lines[0] if lines else type(said).__name__ if isinstance(said, BaseException) else ""


def one_line(said: object, limit: int = 300) -> str:
    """Returns what was said in one line of at most `limit` characters; for an exception without a message, its type."""
    text = " ".join(str(said).split()) or first_line(said)
    return text if len(text) <= limit else f"{text[: limit - 3]}..."


class UserError(Exception):
    """Bad input; the message names the file or key and the remedy. It is shown without a traceback."""


class StageError(UserError):
    """A stage cannot run or cannot be read. It ends as `error` in the report, and the other stages go on."""


class StageMissing(StageError):
    """A stage has nothing to run on or compare with, because another stage failed. It ends as `missing`."""
