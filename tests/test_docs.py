"""The commands of README.md and docs/ are right.

A command is a line of a code block without a language, or of `sh`, `bash` or `console`, and a `run:` of the workflow in
docs/ci.md. How each is checked:

- `make TARGET`: by `make -n`, so the target exists;
- `layerproof run` and `snakemake`: by the real parsers of both, and by one dry run of all targets that the pages name, since
  running each would take minutes;
- other verbs of `layerproof`, `sha256sum`, `cat` and `head`: they run, on one finished run that all share;
- `cd`, `source` and `git` prepare what follows, and are not run.

What can be none of these has the reason on the line before its block: `<!-- not run: needs Slurm -->`. Commands within the
text, such as `layerproof why FILE`, are parsed, and `sha256sum` runs.
"""

from __future__ import annotations

import contextlib
import io
import json
import os
import re
import shlex
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest
import yaml

import models
from configs import QUICK, REPOSITORY
from layerproof import cli

PAGES = [REPOSITORY / "README.md", *sorted((REPOSITORY / "docs").rglob("*.md"))]
SHELLS = ("", "sh", "bash", "console")
PROGRAMS = ("make", "layerproof", "snakemake", "sha256sum", "cat", "head", "cd", "source", "git")
OTHERS = ("python", "pip", "pytest", "uv", "sudo", "apt-get", "export", "mkdir", "aws", "pcluster", "hf", "apptainer")
"""Programs that no test runs: their blocks must be marked."""
PREPARE = ("cd", "source", "git")
ARCHIVE = "results/archive/2026-11-21.zip"
"""The archive of the pages."""
STAND_FOR = {"STAGE": "layer_003", "FILE": "results/port/layer_003.h5", "RUN": "run", "A-B": "all", "SIDE": "port"}
"""What words in capitals stand for in a dry run."""
NO_VERBS = ("VERB", "trimmed")
"""What follows `layerproof` in the text where no command is meant: a word for any verb, and how pruned files begin."""


@dataclass(frozen=True)
class Command:
    """One command of a page. `not_run` is the reason that its block is marked with, or None."""

    page: Path
    line: int
    words: tuple[str, ...]
    not_run: str | None = None

    def __str__(self) -> str:
        return f"{self.page.relative_to(REPOSITORY)}:{self.line}: {shlex.join(self.words)}"


def simple_commands(text: str) -> Iterator[tuple[str, ...]]:
    """The commands of a line, without comment, pipes and what joins them."""
    lexer = shlex.shlex(text, posix=True, punctuation_chars="|&;()")
    lexer.whitespace_split = True
    words: list[str] = []
    for word in [*lexer, "&&"]:
        if set(word) <= set("|&;()"):
            if words:
                yield tuple(words)
            words = []
        else:
            words.append(word)


def blocks(text: str) -> Iterator[tuple[int, str, str, str | None]]:
    """The number of the first line, language, content and mark of each code block."""
    for found in re.finditer(r"^( *)```(\w*)\n(.*?)^ *```$", text, re.MULTILINE | re.DOTALL):
        before = text[: found.start()].rstrip().rpartition("\n")[2].strip()
        mark = re.fullmatch(r"<!-- not run: (.+) -->", before)
        yield text[: found.start(3)].count("\n") + 1, found[2], found[3], mark and mark[1]


def commands_in(page: Path) -> Iterator[Command]:
    """The commands of a page's code blocks.

    Raises:
        ValueError: if a line between commands is none, or its program is unknown here.
    """
    for first, language, content, mark in blocks(page.read_text()):
        if language == "yaml" and page.name == "ci.md":
            steps = yaml.safe_load(content)["jobs"]["layerproof"]["steps"]
            for text in (step["run"] for step in steps if "run" in step):
                yield from (
                    Command(page, first, words, "of CI" if words[0] == "pip" else None)
                    for words in simple_commands(text)
                )
        if language not in SHELLS:
            continue
        content = re.sub(r"\\\n", lambda joined: " ", content)
        lines = [
            (first + number, line.strip().removeprefix("$ "))
            for number, line in enumerate(content.splitlines())
            if line.strip()
        ]
        if not any(line.split()[0] in PROGRAMS + OTHERS for _, line in lines):
            continue  # a drawing, or what a program prints
        for number, line in lines:
            for words in simple_commands(line):
                if words[0] not in PROGRAMS + OTHERS:
                    raise ValueError(f"{page.name}:{number}: {words[0]} is no known program. Add it to this test.")
                yield Command(page, number, words, mark)


COMMANDS = [command for page in PAGES for command in commands_in(page)]
CHECKED = [command for command in COMMANDS if command.not_run is None]


def of(*programs: str) -> list[Command]:
    return [command for command in CHECKED if command.words[0] in programs]


def in_text(program: str | None = None) -> list[Command]:
    """`layerproof VERB ...` and `sha256sum` within the text of the pages."""
    found = []
    for page in PAGES:
        text = re.sub(
            r"^ *```.*?^ *```$", lambda block: re.sub(r"[^\n]", "", block[0]), page.read_text(), flags=re.M | re.S
        )
        for code in re.finditer(r"`((?:layerproof|cd results && sha256sum) [^`]+)`", text):
            line = text[: code.start()].count("\n") + 1
            text_of_call = re.sub(r" \[.+?\]|…", "", " ".join(code[1].split()))
            for words in simple_commands(text_of_call):
                if words[0] != "cd" and words[1] not in NO_VERBS and program in (None, words[0]):
                    found.append(Command(page, line, words))
    return found


def parsed(command: Command) -> tuple[list[str], list[str]]:
    """The files that a call of `layerproof run` or `snakemake` asks for, and what Snakemake gets besides.

    Raises:
        SystemExit: if a parser refuses the command.
    """
    program, *arguments = command.words
    if program == "snakemake":
        return list(snakemakes_parser().parse_args(arguments).targets), []
    own, behind = cli._parted(arguments)
    args = cli.parser(own[0]).parse_args(own)
    if own[0] != "run":
        return [], []
    behind_args = snakemakes_parser().parse_args(behind)
    return [*args.targets, *(behind_args.forcerun or [])], behind


def snakemakes_parser():
    from snakemake.cli import get_argument_parser

    return get_argument_parser()


def test_commands_were_found_in_the_pages():
    assert len(CHECKED) > 30
    assert {"make", "layerproof", "snakemake", "sha256sum"} <= {one.words[0] for one in [*CHECKED, *in_text()]}
    assert len(in_text()) > 20


def test_a_block_is_split_into_its_commands(tmp_path):
    page = tmp_path / "page.md"
    page.write_text(
        "<!-- not run: takes an hour -->\n```\nmake bench\n```\n```\n$ cd a && layerproof run -- -p | head   # b; c\n```\n"
    )
    found = [(one.line, *one.words, one.not_run) for one in commands_in(page)]
    assert found == [
        (3, "make", "bench", "takes an hour"),
        (6, "cd", "a", None),
        (6, "layerproof", "run", "--", "-p", None),
        (6, "head", None),
    ]
    page.write_text("```\nmake bench\nlayerprof run\n```\n")
    with pytest.raises(ValueError, match=r"page.md:3: layerprof is no known program"):
        list(commands_in(page))


def test_what_no_test_runs_is_marked_with_its_reason():
    assert not list(map(str, of(*OTHERS)))


def test_a_mark_belongs_to_a_block_of_commands():
    for page in PAGES:
        marks = page.read_text().count("<!-- not run:")
        assert marks == len({(mark, first) for first, _, _, mark in blocks(page.read_text()) if mark}), page


@pytest.mark.parametrize("command", dict.fromkeys(shlex.join(one.words) for one in of("make")))
def test_the_makefile_has_the_target(command):
    done = subprocess.run(["make", "-n", *shlex.split(command)[1:]], cwd=REPOSITORY, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize("command", [*of("layerproof", "snakemake"), *in_text("layerproof")], ids=str)
def test_the_parser_takes_it(command):
    with contextlib.redirect_stderr(io.StringIO()) as said, contextlib.redirect_stdout(io.StringIO()):
        try:
            parsed(command)
        except SystemExit as ended:
            assert ended.code == 0, said.getvalue()


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A folder with a finished run of a small model whose port is transformers itself."""
    folder = tmp_path_factory.mktemp("docs")
    models.save("qwen3", folder / "model")
    (folder / "ids.json").write_text(json.dumps([list(range(3, 20)), [5, 9, 2, 40, 41]]))
    config = {
        "model": {"checkpoint": "model"},
        "inputs": {"token_ids": "ids.json"},
        "port": {"backend": "transformers"},
    }
    (folder / "config.yaml").write_text(yaml.safe_dump(config))
    run("layerproof", "run", "--cores", "2", ARCHIVE, folder=folder)
    return folder


def run(program: str, *arguments: str, folder: Path) -> subprocess.CompletedProcess[str]:
    """Runs a command as a user does, `layerproof` by the Python of the tests, and fails if it could not do its work."""
    command = [sys.executable, "-m", "layerproof"] if program == "layerproof" else [program]
    done = subprocess.run(
        [*command, *arguments],
        cwd=folder,
        env={**os.environ, **QUICK, "PYTHONPATH": str(REPOSITORY / "workflow")},
        capture_output=True,
        text=True,
    )
    # `why` and `audit` exit with 1 if there is something to say.
    assert done.returncode in ((0, 1) if arguments[:1] in (("why",), ("audit",)) else (0,)), done.stdout + done.stderr
    return done


RUN_HERE = [one for one in of("layerproof", "sha256sum", "cat", "head") if one.words[1:2] != ("run",)]
RUN_HERE += in_text("sha256sum")


@pytest.mark.workflow
@pytest.mark.parametrize("command", dict.fromkeys(shlex.join(one.words) for one in RUN_HERE))
def test_it_runs_on_a_finished_run(command, folder, tmp_path):
    words = shlex.split(command)
    where = (
        folder / "results" if words[0] == "sha256sum" else tmp_path if words[:2] == ["layerproof", "init"] else folder
    )
    run(*words, folder=where)


@pytest.mark.workflow
def test_a_rule_makes_every_file_that_the_pages_ask_for(folder):
    targets = set()
    for command in [*of("layerproof", "snakemake"), *in_text("layerproof")]:
        with contextlib.suppress(SystemExit):  # of --help
            targets |= set(parsed(command)[0])
    for word, text in STAND_FOR.items():
        targets = {re.sub(rf"\b{word}\b", text, target) for target in targets}
    assert len(targets) > 8
    run("layerproof", "run", *sorted(targets), "--", "--dry-run", "--quiet", folder=folder)
