"""How pages are laid out: Jinja templates that escape every value."""

from __future__ import annotations

from pathlib import Path

from jinja2 import Environment, FileSystemLoader, StrictUndefined, Template

from layerproof.report.words import number, share


def load(path: Path) -> Template:
    """The template in a file, which may include others beside it. A name without a value is an error."""
    jinja = Environment(
        loader=FileSystemLoader(path.parent),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    jinja.filters |= {"number": number, "share": share}
    return jinja.get_template(path.name)
