"""A port that changes the process it runs in leaves no trace in the next stage."""

import os
import random
import subprocess
import sys
import textwrap

import numpy as np
import pytest
import torch

from layerproof.rerun.traces import leaving_no_trace

pytestmark = pytest.mark.slow

DOES = {
    "the default dtype": "torch.set_default_dtype(torch.float64)",
    "the default device": "torch.set_default_device('meta')",
    "the default device, to none": "torch.set_default_device(None)",
    "the number of threads": "torch.set_num_threads(7)",
    "the working directory": "os.chdir('/')",
    "random states": "random.seed(1), np.random.seed(1), torch.manual_seed(1)",
    "gradients": "torch.set_grad_enabled(False)",
    "how numpy tells of errors": "np.seterr(all='raise')",
    "algorithms": "torch.use_deterministic_algorithms(True)",
}


def state():
    return [
        torch.get_default_dtype(),
        torch.ones(1).device,
        default_device(),
        torch.get_num_threads(),
        os.getcwd(),
        random.getstate(),
        np.random.get_state()[1].tolist(),
        torch.random.get_rng_state().tolist(),
        torch.is_grad_enabled(),
        np.geterr(),
        torch.are_deterministic_algorithms_enabled(),
    ]


def default_device():
    try:
        return torch.get_default_device()
    except AttributeError as error:  # what transformers gets, too, after set_default_device(None)
        return str(error)


@pytest.mark.parametrize("what", DOES)
def test_what_code_changes_is_put_back(what):
    before = state()
    with leaving_no_trace():
        exec(DOES[what], {"torch": torch, "os": os, "np": np, "random": random})
        assert state() != before, "or this tests nothing"
    assert state() == before


def test_what_code_changes_is_put_back_after_an_error():
    before = state()
    with pytest.raises(ZeroDivisionError), leaving_no_trace():
        torch.set_default_dtype(torch.float64)
        raise ZeroDivisionError
    assert state() == before


def test_what_the_first_job_changes_in_a_library_that_it_imports_is_put_back():
    program = """
        from layerproof.rerun.traces import leaving_no_trace
        with leaving_no_trace():
            import numpy as np, torch
            before = np.geterr(), torch.get_num_threads()
            np.seterr(all="raise"), torch.set_num_threads(7), torch.manual_seed(1), np.random.seed(1)
            drawn = torch.rand(1), np.random.rand()
            torch.manual_seed(1), np.random.seed(1)
        assert before == (np.geterr(), torch.get_num_threads())
        assert drawn != (torch.rand(1), np.random.rand())
    """
    environment = os.environ | {"PYTHONPATH": "workflow", "OMP_NUM_THREADS": "2"}
    subprocess.run([sys.executable, "-c", textwrap.dedent(program)], check=True, env=environment)


def test_a_fork_that_goes_on_ends_with_the_job(tmp_path):
    program = f"""
        import os
        from layerproof.rerun.traces import leaving_no_trace
        with leaving_no_trace():
            os.fork()
        open({str(tmp_path / "ended")!r}, "a").write("once\\n")
    """
    subprocess.run(
        [sys.executable, "-c", textwrap.dedent(program)], check=True, env=os.environ | {"PYTHONPATH": "workflow"}
    )
    assert (tmp_path / "ended").read_text() == "once\n"
