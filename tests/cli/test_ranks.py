"""Several ranks from the command line: what one rank's fault does to all, and what is kept."""

import json
import signal
import socket
import subprocess
import sys

import pytest

from cgprof.record.store import read_run
from tests.support.children import environment, run, start, wait_for_line
from tests.support.faulty_rank import PIDS
from tests.support.launches import alive, until

MODEL = ("--model", "tiny-moe", "--load-format", "dummy", "--device", "cpu")
BOUNDS = (
    *("--mode", "full-decode-only", "--max-num-seqs", "8", "--max-num-batched-tokens", "64"),
    *("--max-model-len", "96", "--set", "measure.max_samples=5", "--set", "measure.min_samples=5"),
)
SMALL = (*MODEL, *BOUNDS, "--cudagraph-capture-sizes", "1,2,8")
TWO = ("capture", "-dp", "2", *SMALL)
TWINS = ("--dbo", "--twins", "twin-only", "--dbo-decode-token-threshold", "2")
PROGRESS = (
    "replay call alone",
    "building ",
    "capture ",
    "captures took",
    "profile ",
    "parity ",
    "serving ",
    "run folder",
)
FAULTY = """
import runpy, sys
sys.argv[0] = "faulty"
runpy.run_module("tests.support.faulty_rank", run_name="__main__")
"""


@pytest.fixture
def pids(tmp_path, monkeypatch):
    """Where ranks leave their process ids; none of them may be alive afterwards."""
    folder = tmp_path / "pids"
    folder.mkdir()
    monkeypatch.setenv(PIDS, str(folder))
    yield folder
    assert alive(ids_in(folder)) == []


def ids_in(folder):
    return [int(path.read_text()) for path in sorted(folder.glob("*.pid"))]


def last_words(stderr):
    return [line for line in stderr.splitlines() if not line.startswith(PROGRESS)]


def run_with(fault, folder, pids, *more):
    """The one line on stderr, and what the run folder holds."""
    ended = run([fault, *TWO, *more, "-o", str(folder)], FAULTY, timeout_s=110)
    assert len(ids_in(pids)) == 2
    (line,) = last_words(ended.stderr)
    assert ended.code == 3, line
    record = read_run(folder)
    assert record.status in ("partial", "failed")
    return line, record.ranks[0].graphs


@pytest.mark.ranks(2)
@pytest.mark.long
@pytest.mark.parametrize(
    ("fault", "more", "captured", "timed"),
    [
        ("kill-in-capture@1", (), 2, 0),
        ("kill-in-replay@1", (), 3, 2),
        ("kill-in-parity@0", (), 3, 3),
        ("kill-in-vote@1", ("--no-parity",), 3, 3),
    ],
)
def test_killed_rank_ends_the_run_and_is_named(tmp_path, pids, fault, more, captured, timed):
    line, graphs = run_with(fault, tmp_path / "run", pids, *more)
    assert line == f"error: rank {fault[-1]}: was killed by SIGKILL"
    assert (len(graphs), sum(graph.replay is not None for graph in graphs)) == (captured, timed)
    assert all(graph.failure is None for graph in graphs)


@pytest.mark.ranks(2)
@pytest.mark.long
@pytest.mark.parametrize(
    ("fault", "more", "told"),
    [
        ("raise-in-microbatch@1", TWINS, r"failed: microbatch 1: ValueError: planted; then the"),
        ("exhaust-in-recording@1", (), "failed: out of memory: "),
    ],
)
def test_fault_inside_a_capture_s_exchange_is_told_with_its_rank(tmp_path, pids, fault, more, told):
    quick = ("--set", "parallel.replay_timeout_s=6")
    line, graphs = run_with(fault, tmp_path / "run", pids, *more, *quick)
    assert line.startswith("error: rank 1: capture of FULL-")
    assert told in line
    assert line.endswith("; then the others did not go on")
    assert len(graphs) == 2


@pytest.mark.ranks(2)
@pytest.mark.long
def test_error_is_told_before_what_has_to_be_closed_can_hang(tmp_path, pids):
    line, graphs = run_with("hang-in-capture@1", tmp_path / "run", pids)
    assert line.startswith("error: rank 1: ValueError: planted; its traceback is in ")
    assert len(graphs) == 2


@pytest.mark.ranks(2)
@pytest.mark.long
def test_rank_that_stops_answering_is_named(tmp_path, pids):
    quick = ("--no-parity", "--set", "parallel.replay_timeout_s=3")
    line, graphs = run_with("stop-in-forward@1", tmp_path / "run", pids, *quick)
    assert line.startswith("error: rank 1: did not answer; others waited in round ")
    assert all(graph.replay for graph in graphs)


@pytest.mark.ranks(2)
@pytest.mark.slow
def test_capture_that_fails_on_one_rank_is_dropped_on_all_and_not_resumed(tmp_path, pids):
    folder = tmp_path / "run"
    sizes = ("--cudagraph-capture-sizes", "1,2,3,4,5,6,7,8")
    args = ["raise-in-instantiation@1", *TWO, *sizes, "--no-parity", "-o", str(folder)]
    ended = run(args, FAULTY)
    assert (ended.code, last_words(ended.stderr)) == (3, [])
    record = read_run(folder)
    assert record.status == "failed"
    assert [len(rank.graphs) for rank in record.ranks] == [8, 8]
    failed = [[graph for graph in rank.graphs if graph.failure] for rank in record.ranks]
    own = "capture of FULL-6x6q1 failed: ValueError: planted"
    assert [one.failure for one in failed[1]] == [own]
    dropped = "dropped, since another rank could not capture it: rank 1: "
    assert [one.failure for one in failed[0]] == [dropped + own]
    assert sum(graph.replay is not None for graph in record.ranks[0].graphs) == 7
    assert own in ended.stdout
    again = run(["capture", "--resume", str(folder)])
    assert again.code == 2
    told = "error: --resume: a run on several ranks cannot be resumed; start a new one"
    assert again.stderr.splitlines() == [told]


@pytest.mark.ranks(2)
@pytest.mark.long
def test_plan_unlike_on_one_rank_is_refused_before_any_capture(tmp_path, pids):
    ended = run(["raise-in-plan@1", *TWO, "-o", str(tmp_path / "run")], FAULTY)
    assert ended.code == 3
    (line,) = last_words(ended.stderr)
    assert line.startswith("error: rank 1: plan differs: rank 1 has [")
    assert not (tmp_path / "run").exists()


def free_port():
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        return taken.getsockname()[1]


def started_by_hand(args, rank, size, port):
    """One rank as torchrun starts it."""
    place = {
        "RANK": str(rank),
        "WORLD_SIZE": str(size),
        "LOCAL_RANK": str(rank),
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
    }
    return subprocess.Popen(
        [sys.executable, "-m", "cgprof", *args],
        env=environment() | place,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


@pytest.mark.ranks(2)
@pytest.mark.slow
def test_unlike_configs_are_refused_by_both_ranks_with_field_and_values(tmp_path):
    port = free_port()
    ranks = [
        started_by_hand(
            [*TWO, "--set", f"measure.warmup={3 + rank}", "-o", str(tmp_path / str(rank))],
            rank,
            2,
            port,
        )
        for rank in range(2)
    ]
    for rank in ranks:
        _, stderr = rank.communicate(timeout=60)
        assert rank.returncode == 3
        assert last_words(stderr) == [
            "error: rank 1: config.measure.warmup differs: rank 1 has 4; rank 0 has 3"
        ]
    assert list(tmp_path.iterdir()) == []


@pytest.mark.ranks(2)
@pytest.mark.long
@pytest.mark.parametrize("by", [signal.SIGINT, signal.SIGKILL])
def test_ended_parent_takes_its_ranks_along_and_leaves_a_partial_folder(tmp_path, pids, by):
    folder = tmp_path / "run"
    with start(["none@-", *TWO, "-o", str(folder)], FAULTY) as parent:
        wait_for_line(parent, "capture 3/3")
        parent.send_signal(by)
        _, stderr = parent.communicate(timeout=30)
    assert until(lambda: alive(ids_in(pids)) == [], 15)
    if by is signal.SIGINT:
        assert (parent.returncode, last_words(stderr)) == (130, ["interrupted"])
    else:
        assert parent.returncode == -by
    assert read_run(folder).status == "partial"
    shown = run(["report", str(folder), "--format", "json"])
    assert shown.code == 0
    assert len(json.loads(shown.stdout)) > 0


@pytest.mark.ranks(4)
@pytest.mark.long
def test_two_runs_at_once_do_not_meet(tmp_path):
    quick = ("--mode", "none", "--no-parity")
    runs = [start([*TWO, *quick, "-o", str(tmp_path / str(index))]) for index in range(2)]
    for index, one in enumerate(runs):
        _, stderr = one.communicate(timeout=100)
        assert one.returncode == 0, stderr
        assert read_run(tmp_path / str(index)).status == "complete"


@pytest.mark.ranks(2)
@pytest.mark.long
def test_check_passes_on_two_ranks(tmp_path):
    folder = tmp_path / "run"
    args = ["check", "-dp", "2", *SMALL, "--sample", "-o", str(folder), "--format", "json"]
    ended = run(args)
    assert ended.code == 0, ended.stderr
    record = read_run(folder)
    assert record.status == "complete"
    assert [rank.rank for rank in record.ranks] == [0, 1]


REFUSED = [
    (("generate", "-dp", "2", "-p", "x"), "generate runs on one rank"),
    (("capture", "-dp", "2", "--model", "tiny-dense", "--load-format", "dummy"), "no experts"),
    (("capture", "-dp", "99", *MODEL), "99 ranks cannot share the"),
]


@pytest.mark.parametrize(("args", "told"), REFUSED)
def test_refused_without_starting_a_rank(args, told, pids):
    ended = run(args)
    assert ended.code == 2
    (line,) = ended.stderr.splitlines()
    assert line.startswith("error: ")
    assert told in line
    assert "rank 0:" not in line


def test_other_number_of_ranks_than_asked_for_is_refused(tmp_path):
    one = started_by_hand([*TWO, "-o", str(tmp_path / "run")], 0, 3, free_port())
    _, stderr = one.communicate(timeout=60)
    assert one.returncode == 2
    wanted = "error: --data-parallel-size: 2, but 3 ranks were started; make them equal"
    assert stderr.splitlines() == [wanted]


@pytest.mark.long
def test_one_started_rank_is_a_run_on_one_rank(tmp_path):
    quick = ("--mode", "none", "--no-parity")
    args = ["capture", "-dp", "1", *SMALL, *quick, "-o", str(tmp_path / "run")]
    one = started_by_hand(args, 0, 1, free_port())
    _, stderr = one.communicate(timeout=60)
    assert one.returncode == 0, stderr
    assert read_run(tmp_path / "run").status == "complete"
