"""What a job does on several threads is what it does on one."""

import threading

import numpy as np
import pytest
import torch

from layerproof.compare.stage import compare_taps
from layerproof.measure.noise import noise_of_taps
from layerproof.model import loading
from layerproof.model.stages import all_stages
from layerproof.tensors import hdf5
from layerproof.tensors.tensor import Tensor
from layerproof.threads import declared, mapped


@pytest.mark.parametrize(("text", "count"), [("", 1), ("4", 4), ("0", 1), ("2,1", 1), ("many", 1)])
def test_a_job_has_the_threads_that_its_rule_declares(monkeypatch, text, count):
    monkeypatch.setenv("OMP_NUM_THREADS", text)
    assert declared() == count


def test_results_come_in_order_and_the_first_error_is_raised(monkeypatch):
    monkeypatch.setenv("OMP_NUM_THREADS", "4")
    together = threading.Barrier(4, timeout=60)
    assert mapped(lambda value: (together.wait(), value)[1], range(4)) == [0, 1, 2, 3]

    def fail(value):
        raise ValueError(value)

    with pytest.raises(ValueError, match=r"^1$"):
        mapped(fail, [1, 2, 3])


def taps(seed):
    random = torch.Generator().manual_seed(seed)
    exact = {f"attn.{name}": torch.randn(2, 40, 64, generator=random) for name in "qkv"} | {
        "out": torch.ones(2, 40, 64)
    }
    near = [{name: (x * (1 + 2e-3 * draw)).bfloat16() for name, x in exact.items()} for draw in (1, 2, 3)]
    return [{name: hdf5.to_array(x) for name, x in one.items()} for one in (exact, *near)]


def test_a_file_is_the_same_on_any_number_of_threads(monkeypatch, tmp_path):
    """Its statistics are computed four at a time: eight tensors, of which one has another shape and thus no statistics."""
    truth, golden, *_ = taps(0)
    golden |= {"attn.k": Tensor(golden["attn.k"].data[:, :-1], "bfloat16"), "attn.x": golden["attn.q"]}
    valid = np.ones((2, 40), bool)
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    hdf5.write(tmp_path / "one", {"golden": golden, "truth": truth}, valid=valid)
    together, real = threading.Barrier(4, timeout=60), hdf5.statistics
    monkeypatch.setenv("OMP_NUM_THREADS", "4")
    monkeypatch.setattr(hdf5, "statistics", lambda *given: (together.wait(), real(*given))[1])
    hdf5.write(tmp_path / "four", {"golden": golden, "truth": truth}, valid=valid)
    assert (tmp_path / "one").read_bytes() == (tmp_path / "four").read_bytes()


@pytest.mark.parametrize("seed", range(3))
def test_noise_and_comparison_are_the_same_on_any_number_of_threads(monkeypatch, seed):
    truth, golden, variant, port = taps(seed)
    port["attn.k"] = Tensor(port["attn.k"].data[:, :, :-1], "bfloat16")
    valid = np.ones((2, 40), bool)
    found = []
    for count in ("1", "4"):
        monkeypatch.setenv("OMP_NUM_THREADS", count)
        noise = noise_of_taps(golden, [variant], truth, valid)
        found.append((noise, compare_taps("layer_000", port, golden, truth, noise, valid, 1.5)))
    (noise, one), (noises, four) = found
    assert one == four and list(one["taps"]) == list(four["taps"]) == list(golden)
    for name in noise:
        assert np.array_equal(noise[name].token, noises[name].token) and noise[name].band == noises[name].band


def test_digests_of_weights_are_the_same(monkeypatch, trained):
    stages = all_stages(6)
    found = []
    for count in ("1", "4"):
        monkeypatch.setenv("OMP_NUM_THREADS", count)
        found.append(loading.describe_stages(trained, stages, False))
    assert found[0] == found[1]
    assert [list(one["tensors"]) for one in found[0][0].values()] == [
        list(one["tensors"]) for one in found[1][0].values()
    ]
