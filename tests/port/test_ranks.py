"""The ranks of a job, in real processes."""

import os
import re
import signal
import sys
import time
from datetime import timedelta
from types import SimpleNamespace

import psutil
import pytest

from configs import config_with
from layerproof.errors import StageError, StageMissing
from layerproof.failures import end_with
from layerproof.port import ranks
from layerproof.rerun import recorder
from processes import afresh

pytestmark = pytest.mark.slow


def sum_of_ranks():
    def work(rank):
        import torch
        import torch.distributed as dist

        from layerproof.distributed import process_group as distributed

        assert distributed.is_on_host("CPU") and distributed.is_on_host("auto") and not distributed.is_on_host("NEURON")
        environment = distributed.initialise("cpu")
        total = torch.tensor([10.0**rank])
        dist.all_reduce(total)
        every = distributed.of_all_ranks({"rank": rank})
        return environment.rank, environment.world_size, os.environ["LOCAL_RANK"], total.item(), len(every)

    before = dict(os.environ)
    done = ranks.run(3, work)
    assert dict(os.environ) == before
    return done


def test_each_rank_has_its_number_and_all_can_talk(monkeypatch):
    monkeypatch.delenv("PJRT_DEVICE", raising=False)
    done = afresh(sum_of_ranks)
    assert [one.value for one in done] == [(rank, 3, str(rank), 111.0, 3) for rank in range(3)]
    assert all(one.peak_rss_bytes > 1 << 20 for one in done)


def crossed_groups():
    def work(rank):
        import torch.distributed as dist

        from layerproof.distributed import process_group

        process_group.initialise("cpu")
        for members in ([0], [1]) if rank == 0 else ([1], [0]):
            dist.new_group(members)

    with pytest.raises(StageError) as raised:
        ranks.run(2, work)
    return str(raised.value), f"at {__file__}:{work.__code__.co_firstlineno + 7}"


def test_groups_that_ranks_create_in_another_order_end_the_job():
    told, at = afresh(crossed_groups)
    differ = f"rank 0 creates new_group([0]) {at}; rank 1 creates new_group([1]) {at}"
    assert f"group 0 is not the same on all ranks: {differ}. All ranks must create all groups in one order." in told


def what_ranks_begin_with(device, folder):
    from layerproof.port.verbs import by_ranks

    def make(part):
        raise StageError(f"{'torch_xla' in sys.modules}")

    settings = config_with(port={"device": device}, parallel={"tp": 2})
    job = SimpleNamespace(name="port/embed", config=settings)
    crew = ranks.Crew("fork", settings.parallel.of_stage)
    args = SimpleNamespace(job=[job], log=[], tokens=folder / "tokens.json")
    with pytest.raises(StageError) as caught:
        by_ranks(crew, args, job, make, folder / "embed.h5")()
    return str(caught.value)


@pytest.mark.parametrize(("device", "begin_with_it"), [("CPU", "True"), ("NEURON", "False")])
def test_ranks_begin_with_imported_packages_if_that_touches_no_device(tmp_path, device, begin_with_it):
    assert afresh(what_ranks_begin_with, device, tmp_path) == begin_with_it


def stages_of_one_crew(folder):
    calls = []

    def counted(rank, stage):
        from layerproof.distributed import process_group

        process_group.initialise("cpu")
        calls.append(stage)
        print(f"rank {rank} in {stage}", flush=True)
        return os.getpid(), list(calls)

    works = {name: ranks.Work(counted, folder / f"{name}.log") for name in ("embed", "norm")}
    crew = ranks.Crew("fork", {"tp": 2}, works=works)
    values = [[one.value for one in crew.run(name, name)] for name in works]
    crew.end()
    return values


def test_ranks_stay_for_the_stages_of_their_job(tmp_path):
    first, second = afresh(stages_of_one_crew, tmp_path)
    assert [(pid, ["embed", "norm"]) for pid, _ in first] == second and len(set(first[0][:1] + first[1][:1])) == 2
    for stage in ("embed", "norm"):
        said = (tmp_path / f"{stage}.log").read_text()
        assert sorted(re.findall(r"rank \d in \w+", said)) == [f"rank {rank} in {stage}" for rank in range(2)]


def dying(folder, times):
    """A work in which rank 1 is killed that often."""

    def work(rank):
        died = folder / f"died {len(list(folder.iterdir()))}"
        if rank == 1 and len(list(folder.iterdir())) < times:
            died.touch()
            os.kill(os.getpid(), signal.SIGKILL)
        return rank

    return ranks.Work(work)


def test_a_stage_whose_rank_was_killed_runs_again_as_often_as_the_config_says(tmp_path, caplog):
    crew = ranks.Crew("fork", {"tp": 2}, retries=1, works={"norm": dying(tmp_path, 1)})
    assert [one.value for one in crew.run("norm")] == [0, 1]
    assert "rank 1: Its process was killed by SIGKILL" in caplog.text and "for time 1 of 1" in caplog.text
    crew.works["norm"] = dying(tmp_path, 3)
    crew.end()
    with pytest.raises(StageError, match="rank 1: Its process was killed by SIGKILL"):
        crew.run("norm")


def test_a_stage_whose_rank_says_what_is_wrong_does_not_run_again(tmp_path):
    def work(rank):
        (tmp_path / f"{time.monotonic()}").touch()
        raise StageError("no weights for me")

    with pytest.raises(StageError, match="no weights"):
        ranks.Crew("fork", {"tp": 1}, retries=3, works={"norm": ranks.Work(work)}).run("norm")
    assert len(list(tmp_path.iterdir())) == 1


def test_a_rank_that_fails_ends_the_others_and_is_named():
    def work(rank):
        if rank == 1:
            raise ValueError("no weights for me")
        time.sleep(60)

    started, before = time.monotonic(), psutil.Process().children()
    with pytest.raises(StageError) as caught:
        ranks.run(3, work)
    assert time.monotonic() - started < 30
    assert str(caught.value).startswith("rank 1: ValueError at test_ranks.py:")
    assert str(caught.value).endswith("no weights for me")
    assert psutil.Process().children() == before


def a_rank_killed_in_a_collective():
    def work(rank):
        import torch
        import torch.distributed as dist

        from layerproof.distributed import process_group

        process_group.initialise("cpu")
        for step in range(3):
            if rank == 1 and step == 2:
                time.sleep(1)  # its marks are posted meanwhile
                os.kill(os.getpid(), signal.SIGKILL)
            dist.all_reduce(torch.ones(2))

    with pytest.raises(StageError) as raised:
        ranks.run(3, work)
    return str(raised.value), f"{__file__}:{work.__code__.co_firstlineno + 11}"


def test_a_rank_that_is_killed_is_named_with_its_last_step():
    told, at = afresh(a_rank_killed_in_a_collective)
    assert told.startswith("rank 1: Its process was killed by SIGKILL (out of memory, or killed by hand).")
    assert told.endswith(f" Its last step was all_reduce(float32[2], SUM) at {at}.")


def ranks_that_hang():
    def work(rank):
        import torch.distributed as dist

        from layerproof.distributed import process_group

        process_group.initialise("cpu", timeout=timedelta(seconds=3))
        if rank == 1:
            dist.barrier()
        time.sleep(60)

    before = psutil.Process().children()
    with pytest.raises(StageError) as raised:
        ranks.run(3, work)
    return str(raised.value), f"{__file__}:{work.__code__.co_firstlineno + 7}", psutil.Process().children() == before


def test_ranks_that_hang_end_as_one_error_that_says_why_with_a_table_in_the_log(capfd):
    told, at, is_clean = afresh(ranks_that_hang)
    assert "\n" not in told and f"barrier at {at}" in told and is_clean
    assert re.search(r"^  step +rank", capfd.readouterr().err, re.M)


def test_what_all_ranks_say_is_said_once():
    def work(rank):
        time.sleep(0.2 * rank)
        raise StageMissing("no input, because an earlier stage failed")

    with pytest.raises(StageMissing) as caught:
        ranks.run(3, work)
    assert str(caught.value) == "no input, because an earlier stage failed"


@pytest.mark.parametrize(
    ("end", "text"),
    [
        (
            lambda: os.kill(os.getpid(), signal.SIGKILL),
            "Its process was killed by SIGKILL (out of memory, or killed by",
        ),
        (lambda: os._exit(3), "Its process ended with exit code 3 before its output was written. Its log shows"),
        (lambda: os.fork() and os._exit(4), "Its process ended with exit code 4"),
        (lambda: sys.exit("no licence"), "SystemExit"),
    ],
)
def test_a_rank_that_dies_is_told(end, text):
    def work(rank):
        if rank == 1:
            end()
        time.sleep(60)

    with pytest.raises(StageError, match=r"^rank 1: ") as caught:
        ranks.run(2, work)
    assert text in str(caught.value)


def test_the_rank_that_died_is_blamed_and_not_those_that_miss_it():
    def work(rank):
        if rank == 1:
            os.kill(os.getpid(), signal.SIGSEGV)
        time.sleep(0.5)
        raise RuntimeError("connection closed by peer")

    with pytest.raises(StageError, match=r"^rank 1: Its process was killed by SIGSEGV"):
        ranks.run(3, work)


def test_code_that_was_edited_between_ranks_is_none_that_a_later_run_has():
    done = [ranks.Done(None, {"port.py::": text, "port.py::run": "same"}, 0) for text in ("edited", "plain", "plain")]
    code = ranks.code_of(done)
    assert code["port.py::"] not in ("edited", "plain") and code["port.py::run"] == "same"


def test_what_any_rank_ran_counts(tmp_path, monkeypatch):
    (tmp_path / "of_ranks.py").write_text("def first():\n    pass\n\ndef second():\n    pass\n")
    monkeypatch.setattr(recorder, "STARTED", time.time() + 60)
    monkeypatch.syspath_prepend(str(tmp_path))

    def work(rank):
        import of_ranks

        of_ranks.second() if rank else of_ranks.first()

    code = ranks.code_of(ranks.run(2, work))
    names = {entry.rpartition("::")[2] for entry in code if "of_ranks.py" in entry}
    assert {"first", "second"} <= names


def test_ranks_end_with_their_job(tmp_path):
    def job(_):
        def work(rank):
            (tmp_path / str(rank)).write_text(str(os.getpid()))
            time.sleep(120)

        ranks.run(2, work)

    child = os.fork()
    if child == 0:
        end_with(os.getppid())
        job(0)
        os._exit(0)
    while len([path for path in tmp_path.iterdir() if path.read_text()]) < 2:
        time.sleep(0.05)
    processes = [psutil.Process(int(path.read_text())) for path in tmp_path.iterdir()]
    os.kill(child, signal.SIGKILL)
    os.waitpid(child, 0)
    _, alive = psutil.wait_procs(processes, timeout=10)
    assert not [process for process in alive if process.status() != psutil.STATUS_ZOMBIE]


def code_of_ranks():
    def work(rank):
        from layerproof.distributed import process_group

        process_group.initialise("cpu")
        time.sleep(0.6)  # the doctor looks meanwhile

    return ranks.code_of(ranks.run(2, work))


def test_what_the_doctor_finds_time_for_is_not_recorded():
    files = {entry.rpartition("::")[0].rpartition("/")[2] for entry in afresh(code_of_ranks)}
    assert "process_group.py" in files and not {"doctor.py", "board.py", "watching.py", "marks.py"} & files
