import pytest

from archives import finish_run
from layerproof.report import archive as archives


@pytest.fixture
def results(tmp_path, monkeypatch):
    """A small results/ as a run leaves it, with the manifest written."""
    (tmp_path / "run").mkdir()
    monkeypatch.chdir(tmp_path / "run")
    return finish_run()


@pytest.fixture
def archive(results):
    path = results / "archive/run.zip"
    archives.write(results / "manifest.json", path)
    return path


@pytest.fixture
def verified(capsys):
    """What `verify` returns for a path, and the lines that it prints."""

    def verify(path):
        capsys.readouterr()
        code = archives.verify(path)
        return code, capsys.readouterr().out.splitlines()

    return verify
