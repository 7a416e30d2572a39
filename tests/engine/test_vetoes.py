"""Steps count who kept them from being split."""

import pytest

from cgprof.config.schema import All2AllBackend
from cgprof.engine.types import IDLE_STEP
from cgprof.shapes import CapturePolicy, VetoReason
from tests.support.builders import build_engine, tiny_run
from tests.support.ranks import run_ranks

LOADS = [(8, 8), (8, 3), (8, 0), (2, 3), (8, 3)]


def count_vetoes(ranks, run):
    """What is counted over the loads, and after the counts were forgotten."""
    engine = build_engine(run, ranks=ranks)
    try:
        with engine.active():
            engine.live.fill([5] * 8, [1] * 8, 0)
            for load in LOADS:
                count = load[ranks.rank]
                engine.runner.decide(engine.live.step([1] * count) if count else IDLE_STEP)
            counted = {(veto.rank, veto.reason): n for veto, n in engine.runner.vetoes.items()}
            engine.runner.forget_counts()
            return counted, len(engine.runner.vetoes)
    finally:
        engine.close()


@pytest.mark.ranks(2)
def test_each_step_counts_its_vetoes_alike_on_all_ranks():
    run = tiny_run(CapturePolicy.NONE, sizes=None, dbo=True)
    settings = {"data_parallel_size": 2, "all2all_backend": All2AllBackend.ALL_TO_ALL}
    run = run.model_copy(update={"parallel": run.parallel.model_copy(update=settings)})
    expected = {(1, VetoReason.BELOW_THRESHOLD): 2, (1, VetoReason.IDLE): 1}
    assert run_ranks(2, count_vetoes, run) == [(expected, 0)] * 2
