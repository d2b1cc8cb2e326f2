"""Files of a golden that goes to another host: what is packed, what is taken, and what is refused."""

import contextlib
import dataclasses
import json
import os
import zipfile
from pathlib import Path

import pytest

from layerproof.errors import UserError
from layerproof.files import sha256, write_json
from layerproof.golden import transfer
from layerproof.rerun import fingerprint
from layerproof.rerun.job import Job
from layerproof.rerun.records import Record, described
from layerproof.tensors.pruning import MAGIC

SETTINGS = {
    "golden": {"dtype": "bfloat16", "attn_implementation": None, "experts_implementation": None},
    "model": {"checkpoint": "model", "trust_remote_code": False},
}


def job_of(settings=SETTINGS, with_taps=True, stage="layer_001"):
    return Job(f"golden/{stage}", settings, {"with_taps": with_taps}, {}, "new", "it has not run before", "new")


def with_setting(section, **values):
    return SETTINGS | {section: SETTINGS[section] | values}


HERE = with_setting("golden", storage="s3://runs/one")
IMPORT = job_of(HERE)
"""The job that imports what the other host exported."""


class Host:
    """The files of layer_001 as a golden's host leaves them, in the working directory."""

    def __init__(self, folder, monkeypatch):
        monkeypatch.chdir(folder)
        self.folder = folder
        for name in ("golden", "noise", "weights", "records/golden"):
            (folder / "results" / name).mkdir(parents=True)
        for name, content in {
            "results/golden/layer_000.h5": "before",
            "results/noise/layer_000.h5": "noise before",
            "results/golden/layer_001.h5": "tensors" * 1000,
            "results/noise/layer_001.h5": "noise",
            "results/tokens.json": "tokens",
            "config.json": "config",
        }.items():
            (folder / name).write_text(content)
        self.outputs = [self.path(f"results/{name}/layer_001.h5") for name in ("golden", "noise")]
        self.record = self.path("results/records/golden/layer_001.json")
        self.own = transfer.LocalInputs(
            self.path("results/weights/layer_001.json"),
            self.path("results/tokens.json"),
            self.path("config.json"),
            [self.path(f"results/{name}/layer_000.h5") for name in ("golden", "noise")],
        )
        write_json(self.own.weights, {"digest": "abc", "tensors": {}})
        self.zip = self.path("layer_001.zip")

    def path(self, name):
        return (self.folder / name).relative_to(self.folder)

    def made(self, job=None, code=None, error=None):
        names = {
            "results/weights/layer_001.json",
            "results/tokens.json",
            str(self.own.config),
            "results/golden/layer_000.h5",
            "results/noise/layer_000.h5",
        }
        digests = {name: sha256(Path(name)) for name in names}
        Record(job or job_of(), digests, described(self.outputs), code or {}, error).write(self.record)
        transfer.pack(self.zip, self.record, self.own.weights)


@pytest.fixture
def host(tmp_path, monkeypatch):
    return Host(tmp_path, monkeypatch)


def test_what_was_packed_is_taken_as_it_was(host):
    host.made()
    before = [path.read_bytes() for path in host.outputs]
    for path in host.outputs:
        path.unlink()
    transfer.check(host.zip, host.own, IMPORT)
    assert transfer.unpack(host.zip, host.outputs) == Record.read(host.record)
    assert [path.read_bytes() for path in host.outputs] == before


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (lambda host: write_json(host.own.weights, {"digest": "abd"}), "was computed from other weights"),
        (lambda host: host.own.tokens.write_text("others"), "was computed from other tokens"),
        (lambda host: host.own.config.write_text("others"), "another config.json of the checkpoint"),
        (lambda host: host.own.before[0].write_text("others"), "was not computed from this host's layer_000"),
        (
            lambda host: host.own.before[1].write_text("others"),
            "was not computed from this host's layer_000.*--forcerun import_golden",
        ),
    ],
)
def test_what_was_made_from_something_else_is_refused(host, change, words):
    host.made()
    change(host)
    with pytest.raises(UserError, match=rf"s3://runs/one/layer_001\.zip: .*{words}"):
        transfer.check(host.zip, host.own, IMPORT)


@pytest.mark.parametrize(
    ("job", "code", "words"),
    [
        (job_of(with_setting("golden", dtype="float16")), None, "golden.dtype float16, but this host has bfloat16"),
        (job_of(with_setting("golden", attn_implementation="eager")), None, "golden.attn_implementation eager"),
        (job_of(with_setting("golden", experts_implementation="eager")), None, "golden.experts_implementation eager"),
        (
            job_of(with_setting("model", trust_remote_code=True)),
            None,
            "model.trust_remote_code True, but this host has False",
        ),
        (job_of(with_taps=False), None, "without taps"),
        (
            job_of(),
            {"layerproof/golden/stage.py::make_stage": "another"},
            r"code \(layerproof/golden/stage.py",
        ),
    ],
)
def test_what_was_made_otherwise_is_refused(host, job, code, words):
    host.made(job, code)
    with pytest.raises(UserError, match=words):
        transfer.check(host.zip, host.own, IMPORT)


def test_settings_that_the_golden_does_not_depend_on_may_be_others(host):
    host.made(
        job_of(
            with_setting("golden", device="cuda", mode="whole") | {"model": {**SETTINGS["model"], "checkpoint": "m"}}
        )
    )
    transfer.check(host.zip, host.own, IMPORT)


def test_code_that_is_not_the_librarys_and_taps_that_nobody_asks_for_do_not_matter(host):
    host.made(code={"/opt/python/torch/nn.py::linear": "another", "other.py::forward": "another"})
    transfer.check(host.zip, host.own, job_of(HERE, with_taps=False))


def test_the_first_stage_has_none_before_it(host):
    host.made()
    own = transfer.LocalInputs(host.own.weights, host.own.tokens, host.own.config, [])
    transfer.check(host.zip, own, IMPORT)


def test_code_that_came_with_the_checkpoint_is_compared_by_the_file_beside_it(host):
    source = host.path("modeling.py")
    source.write_text("def forward(x):\n    return x + 1\n")
    code = {"/elsewhere/modeling.py::forward": fingerprint.current(f"{source.absolute()}::forward")}
    host.made(code=code)
    transfer.check(host.zip, host.own, IMPORT)
    source.write_text("def forward(x):\n    return x + 2\n")
    with pytest.raises(UserError, match=r"other code \(.*modeling\.py::forward\)"):
        transfer.check(host.zip, host.own, IMPORT)


def test_equal_jobs_have_equal_files_whenever_they_were_written(host):
    host.made()
    before = host.zip.read_bytes()
    for path in (*host.outputs, host.own.weights):
        os.utime(path, (0, 0))
    transfer.pack(host.zip, host.record, host.own.weights)
    assert host.zip.read_bytes() == before


def test_a_golden_that_failed_is_not_exported(host):
    host.made()
    before = host.zip.read_bytes()
    with pytest.raises(UserError, match=r"layer_001\.h5: its job failed, so it cannot be exported: no memory"):
        host.made(error="no memory")
    assert host.zip.read_bytes() == before


def test_a_checkpoint_in_a_folder_of_any_name_is_taken(host):
    folder = host.folder / "noise/golden/model"
    folder.mkdir(parents=True)
    host.own.config.rename(folder / "config.json")
    host.own = dataclasses.replace(host.own, config=folder / "config.json")
    host.made()
    transfer.check(host.zip, host.own, IMPORT)


def test_no_bit_that_is_flipped_makes_more_than_a_line(host):
    host.made()
    whole = host.zip.read_bytes()
    before = [path.read_bytes() for path in host.outputs]
    for place in range(0, len(whole), 7):
        damaged = bytearray(whole)
        damaged[place] ^= 1 << place % 8
        host.zip.write_bytes(damaged)
        with contextlib.suppress(UserError, OSError):
            transfer.unpack(host.zip, host.outputs)
        assert [path.read_bytes() for path in host.outputs] == before


def test_a_damaged_file_leaves_what_is_there(host):
    host.made()
    for path in host.outputs:
        path.write_text("older")
    content = bytearray(host.zip.read_bytes())
    with zipfile.ZipFile(host.zip) as file:  # the second output: the first one is whole
        info = file.getinfo(str(host.outputs[1]))
    extra = int.from_bytes(content[info.header_offset + 28 : info.header_offset + 30], "little")
    content[info.header_offset + 30 + len(info.filename) + extra] ^= 1
    for damaged in (bytes(content), host.zip.read_bytes()[:-300], b"", b"no zip file"):
        host.zip.write_bytes(damaged)
        with pytest.raises(UserError, match=r"layer_001\.zip: .*damaged"):
            transfer.unpack(host.zip, host.outputs)
        assert [path.read_text() for path in host.outputs] == ["older", "older"]
        assert not list(host.folder.rglob("*.tmp"))


def test_an_output_that_the_record_does_not_describe_is_found_out(host):
    host.made()
    with zipfile.ZipFile(host.zip) as file:
        parts = {name: file.read(name) for name in file.namelist()}
    parts[str(host.outputs[0])] = b"others"
    with zipfile.ZipFile(host.zip, "w") as file:
        for name, content in parts.items():
            file.writestr(name, content)
    with pytest.raises(UserError, match=r"results/golden/layer_001\.h5 in it is damaged"):
        transfer.unpack(host.zip, host.outputs)


@pytest.mark.parametrize(
    "content", [{"schema_version": 1}, {"schema_version": 2}, {"schema_version": 2, "job": None}, [], {}]
)
def test_a_record_of_another_version_is_told(host, content):
    with zipfile.ZipFile(host.zip, "w") as file:
        file.writestr(transfer.RECORD, json.dumps(content))
    with pytest.raises(UserError, match="another version"):
        transfer.unpack(host.zip, host.outputs)


def test_the_file_of_another_job_is_told(host):
    host.made()
    with pytest.raises(UserError, match=r"contains results/golden/layer_001\.h5"):
        transfer.unpack(host.zip, [host.path("results/golden/layer_002.h5")])


def test_only_what_the_record_describes_is_packed(host):
    host.made()
    host.zip.unlink()
    write_json(host.own.weights, {"digest": "of others", "tensors": {}})
    with pytest.raises(
        UserError, match=r"weights/layer_001\.json: has changed since results/golden/layer_001\.h5 was computed"
    ):
        transfer.pack(host.zip, host.record, host.own.weights)
    host.outputs[0].write_bytes(MAGIC + b" abc 10 def".ljust(600, b"\0"))
    with pytest.raises(UserError, match="contains only outputs"):
        transfer.pack(host.zip, host.record, None)
    for change in (lambda: host.outputs[0].write_text("others"), host.outputs[0].unlink):
        change()
        with pytest.raises(UserError, match=r"layer_001\.h5: does not match"):
            transfer.pack(host.zip, host.record, None)
    host.record.unlink()
    with pytest.raises(UserError, match="cannot be read"):
        transfer.pack(host.zip, host.record, None)
    assert not host.zip.exists()
