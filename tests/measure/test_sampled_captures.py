"""Captures beside threads of this process that use the device."""

import pytest

from cgprof.measure.memory import used_bytes
from cgprof.measure.sampler import sampling
from tests.support.builders import build_engine, tiny_run
from tests.support.copies import pinned_copies
from tests.support.planted import check_replays, nothing_left_behind

pytestmark = pytest.mark.gpu


def test_twenty_captures_beside_a_memory_sampler_and_a_copying_thread_all_succeed():
    engine = build_engine(tiny_run(device="cuda", dbo=True, sizes=(8,)))
    try:
        with engine.active(), nothing_left_behind(engine):
            with (
                pinned_copies() as failures,
                sampling(lambda: used_bytes(engine.device), 1.0) as peak,
            ):
                for attempt in range(20):
                    for key in engine.plan.keys:
                        engine.capture(key, lambda phase: None)
                    assert engine.graphs.keys == engine.plan.keys
                    if attempt < 19:
                        engine.graphs.free()
            assert failures == []
            assert peak.count > 20
            assert engine.recorder.capture_error_mode == "thread_local"
            check_replays(engine)
    finally:
        engine.close()
