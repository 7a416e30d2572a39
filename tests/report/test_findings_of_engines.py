"""Faults planted under a whole engine, and what the findings say of the run that comes of it."""

import os
import subprocess
import sys
from contextlib import ExitStack, nullcontext
from dataclasses import replace
from functools import cache

import pytest
import torch

from cgprof.measure.captures import CapturePoints, capture_keys, memory_totals
from cgprof.measure.memory import MemoryReader
from cgprof.record.types import RankRecord
from cgprof.report.findings import find
from cgprof.report.memory_sum import memory_sums
from tests.support.builders import build_engine, captured_engine, tiny_run
from tests.support.graphs import decode_key
from tests.support.planted import around_pass, in_last_layer, runs_elsewhere
from tests.support.records import run_record

MIB, GIB = 1 << 20, 1 << 30
PLAIN, TWIN = decode_key(4), decode_key(8, num_microbatches=2)
ODD = decode_key(8, query_len=2, num_microbatches=2)
on_devices = pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
# Costs and remarks that are true of a run of a tiny model, whatever is planted.
OF_TINY = {"memory-bound-to-nodes", "cold-arenas"}

_NEIGHBOUR = """
import sys
import torch

torch.zeros(1, device="cuda").add_(1)
torch.cuda.synchronize()
print("here", flush=True)
sys.stdin.readline()
held = torch.zeros(int(sys.argv[1]), dtype=torch.uint8, device="cuda")
torch.cuda.synchronize()
print("taken", flush=True)
sys.stdin.readline()
del held
torch.cuda.empty_cache()
print("given back", flush=True)
sys.stdin.readline()
"""


@cache
def warm_up():
    """Kernels are loaded at their first run: memory that is no graph's."""
    with captured_engine(tiny_run(device="cuda", dbo=True)):
        pass


def run_of(device, plant_at=None, plant=nullcontext, *, keys=None, progress=None, reader=None):
    """The record of a captured engine; `plant(engine)` holds while one key is captured."""
    if device == "cuda":
        warm_up()
    engine = build_engine(tiny_run(device=device, dbo=True))
    if keys is not None:
        engine.plan = replace(engine.plan, keys=(*engine.plan.keys, *keys))
    try:
        with engine.active(), ExitStack() as stack:
            planted = stack.enter_context(ExitStack())

            def announce(key):
                planted.close()
                if key == plant_at:
                    planted.enter_context(plant(engine))
                if progress is not None:
                    progress(key)

            memory = (reader or MemoryReader)(engine.device)
            points = CapturePoints()
            records = list(capture_keys(engine, memory, points, announce))
            totals = memory_totals(engine, points, records)
            rank = RankRecord(graphs=tuple(records), totals=totals)
            return run_record(config=engine.config, recorder=engine.recorder.kind, ranks=(rank,))
    finally:
        engine.close()


def accused(run):
    return {(finding.name, finding.keys) for finding in find(run) if finding.name not in OF_TINY}


@on_devices
def test_sound_engine_is_accused_of_nothing(device):
    assert accused(run_of(device)) == set()


@on_devices
def test_twin_that_no_batch_reaches_is_found(device):
    assert accused(run_of(device, keys=(ODD,))) == {("unreachable-twin", (str(ODD),))}


def runs_nowhere(part, x):
    """A graph is recorded while the pass is left out."""


@on_devices
def test_graph_that_captured_nothing_is_found(device):
    run = run_of(device, PLAIN, lambda engine: around_pass(engine, runs_nowhere))
    assert accused(run) == {("captured-nothing", (str(PLAIN),))}


def adds_elsewhere(part, x):
    """Only one harmless kernel: a whole pass would read transfers that a capture does not run."""
    runs_elsewhere(lambda: x.mul(2), x)


@pytest.mark.parametrize("microbatch", [0, 1])
@on_devices
def test_dropped_half_is_found(device, microbatch):
    run = run_of(
        device, TWIN, lambda engine: around_pass(engine, adds_elsewhere, microbatch=microbatch)
    )
    assert accused(run) == {("twin-without-its-work", (str(TWIN),))}


def test_part_of_a_plain_key_that_ran_elsewhere_is_found():
    run = run_of("cpu", PLAIN, lambda engine: in_last_layer(engine, runs_elsewhere))
    assert accused(run) == {("plain-without-its-work", (str(PLAIN),))}


@pytest.fixture
def neighbour():
    """A process that is on the device already and does what it is told, one line each."""
    child = subprocess.Popen(
        [sys.executable, "-c", _NEIGHBOUR, str(2 * GIB)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        env=dict(os.environ),
    )

    def does(what):
        child.stdin.write("\n")
        child.stdin.flush()
        assert child.stdout.readline().strip() == what

    assert child.stdout.readline().strip() == "here"
    try:
        yield does
    finally:
        child.kill()
        child.communicate()


def with_nvml(device):
    from cgprof.measure.nvml import NvmlDevice, Pynvml, cuda_device

    nvml = NvmlDevice(Pynvml(), cuda_device(torch.cuda.current_device()).uuid)
    return MemoryReader(device, nvml, {})


@pytest.mark.gpu
def test_neighbour_that_takes_two_gib_is_found_and_this_process_keeps_its_figure(neighbour):
    beside = run_of("cuda", reader=with_nvml)
    seen = beside.ranks[0].totals.plain_witness
    if seen.nvml_delta_bytes is None:
        pytest.skip(f"NVML shows no process here: {seen.nvml_note}")
    assert seen.neighbours == "still"
    assert accused(beside) == set()
    run = run_of(
        "cuda", progress=lambda key: neighbour("taken") if key == PLAIN else None, reader=with_nvml
    )
    ((name, keys),) = accused(run)
    assert name == "neighbours"
    assert str(PLAIN) in keys
    whole = memory_sums(run.ranks[0])[-1]
    assert whole.verdict == "doubtful: neighbours moved"
    assert whole.device_delta_bytes - whole.nvml_bytes >= 2 * GIB
    assert abs(whole.nvml_bytes + whole.given_back_bytes - whole.parts_bytes) <= 8 * MIB


@pytest.mark.gpu
def test_neighbour_that_gives_two_gib_back_makes_no_usage_negative(neighbour):
    neighbour("taken")
    run = run_of(
        "cuda",
        progress=lambda key: neighbour("given back") if key == PLAIN else None,
        reader=with_nvml,
    )
    rank = run.ranks[0]
    if rank.totals.plain_witness.nvml_delta_bytes is None:
        pytest.skip(f"NVML shows no process here: {rank.totals.plain_witness.nvml_note}")
    assert {name for name, _ in accused(run)} == {"neighbours"}
    plain, _, whole = memory_sums(rank)
    assert plain.device_delta_bytes < 0
    assert plain.released_bytes > 2 * GIB - 256 * MIB
    for one in (plain, whole):
        assert min(one.parts_bytes, one.rest_bytes, one.released_bytes, one.nvml_bytes) >= 0
        assert one.verdict == "doubtful: neighbours moved"
