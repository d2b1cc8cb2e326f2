"""The command line: its help, and that a job with nothing to do returns before any heavy import."""

import argparse
import importlib
import subprocess
import sys

import pytest

from layerproof import cli
from layerproof.rerun.command import PEOPLE

HEAVY = ("numpy", "h5py", "torch", "transformers", "pydantic", "matplotlib", "numba")


def test_the_help_page_lists_verbs_for_people_first_with_example_and_exit_codes(capsys):
    with pytest.raises(SystemExit):
        cli.run(["--help"])
    page = capsys.readouterr().out
    people, _, rules = page.partition("other verbs, most of which rules call:")
    assert [line.split()[0] for line in people.splitlines() if line.startswith("  ") and line[2] != " "] == list(
        cli.ORDER
    )
    assert set(cli.ORDER) == set(PEOPLE)
    for verb in PEOPLE.values():
        assert verb.example in people and verb.exits in people and verb.sentence.endswith(".")
    assert "teacher-force" in rules and "teacher-force" not in people


@pytest.mark.parametrize("name", cli.ORDER)
def test_every_verb_for_people_has_help_of_its_own(name, capsys):
    with pytest.raises(SystemExit):
        cli.run([name, "--help"])
    page = capsys.readouterr().out
    assert "example:" in page and "exit code:" in page


@pytest.mark.parametrize("module", cli.VERBS)
def test_every_verb_is_found_in_its_module(module):
    verbs = argparse.ArgumentParser().add_subparsers()
    importlib.import_module(f"layerproof.{module}").add_verbs(verbs)
    assert tuple(verbs.choices) == cli.VERBS[module]


def test_a_job_imports_the_verbs_of_its_package_alone():
    code = 'import sys, layerproof.cli as cli; cli.parser("port"); print(*sys.modules)'
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert {name for name in done.stdout.split() if name.endswith(".verbs")} == {"layerproof.port.verbs"}


@pytest.mark.parametrize("verb", ["no-such-verb", "--no-such-flag", ""])
def test_what_is_no_verb_is_told(verb, capsys):
    with pytest.raises(SystemExit) as ended:
        cli.run([verb])
    assert ended.value.code == 2 and "layerproof VERB" in capsys.readouterr().err


def test_what_stands_behind_dashes_is_told_where_nothing_reads_it(capsys):
    assert cli.run(["gate", "--", "other/verdicts.json"]) == 2
    assert capsys.readouterr().err == "error: --: gate takes nothing behind it. Leave it out.\n"


def test_a_reader_that_wants_no_more_ends_a_verb_without_a_word():
    """As `layerproof schema | head -1` does."""
    command = [sys.executable, "-m", "layerproof", "schema"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
        assert process.stdout and process.stderr
        process.stdout.close()
        assert process.stderr.read() == "" and process.wait() == 141


def test_the_command_line_imports_nothing_heavy():
    code = f"import sys, layerproof.cli as cli; cli.parser(); print([name for name in {HEAVY} if name in sys.modules])"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


def test_a_job_file_that_does_not_exist_is_reported_in_one_line(capsys):
    assert cli.run(["compare", "results/compare/embed.json", "--tokens", "t.json", "--job", "no/such.json"]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith("error: no/such.json: is not a job file") and line.endswith(
        "layerproof run -- -n to write it."
    )
