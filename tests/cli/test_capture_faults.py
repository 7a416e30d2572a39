"""Captures that fail or take long, from the command line: what is kept, printed, left alive."""

import json
import re

import pytest
from typer.testing import CliRunner

from cgprof.cli.app import app
from cgprof.engine.worker import Engine
from cgprof.record.store import read_run
from tests.support.children import run
from tests.support.planted import in_last_layer

DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)]
# Eight keys each; of the twins' plan the third one is a twin.
PLAIN = ("--dbo", "--cudagraph-capture-sizes", "1,2,4,6,8", "--dbo-decode-token-threshold", "4")
TWINS = (
    *("--dbo", "--cudagraph-capture-sizes", "1,2,3,4,5,6,7,8", "--twins", "twin-only"),
    *("--dbo-decode-token-threshold", "3"),
)
SMALL = (
    *("--model", "tiny-moe", "--load-format", "dummy", "--mode", "full-decode-only"),
    *("--max-num-seqs", "8", "--max-num-batched-tokens", "64", "--max-model-len", "96"),
    *("--set", "measure.max_samples=5", "--set", "measure.min_samples=5", "--no-parity"),
    # On a GPU these take minutes of a capture that takes seconds.
    *("--set", "measure.launch_model=false", "--set", "measure.trace_launches=false"),
    *("--set", "measure.stand_alone_keys=0", "--set", "measure.eager_work=false"),
)
# The whole program, with a fault in the recording of the third graph.
FAULTY = """
import sys, threading
import torch
from cgprof.cli.app import main
from cgprof.engine.worker import Engine
from tests.support.planted import in_last_layer, raises

microbatch = eval(sys.argv.pop(1))
capture = Engine.capture

def faulty(self, key, mark):
    if key != self.plan.keys[2]:
        return capture(self, key, mark)
    with in_last_layer(self, raises, microbatch=microbatch):
        return capture(self, key, mark)

Engine.capture = faulty
code = 0
try:
    main()
except SystemExit as end:
    code = end.code
others = [one.name for one in threading.enumerate() if one is not threading.main_thread()]
print("threads:", others, file=sys.stderr)
sys.exit(code)
"""


@pytest.mark.parametrize(("plan", "microbatch"), [(PLAIN, None), (TWINS, 1)])
@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.slow
def test_fault_in_graph_3_of_8_leaves_7_results_and_a_failure_and_the_process_ends(
    tmp_path, device, plan, microbatch
):
    folder = tmp_path / "run"
    args = ["capture", *SMALL, *plan, "--device", device, "-o", str(folder)]
    ended = run([repr(microbatch), *args], FAULTY, timeout_s=100)
    assert ended.code == 3, ended.stderr
    assert ended.stderr.splitlines()[-1] == "threads: []"
    assert "Traceback" not in ended.stderr
    record = read_run(folder)
    graphs = record.ranks[0].graphs
    assert record.status == "failed"
    assert len(graphs) == 8
    where = "" if microbatch is None else f"microbatch {microbatch}: "
    third = graphs[2]
    assert third.failure == f"capture of {third.label} failed: {where}ValueError: planted"
    assert third.key.is_twin is (microbatch is not None)
    assert all(graph.failure is None and graph.replay for graph in graphs if graph is not third)
    assert f"FAILED: capture of {third.label} failed" in ended.stdout


def hogs(part, x):
    raise MemoryError


def test_capture_that_runs_out_of_memory_says_so_and_keeps_the_rest(tmp_path, monkeypatch):
    capture = Engine.capture

    def faulty(self, key, mark):
        if key.num_tokens != 6 or key.is_twin:
            return capture(self, key, mark)
        with in_last_layer(self, hogs, after_passes=0):
            return capture(self, key, mark)

    monkeypatch.setattr(Engine, "capture", faulty)
    folder = tmp_path / "run"
    result = CliRunner().invoke(
        app, ["capture", *SMALL, *PLAIN, "--device", "cpu", "-o", str(folder)]
    )
    assert result.exit_code == 3, result.output
    graphs = read_run(folder).ranks[0].graphs
    (failed,) = [graph for graph in graphs if graph.failure]
    assert (len(graphs), failed.label) == (8, "FULL-6x6q1")
    assert re.fullmatch(
        r"capture of FULL-6x6q1 failed: out of memory: .* \(\d+ bytes\) free of .* \(\d+\), "
        r"the graph pool held .* \(\d+\); the largest that fitted is FULL-8x8q1; "
        r"lower --max-cudagraph-capture-size, now 8",
        failed.failure,
    )
    report = CliRunner().invoke(app, ["report", str(folder)])
    assert failed.failure in report.stdout


LADDER = "1,2,4," + ",".join(str(size) for size in range(8, 513, 8))
LARGE = (
    *("--model", "tiny-dense", "--device", "cuda", "--mode", "full-decode-only", "--no-parity"),
    *("--max-num-seqs", "512", "--max-num-batched-tokens", "512", "--max-model-len", "64"),
    *("--cudagraph-capture-sizes", LADDER, "--set", "measure.max_samples=5"),
    *("--set", "measure.min_samples=5", "--set", "measure.context_len=16"),
    *("--set", "measure.launch_model=false", "--set", "measure.trace_launches=false"),
    *("--set", "measure.stand_alone_keys=0", "--set", "measure.eager_work=false"),
)


@pytest.mark.parametrize(
    ("args", "count"),
    [
        ((*SMALL, *PLAIN, "--device", "cpu"), 8),
        pytest.param(LARGE, 67, marks=[pytest.mark.gpu, pytest.mark.slow]),
    ],
    ids=["8", "67"],
)
def test_seconds_of_each_graph_add_up_to_the_capture_and_progress_stays_off_stdout(
    tmp_path, args, count
):
    folder = tmp_path / "run"
    result = CliRunner().invoke(app, ["capture", *args, "-o", str(folder), "--format", "json"])
    assert result.exit_code == 0, result.output
    record = read_run(folder)
    assert json.loads(result.stdout)["run_id"] == record.run_id
    graphs = record.ranks[0].graphs
    assert len(graphs) == count
    seconds = record.process_seconds
    whole = seconds["capture with memory readings"]
    each = [graph.times.total_ns / 1e9 for graph in graphs]
    first = seconds.pop("capture: first reading")
    assert 0.9 * whole <= first + sum(each) <= whole
    parts = [value for name, value in seconds.items() if name.startswith("capture: ")]
    assert len(parts) == 5
    assert sum(parts) == pytest.approx(sum(each))
    assert all(graph.times.record_ns > 0 for graph in graphs)
    assert [line for line in result.stderr.splitlines() if line.startswith("capture 1/")]
    said = next(line for line in result.stderr.splitlines() if line.startswith("captures took"))
    assert "record" in said
