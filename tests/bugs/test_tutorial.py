"""`make tutorial`: for every seed it plants a mistake that Layerproof finds, and its answer corrects the port."""

import re
import subprocess
from pathlib import Path

import pytest

import tutorial
from bugs import harness
from layerproof import config
from layerproof.model.resolve import resolve
from layerproof.paths import CAUSES
from layerproof.report.verdicts import collect

SEEDS = range(len(tutorial.MISTAKES))
DRAWN = (1, 4, 13, 27)
"""Seeds that the whole diagnosis runs on; the others are compared alone."""
PAGE = (tutorial.REPOSITORY / "docs/tutorial.md").read_text()
SHOWN = 8
"""The seed of the page."""


def apply(diff, folder):
    subprocess.run(["git", "apply", "-"], cwd=folder, input=diff, text=True, check=True)


def test_there_are_at_least_twenty_mistakes_and_each_has_a_seed():
    assert len(tutorial.MISTAKES) == len(tutorial.NAMES) >= 20
    assert {tutorial.drawn(seed).name for seed in SEEDS} == tutorial.NAMES
    assert tutorial.drawn(3) == tutorial.drawn(3 + len(tutorial.MISTAKES)) and tutorial.drawn(-1)


@pytest.mark.parametrize("seed", SEEDS)
def test_the_answer_corrects_what_was_planted(seed, tmp_path):
    tutorial.plant(seed, tmp_path)
    planted = (tmp_path / "port.py").read_text()
    assert planted != tutorial.SHIPPED.read_text()
    compile(planted, "port.py", "exec")
    apply(tutorial.answer(seed), tmp_path)
    assert (tmp_path / "port.py").read_text() == tutorial.SHIPPED.read_text()


def test_it_says_what_to_do_and_not_what_is_wrong(tmp_path, capsys):
    tutorial.plant(5, tmp_path / "mine")
    said = capsys.readouterr().out
    assert f"cd {tmp_path / 'mine'} && layerproof run" in said
    bug = tutorial.drawn(5)
    written = "".join(path.read_text() for path in (tmp_path / "mine").iterdir())
    assert bug.name not in said + written and bug.cause not in said + written


def test_its_folder_has_a_config_that_layerproof_reads(tmp_path, monkeypatch):
    tutorial.plant(0, tmp_path)
    monkeypatch.chdir(tmp_path)
    resolved = resolve(config.read(Path("config.yaml")))
    assert resolved.settings.port.module == "port.py"


def test_another_seed_replaces_a_port_that_is_solved_and_no_work_of_yours(tmp_path):
    tutorial.plant(0, tmp_path)
    tutorial.plant(1, tmp_path)
    port = tmp_path / "port.py"
    port.write_text(tutorial.SHIPPED.read_text())
    tutorial.plant(2, tmp_path)
    port.write_text(port.read_text() + "\n# mine\n")
    with pytest.raises(SystemExit, match="has edits of yours"):
        tutorial.plant(3, tmp_path)
    assert port.read_text().endswith("# mine\n")


def test_the_report_has_a_page_on_every_cause():
    sections = CAUSES.read_text().splitlines()
    assert all(f"## {bug.cause}" in sections for bug in tutorial.MISTAKES)


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    """The model of the tutorial, with its golden."""
    return harness.make_model(harness.TINY, 0, tmp_path_factory.mktemp("model"))


def verdicts(model, source, directory, diagnosed):
    outcomes = [
        harness.run(model, stage, source, directory, diagnosed=diagnosed) for stage in ("embed", tutorial.FIRST_STAGE)
    ]
    diagnoses = [outcome.diagnosis for outcome in outcomes if outcome.diagnosis]
    return outcomes[1], collect([outcome.comparison for outcome in outcomes], [], diagnoses, limit=harness.LIMIT)


@pytest.mark.slow
@pytest.mark.parametrize("seed", DRAWN)
def test_layerproof_finds_stage_tap_and_cause_and_passes_the_corrected_port(seed, model, tmp_path):
    bug = tutorial.drawn(seed)
    tutorial.plant(seed, tmp_path)
    port = tmp_path / "port.py"
    _, found = verdicts(model, port.read_text(), tmp_path / "run", diagnosed=True)
    first = found["first_culprit"]
    assert (first["stage"], first["tap"], first["cause"]) == (tutorial.FIRST_STAGE, bug.tap, bug.cause)
    apply(tutorial.answer(seed), tmp_path)
    _, corrected = verdicts(model, port.read_text(), tmp_path / "run", diagnosed=True)
    assert corrected["overall"] == "pass"


@pytest.mark.slow
@pytest.mark.parametrize("seed", [seed for seed in SEEDS if seed not in DRAWN])
def test_every_mistake_is_far_above_the_limit(seed, model, tmp_path):
    outcome, found = verdicts(model, tutorial.planted(seed), tmp_path, diagnosed=False)
    assert found["overall"] == "fail" and outcome.failed
    assert outcome.effect is None or outcome.effect > 10


def test_the_page_shows_the_code_and_the_fix_of_its_seed():
    assert f"make tutorial SEED={SHOWN}\n" in PAGE
    source = tutorial.planted(SHOWN).splitlines()
    shown = re.findall(r"^>? +(\d+)  ( +.+)$", PAGE, re.MULTILINE)
    assert len(shown) == 6
    for number, line in shown:
        assert source[int(number) - 1].startswith(line.removesuffix("…"))
    (diff,) = re.findall(r"^```diff\n(.*?)^```$", PAGE, re.MULTILINE | re.DOTALL)
    changed = [line for line in tutorial.answer(SHOWN).splitlines()[2:] if line[0] in "-+"]
    assert diff.splitlines() == changed


@pytest.mark.slow
def test_the_page_quotes_the_answer_on_its_seed(model, tmp_path):
    _, found = verdicts(model, tutorial.planted(SHOWN), tmp_path, diagnosed=True)
    assert f": {found['headline']}" in " ".join(PAGE.split())
