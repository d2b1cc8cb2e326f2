"""`make docs`: the site is built without a warning, has every page, and loads nothing from elsewhere."""

import json
import os
import re
import shutil
import subprocess

import pytest
import yaml

from configs import REPOSITORY
from environments import install
from layerproof import cli

pytestmark = pytest.mark.slow

NEEDED = (
    "mkdocs.yml",
    "pyproject.toml",
    "README.md",
    "CONTRIBUTING.md",
    "CHANGELOG.md",
    "RELEASING.md",
    "results/README.md",
    "containers/README.md",
)
"""What the site is made of besides docs/ and workflow/."""


def build(repository, site):
    """Builds the site as `make docs` does, in the environment of requirements/docs.txt. Not with --quiet, where --strict
    finds nothing.
    """
    program = install(REPOSITORY / "requirements/docs.txt") / "mkdocs"
    return subprocess.run(
        [program, "build", "--strict", "--site-dir", site],
        cwd=repository,
        env={**os.environ, "NO_MKDOCS_2_WARNING": "1"},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )


@pytest.fixture(scope="module")
def site(tmp_path_factory):
    folder = tmp_path_factory.mktemp("site")
    done = build(REPOSITORY, folder)
    assert done.returncode == 0 and "WARNING" not in done.stdout, done.stdout
    return folder


def page(site, name):
    return (site / f"{name}.html").read_text()


def test_every_page_of_the_navigation_is_there(site):
    sections = yaml.safe_load((REPOSITORY / "mkdocs.yml").read_text())["nav"]
    names = [name for section in sections for pages in section.values() for one in pages for name in one.values()]
    assert len(names) > 20
    for name in names:
        assert (site / name.replace("README.md", "index.md").replace(".md", ".html")).exists(), name


def test_it_loads_nothing_from_elsewhere(site):
    for path in site.rglob("*.html"):
        tags = re.findall(r"<(?:link|script|img|iframe|source)\b[^>]*>", path.read_text())
        assert tags and not [tag for tag in tags if re.search(r'(?:href|src)="?(?:https?:)?//', tag)], path
    assert "@import" not in "".join(path.read_text() for path in site.rglob("*.css"))


def test_the_references_are_complete(site):
    schema = yaml.safe_load((REPOSITORY / "workflow/schemas/config.schema.yaml").read_text())
    config = page(site, "config")
    for section, content in schema["properties"].items():
        for key in content.get("properties", [None]):
            name = f"{section}.{key}" if key else section
            assert f'id="{name.replace(".", "")}"' in config, name
    assert all(f"layerproof {verb}" in page(site, "command-line") for verb in cli.ORDER)
    assert "layerproof.port.contract.Stage" in page(site, "api") and "layerproof.taps.tap" in page(site, "api")


def test_the_search_finds_a_key_and_a_cause(site):
    index = json.loads((site / "search/search_index.json").read_text())
    found = {entry["location"] for entry in index["docs"]}
    assert {"config.html#comparelimit", "causes.html#rope_theta"} <= found


def test_a_dead_link_fails(tmp_path):
    """In a page of docs/ and in one that lies elsewhere, to a file and to a heading."""
    for name in NEEDED:
        (tmp_path / name).parent.mkdir(exist_ok=True)
        shutil.copy(REPOSITORY / name, tmp_path / name)
    shutil.copytree(REPOSITORY / "docs", tmp_path / "docs")
    (tmp_path / "workflow").symlink_to(REPOSITORY / "workflow")
    with open(tmp_path / "README.md", "a") as file:
        file.write("\n[a](docs/nowhere.md) [b](docs/ports.md#nowhere)\n")
    with open(tmp_path / "docs/aws/README.md", "a") as file:
        file.write("\n[c](../../workflow/nowhere.py) [d](../../Makefile)\n")
    shutil.copy(REPOSITORY / "Makefile", tmp_path)
    done = build(tmp_path, tmp_path / "built")
    assert done.returncode
    warnings = [line for line in done.stdout.splitlines() if line.startswith("WARNING")]
    assert len(warnings) == 3, done.stdout
    for target in ("docs/nowhere.md", "#nowhere", "../../workflow/nowhere.py"):
        assert any(target in line for line in warnings), done.stdout
