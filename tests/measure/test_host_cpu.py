import os
from types import SimpleNamespace

import pytest

from cgprof.measure.clock import CpuClock
from cgprof.measure.host_cpu import HostCpu, host_cpu
from tests.support.stepping import ScriptedClock

needs_affinity = pytest.mark.skipif(
    not hasattr(os, "sched_setaffinity"), reason="no choice of CPUs here"
)


class Host:
    """CPUs whose loops take as long as `paces` says; reading the clock twice is one loop."""

    def __init__(self, monkeypatch, paces):
        self.paces, self.at, self.moves = paces, {0, 1, 2}, []
        self.clock = ScriptedClock()
        self.reads = 0
        self.clock.read_ns = self.read_ns
        monkeypatch.setattr(os, "sched_setaffinity", self.move)
        monkeypatch.setattr(os, "sched_getaffinity", lambda pid: set(self.at))

    def read_ns(self):
        self.reads += 1
        return 0 if self.reads % 2 else self.paces[min(self.at)]

    def move(self, pid, cpus):
        assert pid == 0
        self.at = set(cpus)
        self.moves.append(set(cpus))


@needs_affinity
def test_thread_moves_to_the_fastest_cpu_and_stays_while_that_is_fast(monkeypatch):
    host = Host(monkeypatch, {0: 600, 1: 310, 2: 500})
    cpu = HostCpu(host.clock, (0, 1, 2))
    cpu.settle()
    assert host.at == {1}
    moves = len(host.moves)
    host.paces[1] = 330
    cpu.settle()
    assert len(host.moves) == moves


@needs_affinity
def test_thread_leaves_a_cpu_that_became_slow_and_gets_all_back_at_the_end(monkeypatch):
    host = Host(monkeypatch, {0: 600, 1: 310, 2: 500})
    cpu = HostCpu(host.clock, (0, 1, 2))
    cpu.settle()
    host.paces.update({0: 300, 1: 620})
    cpu.settle()
    assert host.at == {0}
    cpu.release()
    assert host.at == {0, 1, 2}
    cpu.release()
    assert host.moves[-1] == {0, 1, 2}


@needs_affinity
def test_best_pace_is_kept_so_that_a_slow_host_is_looked_over_again(monkeypatch):
    host = Host(monkeypatch, {0: 300, 1: 310, 2: 320})
    cpu = HostCpu(host.clock, (0, 1, 2))
    cpu.settle()
    for slow in range(3):
        host.paces[slow] = 600
    cpu.settle()
    host.paces[2] = 305
    cpu.settle()
    assert host.at == {2}


@needs_affinity
@pytest.mark.parametrize("cpus", [(), (0,)])
def test_without_a_choice_the_thread_is_left_alone(monkeypatch, cpus):
    host = Host(monkeypatch, {0: 600})
    cpu = HostCpu(host.clock, cpus)
    cpu.settle()
    cpu.release()
    assert host.moves == []


def engine_on(device, *, pin_host=True, rank=None, size=1):
    return SimpleNamespace(
        device=SimpleNamespace(type=device),
        config=SimpleNamespace(measure=SimpleNamespace(pin_host=pin_host)),
        ranks=None if rank is None else SimpleNamespace(rank=rank, size=size),
    )


@needs_affinity
@pytest.mark.parametrize(
    ("engine", "cpus"),
    [
        (engine_on("cuda"), (0, 1, 2)),
        (engine_on("cuda", rank=0, size=2), (0, 2)),
        (engine_on("cuda", rank=1, size=2), (1,)),
        (engine_on("cuda", pin_host=False), ()),
        (engine_on("cpu"), ()),
    ],
)
def test_ranks_choose_among_different_cpus_and_a_cpu_run_among_none(monkeypatch, engine, cpus):
    host = Host(monkeypatch, {})
    assert host_cpu(engine, host.clock)._cpus == cpus


@needs_affinity
def test_real_affinity_is_as_before_after_release():
    before = os.sched_getaffinity(0)
    cpu = HostCpu(CpuClock(), sorted(before))
    cpu.settle()
    assert os.sched_getaffinity(0) <= before
    cpu.release()
    assert os.sched_getaffinity(0) == before
