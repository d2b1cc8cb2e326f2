"""Hooks of mkdocs.yml: pages of the site that are no files in docs/, and links that work there as in the repository.

Pages that lie elsewhere, such as README.md, are added as they are. The reference of config.yaml comes from its schema, that
of the command line from its help, and that of the library from its docstrings. A link to a file that the site does not have
becomes a link to the repository, if pyproject.toml names its URL, and plain text otherwise.
"""

from __future__ import annotations

import os
import re
import sys
import tomllib
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import yaml
from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files
from mkdocs.structure.pages import Page

REPOSITORY = Path(__file__).resolve().parents[1]
FROM_ELSEWHERE = {
    "README.md": "index.md",
    "docs/README.md": "which-page.md",
    "containers/README.md": "containers.md",
    "results/README.md": "results.md",
    "CONTRIBUTING.md": "contributing.md",
    "CHANGELOG.md": "changelog.md",
    "RELEASING.md": "releasing.md",
}
"""Files of the repository, and what they are called in the site."""
API = ("layerproof", "layerproof.taps", "layerproof.port.contract")
"""The modules of the library that are public."""


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Adds the pages that are not in docs/."""
    if readme := files.get_file_from_path("README.md"):
        files.remove(readme)  # the site's first page is the README of the repository
    for path, uri in FROM_ELSEWHERE.items():
        files.append(File.generated(config, uri, abs_src_path=str(REPOSITORY / path)))
    for uri, write in GENERATED.items():
        files.append(File.generated(config, uri, content=write()))
    return files


def on_page_markdown(markdown: str, page: Page, config: MkDocsConfig, files: Files) -> str:
    """Makes links and lists of a page right for the site."""
    uri = page.file.src_uri
    if uri in GENERATED:
        return markdown
    source = next((path for path, name in FROM_ELSEWHERE.items() if name == uri), f"docs/{uri}")
    uris = {f"docs/{file.src_uri}": file.src_uri for file in files} | FROM_ELSEWHERE
    url = repository_url()
    return "".join(
        part if is_code else moved(part, source, uri, uris, url) for part, is_code in parts(indented(markdown))
    )


def parts(markdown: str) -> Iterator[tuple[str, bool]]:
    """The parts of a page, and whether each is code."""
    end = 0
    for code in re.finditer(r"^ *```.*?^ *```$", markdown, re.MULTILINE | re.DOTALL):
        yield markdown[end : code.start()], False
        yield code[0], True
        end = code.end()
    yield markdown[end:], False


def moved(text: str, source: str, uri: str, uris: Mapping[str, str], url: str | None) -> str:
    """Text whose links, written for `source` in the repository, are right for the page `uri` of the site."""

    def link(found: re.Match[str]) -> str:
        path, hash_sign, anchor = found["target"].partition("#")
        if not path or ":" in path:
            return found[0]
        target = os.path.normpath(os.path.join(os.path.dirname(source), path))
        if target in uris:
            relative = os.path.relpath(uris[target], os.path.dirname(uri) or ".")
            return f"{found['text']}({relative}{hash_sign}{anchor})"
        if not (REPOSITORY / target).exists():
            return found[0]  # a dead link: mkdocs says so
        return f"{found['text']}({url}/blob/main/{target})" if url else found["text"][1:-1]

    return re.sub(r"(?P<text>!?\[(?:[^\[\]]|\[[^\]]*\])*\])\((?P<target>[^()\s]+)\)", link, text)


def repository_url() -> str | None:
    """The URL of the repository, if pyproject.toml names one."""
    urls = tomllib.loads((REPOSITORY / "pyproject.toml").read_text(encoding="utf-8"))["project"].get("urls", {})
    return next((value.rstrip("/") for key, value in urls.items() if key.lower() in ("repository", "source")), None)


def indented(markdown: str) -> str:
    """A page whose numbered lists are as mkdocs needs them: indented by four and not by three, as GitHub does, and with an
    empty line between items.
    """
    lines, is_list, fence = [], False, None
    for line in markdown.splitlines():
        indent = len(line) - len(line.lstrip())
        if line.lstrip().startswith("```"):
            fence = None if fence is not None else indent
        elif fence is None and line.strip() and indent < 3:
            was_list, is_list = is_list, bool(re.match(r"\d+\. ", line))
            if was_list and is_list and lines[-1].strip():
                lines.append("")
        lines.append(f" {line}" if is_list and indent >= 3 and fence != 0 else line)
    return "\n".join(lines) + "\n"


# Generated pages


def config_page() -> str:
    """Every key of config.yaml, from its schema."""
    schema = yaml.safe_load((REPOSITORY / "workflow/schemas/config.schema.yaml").read_text(encoding="utf-8"))
    return "\n".join(["# config.yaml", "", schema["description"], *_keys(schema["properties"], "")]) + "\n"


def _keys(properties: Mapping[str, Any], above: str) -> Iterator[str]:
    """The keys of a section, and then the sections in it."""
    sections = {name: schema for name, schema in properties.items() if "properties" in schema}
    for name, schema in properties.items():
        if name not in sections:
            default = yaml.safe_dump(schema.get("default"), default_flow_style=True, width=1000).split("\n")[0]
            yield from (
                "",
                f"### {above}{name}",
                "",
                f"*{_type(schema)}*; default `{default}`",
                "",
                schema["description"],
            )
    for name, schema in sections.items():
        yield from ("", f"## {above}{name}", "", schema["description"])
        yield from _keys(schema["properties"], f"{above}{name}.")


def _type(schema: Mapping[str, Any]) -> str:
    if "anyOf" in schema:
        return " or ".join(dict.fromkeys(map(_type, schema["anyOf"])))
    if "enum" in schema:
        return ", ".join(f"`{value}`" for value in schema["enum"])
    kind = {"object": "mapping", "array": "list", "boolean": "`true` or `false`"}.get(schema["type"], schema["type"])
    bounds = {"minimum": "at least", "maximum": "at most", "exclusiveMinimum": "above"}
    return ", ".join([kind, *(f"{word} {schema[key]}" for key, word in bounds.items() if key in schema)])


def command_line_page() -> str:
    """What `layerproof --help` prints, and the help of each verb for people."""
    sys.path.insert(0, str(REPOSITORY / "workflow"))
    os.environ["COLUMNS"] = "100"  # how wide argparse writes
    from layerproof import cli

    top = cli.parser()
    verbs = next(action.choices for action in top._actions if isinstance(action.choices, dict))
    lines = ["# Command line", "", "`layerproof --help` prints:", "", "```text", top.format_help().rstrip(), "```"]
    for verb in cli.ORDER:
        lines += ["", f"## layerproof {verb}", "", "```text", verbs[verb].format_help().rstrip(), "```"]
    return "\n".join(lines) + "\n"


def api_page() -> str:
    """The public modules, by their docstrings."""
    lines = ["# API", "", "What a port imports, and what the library's packages are. Everything else may change."]
    for module in API:
        lines += ["", f"::: {module}", *(["    options:", "      members: false"] if module == "layerproof" else [])]
    return "\n".join(lines) + "\n"


GENERATED: dict[str, Callable[[], str]] = {
    "config.md": config_page,
    "command-line.md": command_line_page,
    "api.md": api_page,
}
"""Pages that are made when the site is built, by name."""
