"""`make report-cases`: five runs whose answers people should find without a search, and pictures of their reports.

A port that passes, one with one failing layer of 62, one with 62 equal failures, one that crashes, and one with a syntax
error. Of each it prints how many lines the terminal shows, how high and large the page is, and how many seconds pass until
the answer is there. The pictures lie in the folder that it names.
"""

from __future__ import annotations

import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path

from playwright.sync_api import sync_playwright
from runs import Workflow
from test_report_in_browser import FLAGS

import models
from layerproof.files import write_json

LAYERS = 62
SOFTMAX = ("logits.float().sigmoid()", "logits.float().softmax(-1)")
WIDTHS = (1440, 1024, 400)
HEIGHT = 800
"""Of a screen, in pixels."""


@dataclass(frozen=True)
class Case:
    """A run to look at: how many layers its model has, and how its port differs from the shipped one."""

    name: str
    layers: int
    edits: tuple[tuple[str, str], ...] = ()


CASES = (
    Case("pass", 6),
    Case(
        "one layer of 62",
        LAYERS,
        (
            (
                "    for name, matrix in EXPERT_NAMES.items():\n",
                "    for name, matrix in EXPERT_NAMES.items():\n"
                '        matrix = {"w1": "w3", "w3": "w1"}.get(matrix, matrix) if stage.layer == 40 else matrix\n',
            ),
        ),
    ),
    Case("62 equal failures", LAYERS, (SOFTMAX,)),
    Case(
        "crash",
        6,
        (("        logits = tap(", '        raise RuntimeError("no kernel for this shape")\n        logits = tap('),),
    ),
    Case("syntax error", 6, (("def build(", "def build(("),)),
)


def run(case: Case, folder: Path) -> tuple[Path, list[str], float]:
    """Runs a case as a user does. Returns its report, the lines of the terminal, and the seconds that it took."""
    models.CONFIGS["minimax_m2"]["num_hidden_layers"] = case.layers
    models.save("minimax_m2", folder / "model", shard_size="2MB")
    write_json(folder / "ids.json", [list(range(3, 67)), list(range(5, 37))])
    workflow = Workflow(folder, model={"checkpoint": "model"}, inputs={"prompts": None, "token_ids": "ids.json"})
    if case.edits:
        workflow.edit("workflow/ports/minimax_m2.py", *case.edits)
    started = time.monotonic()
    done = subprocess.run([sys.executable, "-m", "layerproof", "run"], **workflow.options() | {"env": None})
    return workflow.results / "report.html", done.stdout.splitlines(), time.monotonic() - started


def take_pictures(page: Path, name: str, folder: Path) -> int:
    """Takes a picture of a report for each width and scheme, and prints it. Returns its height at 1280 pixels."""
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(channel=None, executable_path=_chromium(), args=list(FLAGS))
        opened = browser.new_page(viewport={"width": 1280, "height": HEIGHT})
        opened.goto(page.as_uri())
        height = opened.evaluate("document.documentElement.scrollHeight")
        opened.screenshot(path=folder / f"{name}, first screen.png")
        for scheme in ("light", "dark"):
            opened.emulate_media(color_scheme=scheme)
            for width in WIDTHS:
                opened.set_viewport_size({"width": width, "height": HEIGHT})
                opened.screenshot(path=folder / f"{name}, {width}, {scheme}.png", full_page=True)
        opened.emulate_media(media="print")
        opened.pdf(path=folder / f"{name}.pdf")
        browser.close()
    return height


def _chromium() -> str:
    import shutil

    found = shutil.which("chromium")
    if found is None:
        sys.exit("error: Chromium is not installed. Run make setup-dev.")
    return found


def main() -> None:
    pictures = Path(tempfile.mkdtemp(prefix="report-cases-"))
    print(f"{'case':<20} {'lines':>6} {'seconds':>8} {'kB':>6} {'height':>7}  last words")
    for case in CASES:
        with tempfile.TemporaryDirectory() as folder:
            page, lines, seconds = run(case, Path(folder))
            height = take_pictures(page, case.name, pictures) if page.exists() else 0
            size = page.stat().st_size // 1000 if page.exists() else 0
        print(f"{case.name:<20} {len(lines):>6} {seconds:>8.1f} {size:>6} {height:>7}  {lines[-1]}", flush=True)
        (pictures / f"{case.name}.txt").write_text("\n".join(lines) + "\n")
    print(f"Pictures and what the terminal said: {pictures}")


if __name__ == "__main__":
    main()
