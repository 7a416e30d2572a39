import signal
import tempfile
import time
from pathlib import Path

import pytest
import torch

from cgprof.errors import ConfigError, DeviceError, RankError
from cgprof.parallel.grid import Rank
from cgprof.parallel.launch import find_rank, launch
from tests.support.children import ROOT
from tests.support.launches import (
    alive,
    launch_script,
    process_ids,
    start_parent,
    until,
    write_script,
)

TORCHRUN = {"RANK": "5", "WORLD_SIZE": "8", "LOCAL_RANK": "1"}
SLURM = {
    "SLURM_PROCID": "3",
    "SLURM_NTASKS": "4",
    "SLURM_STEP_NUM_TASKS": "4",
    "SLURM_LOCALID": "1",
}
SLEEP = "\nready()\nsignal.pause()\n"


@pytest.fixture(autouse=True)
def temporary(tmp_path, monkeypatch):
    """Ranks find the package; what a launch leaves behind is seen."""
    folder = tmp_path / "temporary"
    folder.mkdir()
    monkeypatch.setenv("PYTHONPATH", str(ROOT))
    monkeypatch.setenv("TMPDIR", str(folder))
    monkeypatch.setattr(tempfile, "tempdir", None)
    return folder


def launch_and_fail(folder, body, count=2):
    with pytest.raises(RankError) as caught:
        launch_script(folder, body, count)
    assert len(process_ids(folder)) == count
    assert alive(process_ids(folder)) == []
    return caught.value


def test_torchrun_s_and_slurm_s_ranks_are_found():
    assert find_rank(TORCHRUN) == Rank(5, 8, 1)
    assert find_rank(SLURM) == Rank(3, 4, 1)
    assert find_rank({**SLURM, **TORCHRUN}) == Rank(5, 8, 1)


@pytest.mark.parametrize(
    "environ",
    [
        {},
        {"SLURM_PROCID": "0", "SLURM_NTASKS": "4", "SLURM_LOCALID": "0"},  # a batch script
        {**SLURM, "SLURM_STEP_NUM_TASKS": "1", "SLURM_PROCID": "0"},
        {"WORLD_SIZE": "8"},
    ],
)
def test_a_process_that_is_no_rank_is_none(environ):
    assert find_rank(environ) is None


@pytest.mark.parametrize(
    ("environ", "name"),
    [
        ({"RANK": "0", "WORLD_SIZE": "2"}, "LOCAL_RANK"),
        ({"RANK": "0", "LOCAL_RANK": "0"}, "WORLD_SIZE"),
        ({**TORCHRUN, "RANK": "8"}, "RANK"),
        ({**TORCHRUN, "LOCAL_RANK": "8"}, "LOCAL_RANK"),
        ({**TORCHRUN, "RANK": "-1"}, "RANK"),
        ({**SLURM, "SLURM_PROCID": "x"}, "SLURM_PROCID"),
    ],
)
def test_half_a_rank_is_refused(environ, name):
    with pytest.raises(ConfigError, match=rf"environment: {name} is"):
        find_rank(environ)


def test_only_rank_0_reaches_the_terminal(tmp_path, temporary, capfd):
    body = """
print(f"out {rank}", flush=True)
print(f"progress {rank}", file=sys.stderr, flush=True)
"""
    assert launch_script(tmp_path, body, count=3) == 0
    assert capfd.readouterr() == ("out 0\n", "progress 0\n")
    assert list(temporary.iterdir()) == []


def test_ranks_know_who_and_where_they_are(tmp_path):
    body = """
import socket
names = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "TORCHELASTIC_USE_AGENT_STORE")
(here / f"{rank}.env").write_text(" ".join(os.environ[name] for name in names))
socket.create_connection((os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"]))).close()
"""
    assert launch_script(tmp_path, body) == 0
    found = [(tmp_path / "pids" / f"{rank}.env").read_text() for rank in range(2)]
    assert found == ["0 2 0 127.0.0.1 True", "1 2 1 127.0.0.1 True"]


def test_rank_0_s_result_is_the_launch_s(tmp_path, temporary):
    assert launch_script(tmp_path, "\nsys.exit(report_result(rank, 1 - rank))\n") == 1
    assert list(temporary.iterdir()) == []


def test_the_handlers_of_signals_are_what_they_were(tmp_path):
    before = {taken: signal.getsignal(taken) for taken in (signal.SIGINT, signal.SIGTERM)}
    launch_script(tmp_path, "")
    assert {taken: signal.getsignal(taken) for taken in before} == before


@pytest.mark.parametrize("code", [2, 3])
def test_a_reported_error_ends_the_others_and_is_the_user_s(tmp_path, temporary, capfd, code):
    body = f"""
ready()
if rank == 1:
    report_failure(rank, "model: no such family", {code})
    sys.exit({code})
signal.pause()
"""
    error = launch_and_fail(tmp_path, body, count=3)
    assert str(error) == "rank 1: model: no such family"
    assert (error.rank, error.exit_code) == (1, code)
    assert capfd.readouterr() == ("", "")
    assert list(temporary.iterdir()) == []


def test_a_peer_s_later_error_does_not_hide_the_first(tmp_path):
    body = """
ready()
if rank == 1:
    report_failure(rank, "out of memory", 3)
    (here / "reported").touch()
    time.sleep(0.3)
    sys.exit(3)
while not (here / "reported").exists():
    time.sleep(0.001)
report_failure(rank, "connection closed by peer", 3)
os._exit(3)
"""
    assert str(launch_and_fail(tmp_path, body)) == "rank 1: out of memory"


def test_a_killed_rank_is_named_before_a_peer_that_misses_it(tmp_path):
    body = """
ready()
if rank == 1:
    os.kill(os.getpid(), signal.SIGKILL)
victim = int((here / "1.pid").read_text())
while Path(f"/proc/{victim}/stat").read_text().split()[2] != "Z":
    pass
report_failure(rank, "connection closed by peer", 3)
os._exit(3)
"""
    error = launch_and_fail(tmp_path, body)
    assert str(error) == "rank 1: was killed by SIGKILL"
    assert error.exit_code == 3


def test_an_abort_after_a_peer_s_error_is_not_the_cause(tmp_path):
    body = """
ready()
if rank == 1:
    report_failure(rank, "out of memory", 3)
    (here / "reported").touch()
    time.sleep(0.3)
    sys.exit(3)
while not (here / "reported").exists():
    time.sleep(0.001)
os.abort()
"""
    assert str(launch_and_fail(tmp_path, body)) == "rank 1: out of memory"


def test_an_uncaught_error_is_one_line_and_its_traceback_a_file(tmp_path, capfd):
    body = """
ready()
if rank == 0:
    1 / 0
signal.pause()
"""
    error = launch_and_fail(tmp_path, body)
    message, _, path = str(error).partition("; its traceback is in ")
    assert message == "rank 0: ZeroDivisionError: division by zero"
    assert "1 / 0" in Path(path).read_text()
    assert capfd.readouterr() == ("", "")


def test_a_rank_that_dies_without_a_word_is_told_with_the_end_of_its_log(tmp_path, capfd):
    body = """
ready()
if rank == 1:
    print("first\\nsecond\\n\\nthird\\n  assertion failed in driver", file=sys.stderr, flush=True)
    os._exit(5)
signal.pause()
"""
    error = launch_and_fail(tmp_path, body)
    beginning, _, rest = str(error).partition("; the end of its log ")
    path, _, lines = rest.partition(": ")
    assert beginning == "rank 1: ended with exit code 5 and no error"
    assert lines == "second | third | assertion failed in driver"
    assert "first" in Path(path).read_text()
    assert error.exit_code == 3
    assert capfd.readouterr() == ("", "")


@pytest.mark.long
def test_a_rank_that_ignores_sigterm_is_killed_soon(tmp_path):
    body = """
signal.signal(signal.SIGTERM, signal.SIG_IGN)
ready()
if rank == 1:
    report_failure(rank, "gave up", 3)
    sys.exit(3)
while True:
    signal.pause()
"""
    began = time.monotonic()
    assert str(launch_and_fail(tmp_path, body)) == "rank 1: gave up"
    assert time.monotonic() - began < 20  # elastic alone would wait 30 s


@pytest.mark.long
def test_a_rank_that_reports_and_stays_is_ended(tmp_path):
    body = """
ready()
if rank == 1:
    report_failure(rank, "stuck at its end", 3)
signal.pause()
"""
    assert str(launch_and_fail(tmp_path, body)) == "rank 1: stuck at its end"


def test_the_user_sees_one_line(tmp_path):
    body = """
ready()
if rank == 1:
    report_failure(rank, "out of memory", 3)
    sys.exit(3)
print("progress", file=sys.stderr, flush=True)
signal.pause()
"""
    with start_parent(write_script(tmp_path, body)) as parent:
        stdout, stderr = parent.communicate(timeout=60)
    assert (parent.returncode, stdout) == (3, "")
    assert stderr.removeprefix("progress\n") == "error: rank 1: out of memory\n"
    assert alive(process_ids(tmp_path)) == []


@pytest.mark.slow
@pytest.mark.parametrize("by", [signal.SIGINT, signal.SIGTERM, signal.SIGKILL])
def test_no_rank_outlives_its_launcher(tmp_path, temporary, by):
    parent = start_parent(write_script(tmp_path, SLEEP))
    with parent:
        assert until(lambda: len(process_ids(tmp_path)) == 2, 60)
        parent.send_signal(by)
        _, stderr = parent.communicate(timeout=15)
    assert until(lambda: not alive(process_ids(tmp_path)), 15)
    assert parent.returncode == -by
    if by == signal.SIGTERM:
        assert stderr == ""
    if by != signal.SIGKILL:
        assert list(temporary.iterdir()) == []


@pytest.mark.long
def test_ranks_that_ignore_all_signals_end_with_their_launcher(tmp_path):
    body = """
for ignored in (signal.SIGINT, signal.SIGTERM):
    signal.signal(ignored, signal.SIG_IGN)
ready()
while True:
    signal.pause()
"""
    with start_parent(write_script(tmp_path, body)) as parent:
        assert until(lambda: len(process_ids(tmp_path)) == 2, 60)
        parent.send_signal(signal.SIGINT)
        parent.communicate(timeout=15)
    assert alive(process_ids(tmp_path)) == []


def test_a_rank_whose_launcher_is_gone_already_ends_at_once(tmp_path, monkeypatch):
    """Its parent here is the launch, but not the process that it is told to look for."""
    body = """
os.environ["CGPROF_LAUNCHER_PID"] = "1"
ready()
if rank == 1:
    follow_launcher()
signal.pause()
"""
    assert str(launch_and_fail(tmp_path, body)) == "rank 1: was killed by SIGKILL"


@pytest.mark.slow
@pytest.mark.parametrize(
    ("stuck", "told"),
    [
        ("RankError(0, 'did not answer')", "rank 0: did not answer"),
        ("ctypes.CDLL(None).sleep(60)", "rank 1: replay of full 64 hangs (waited 0.3 s)"),
    ],
)
def test_a_rank_that_hangs_is_ended_by_its_deadline_even_if_nobody_answers(
    tmp_path, capfd, stuck, told
):
    body = f"""
from cgprof.errors import RankError
ready()
if rank == 1:
    end = end_rank(rank, lambda what: {stuck})
    Deadline(0.3, end).watch(lambda: False, "replay of full 64 hangs")
ctypes.CDLL(None).sleep(60)
"""
    assert str(launch_and_fail(tmp_path, body)) == told
    assert capfd.readouterr() == ("", "")


def test_the_default_command_is_the_program(capfd):
    assert launch(2, ["--version"]) == 0
    assert capfd.readouterr().out.startswith("cgprof ")


def test_the_rank_at_fault_may_be_another_than_the_one_that_reports(tmp_path):
    body = """
ready()
if rank == 0:
    report_failure(1, "does not answer", 3)
    sys.exit(3)
signal.pause()
"""
    assert str(launch_and_fail(tmp_path, body)) == "rank 1: does not answer"


@pytest.mark.long
def test_a_stopped_rank_is_ended_as_well(tmp_path):
    body = """
ready()
if rank == 1:
    os.kill(os.getpid(), signal.SIGSTOP)
report_failure(1, "does not answer", 3)
sys.exit(3)
"""
    assert str(launch_and_fail(tmp_path, body)) == "rank 1: does not answer"


@pytest.mark.slow
def test_ranks_without_a_place_to_meet_are_one_line_and_leave_no_folder(temporary, monkeypatch):
    def refuse(*args, **kwargs):
        raise torch.distributed.DistNetworkError("too many open files\n#0 frames")

    monkeypatch.setattr(torch.distributed, "TCPStore", refuse)
    with pytest.raises(DeviceError, match=r"meet on 127\.0\.0\.1: too many open files$"):
        launch(2, ["capture"])
    assert list(temporary.iterdir()) == []


def test_ranks_meet_in_the_store_of_their_launcher(tmp_path):
    body = """
import torch
from cgprof.config.schema import ParallelConfig
from cgprof.parallel.groups import connect
from cgprof.parallel.launch import find_rank
ranks = connect(find_rank(os.environ), torch.device("cpu"), ParallelConfig())
assert ranks.gather_objects(rank) == [0, 1]
ready()
ranks.close()
"""
    assert launch_script(tmp_path, body) == 0
    assert len(process_ids(tmp_path)) == 2


@pytest.mark.long
@pytest.mark.parametrize("round_", range(5))
def test_two_launches_at_once_both_start(tmp_path, round_):
    body = """
import socket
socket.create_connection((os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"]))).close()
ready()
"""
    folders = [tmp_path / name for name in ("one", "other")]
    for folder in folders:
        folder.mkdir()
    parents = [start_parent(write_script(folder, body)) for folder in folders]
    for parent in parents:
        with parent:
            _, stderr = parent.communicate(timeout=100)
        assert (parent.returncode, stderr) == (0, "")
    assert [len(process_ids(folder)) for folder in folders] == [2, 2]
