"""A run that samples memory while it times says so, and is set beside no run that does not."""

import pytest

from cgprof.errors import UnsupportedError
from cgprof.measure.captures import CapturePoints, capture_keys
from cgprof.measure.clock import clock_for
from cgprof.measure.memory import MemoryReader
from cgprof.measure.profile import profile_key, profile_round_robin
from cgprof.record.samples import SampleSink
from cgprof.report.comparable import require_comparable
from tests.support.builders import build_engine, tiny_run
from tests.support.records import run_record


def measured(sample_ms):
    config = tiny_run(sizes=(2,))
    measure = config.measure.model_copy(update={"memory_sample_ms": sample_ms})
    engine = build_engine(config.model_copy(update={"measure": measure}))
    try:
        with engine.active():
            clock, sink = clock_for(engine.device), SampleSink()
            reader = MemoryReader(engine.device)
            records = list(capture_keys(engine, reader, CapturePoints(), lambda key: None))
            records = [profile_key(engine, record, clock, sink) for record in records]
            records = profile_round_robin(engine, records, clock, sink)
            return run_record(records, config=engine.config)
    finally:
        engine.close()


def test_rows_timed_beside_a_memory_sampler_are_labelled_and_never_compared_with_others():
    plain, watched = measured(None), measured(1.0)
    for run, labelled in ((plain, False), (watched, True)):
        (graph,) = run.ranks[0].graphs
        for stages in (graph.eager, graph.replay, graph.round_robin):
            assert stages.instrumented is labelled
        assert (graph.sampled_peak_bytes is not None) is labelled
    with pytest.raises(UnsupportedError, match=r"memory_sample_ms.* in A, 1\.0 in B"):
        require_comparable(plain, watched, force=False)
    assert require_comparable(plain, plain, force=False) == ()
