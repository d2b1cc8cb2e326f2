"""Where Layerproof's own files are: in a clone of the repository, or in the installed package."""

from __future__ import annotations

from pathlib import Path

LIBRARY = Path(__file__).resolve().parent
"""The package `layerproof`."""
WORKFLOW = LIBRARY.parents[1] if (LIBRARY.parents[1] / "Snakefile").exists() else LIBRARY / "_workflow"
"""The folder with the Snakefile, `workflow/rules`, `workflow/ports`, `workflow/resources`, `profiles` and the glossary."""
SNAKEFILE = WORKFLOW / "Snakefile"
GLOSSARY = WORKFLOW / "docs/glossary.md"
"""The words of the report and the docs, each in a paragraph that begins with it in bold."""
CAUSES = WORKFLOW / "docs/causes.md"
"""What each known mistake is, how it happens, and what to check: a section for each name."""
TEMPLATES = tuple(
    LIBRARY / "report/templates" / name
    for name in ("report.html.j2", "finding.html.j2", "stage.html.j2", "style.css", "script.js")
)
"""What the report is laid out by: the page, and what it includes."""
DIFF_TEMPLATE = LIBRARY / "report/templates/diff.html.j2"
"""What a page of two runs side by side is laid out by."""
TINY_CHECKPOINT = "workflow/resources/tiny_minimax_m2"
"""The checkpoint that comes with Layerproof, as config.yaml names it."""


def shipped(name: str) -> Path:
    """A file that config.yaml names: as it is if it exists or is absolute, or else the one that comes with Layerproof."""
    path = Path(name)
    return path if path.is_absolute() or path.exists() or not (WORKFLOW / path).exists() else WORKFLOW / path
