import dataclasses

import numpy as np
import pytest

from cgprof.config.schema import CaptureConfig
from cgprof.measure import profile
from cgprof.measure.accounting import DeviceReading
from cgprof.measure.captures import CapturePoints, capture_keys, memory_totals
from cgprof.measure.neighbours import process_view
from cgprof.measure.profile import profile_key, profile_round_robin, repeat_slow
from cgprof.record.samples import SampleSink
from cgprof.record.types import RankRecord
from cgprof.report.memory import totals_table
from tests.support.builders import tiny_model
from tests.support.stepping import ScriptedEngine, full_key

MIB = 1 << 20
PLAIN = [full_key(8), full_key(4)]
TWINS = [full_key(8, num_microbatches=2)]


class _ScriptedMemory:
    """Stands where a MemoryReader does, over a device whose memory the test takes."""

    def __init__(self, free=10_000 * MIB):
        self.free = free
        self.pool = {}
        self.general = {}
        self.nvml = None

    def take(self, where, size):
        where["compute"] = where.get("compute", 0) + size
        self.free -= size

    def read(self):
        return self.read_between()

    def read_between(self):
        return DeviceReading(
            free_bytes=self.free,
            pool_by_stream=dict(self.pool),
            general_by_stream=dict(self.general),
        )


class _NoMemory:
    def read(self):
        return None

    def read_between(self):
        return None


def _capture(engine, reader):
    points, announced = CapturePoints(), []
    records = list(capture_keys(engine, reader, points, announced.append))
    return records, points, announced


def _script(memory):
    def on_mark(key, phase):
        if phase == "warmed" and key == PLAIN[0]:
            memory.take(memory.general, 32 * MIB)
        if phase == "recorded":
            memory.take(memory.pool, key.num_tokens * key.num_microbatches * MIB)
        if phase == "instantiated":
            memory.free -= 3 * MIB

    return on_mark


def test_capture_keys_measures_parts_per_key_and_totals_per_half():
    memory = _ScriptedMemory()
    engine = ScriptedEngine(PLAIN + TWINS, on_mark=_script(memory))
    records, points, announced = _capture(engine, memory)
    assert announced == PLAIN + TWINS
    assert [r.memory.pool_bytes for r in records] == [8 * MIB, 4 * MIB, 16 * MIB]
    assert [sum(r.memory.workspaces.values()) for r in records] == [32 * MIB, 0, 0]
    assert [r.memory.instantiate_bytes for r in records] == [3 * MIB] * 3
    assert [r.memory.rest_bytes for r in records] == [0, 0, 0]
    assert [r.nodes for r in records] == [{"kernel": 7}] * 3
    totals = memory_totals(engine, points, records)
    assert totals.source == "device"
    assert totals.plain_bytes == (8 + 4 + 32 + 6) * MIB
    assert totals.twin_bytes == (16 + 3) * MIB
    assert (totals.outputs_bytes, totals.kv_cache_bytes, totals.weights_bytes) == (128, 128, 4096)
    assert totals.finish_graphs_bytes == 512


def test_capture_keys_says_what_was_asked_for_and_what_became_of_it():
    engine = ScriptedEngine(PLAIN + TWINS, failing=[PLAIN[0]])
    records, _, _ = _capture(engine, _NoMemory())
    assert [(r.requested_mode, r.effective_mode) for r in records] == [
        ("FULL", "NONE"),
        ("FULL", "FULL"),
        ("FULL", "FULL"),
    ]


def test_capture_keys_goes_on_after_a_failure_and_does_not_charge_it_to_the_next():
    memory = _ScriptedMemory()
    engine = ScriptedEngine(PLAIN + TWINS, failing=[PLAIN[0]], on_mark=_script(memory))
    records, _, _ = _capture(engine, memory)
    assert records[0].failure == f"capture of {PLAIN[0]} failed: a planted failure"
    assert records[0].memory is None
    assert [r.failure for r in records[1:]] == [None, None]
    assert records[1].witness.device_delta_bytes == (4 + 3) * MIB


def test_capture_keys_yields_each_record_before_the_next_capture():
    engine = ScriptedEngine(PLAIN)
    steps = capture_keys(engine, _NoMemory(), CapturePoints(), lambda key: None)
    next(steps)
    assert list(engine.graphs.captured) == PLAIN[:1]


def test_capture_keys_on_a_tape_takes_the_arena_growth_and_no_device_figure():
    engine = ScriptedEngine(PLAIN + TWINS)
    records, points, _ = _capture(engine, _NoMemory())
    assert [r.memory.pool_by_stream for r in records] == [
        {"arena": 8000},
        {"arena": 4000},
        {"arena": 8000},
    ]
    assert records[0].witness.device_delta_bytes is None
    assert records[0].memory.rest_bytes is None
    totals = memory_totals(engine, points, records)
    assert (totals.source, totals.plain_bytes, totals.twin_bytes) == ("tape-arena", 12000, 8000)


def _profiled(engine):
    sink = SampleSink()
    records, _, _ = _capture(engine, _NoMemory())
    return [profile_key(engine, record, engine.clock, sink) for record in records], sink


def test_profile_key_times_eager_first_and_hot_apart():
    engine = ScriptedEngine(PLAIN)
    records, sink = _profiled(engine)
    for record in records:
        assert record.eager.launch.median_ns == 90_000
        assert record.first_replay_ns == 60_000
        assert record.replay.launch.median_ns == 3_000
        assert record.eager.launch.stopped_by == record.replay.launch.stopped_by == "noise"
        assert record.experts_hit == 2.5
        assert record.replays == 1 + 1 + record.replay.launch.count  # first, warm-up, hot
    assert engine.poisoned == PLAIN
    frame = sink.table().to_pandas()
    counts = frame.groupby(["key", "phase"], observed=True).size()
    assert counts[str(PLAIN[0]), "first"] == 1
    assert counts[str(PLAIN[0]), "eager"] == counts[str(PLAIN[0]), "hot"] == 5
    assert frame["device_ns"].isna().all()


def test_profile_key_runs_eager_at_the_padding_and_split_of_the_key():
    engine = ScriptedEngine(TWINS)
    _profiled(engine)
    assert set(engine.runner.launched) == {TWINS[0].as_eager(), TWINS[0]}


def test_profile_key_warns_of_a_dear_first_replay():
    records, _ = _profiled(ScriptedEngine(PLAIN[:1]))
    assert records[0].warnings == ("first-replay-dear: first launch 60 us, later ones 3 us",)


def test_profile_key_leaves_a_failed_capture_alone_and_records_a_refused_replay():
    engine = ScriptedEngine(PLAIN, failing=[PLAIN[0]], refused=[PLAIN[1]])
    records, _ = _profiled(engine)
    assert engine.poisoned == [PLAIN[1]]
    assert records[0].eager is None
    assert "a planted refusal" in records[1].failure


def test_profile_round_robin_takes_ready_keys_in_turn():
    engine = ScriptedEngine(PLAIN + TWINS, failing=[PLAIN[1]])
    profiled, sink = _profiled(engine)
    engine.runner.launched.clear()
    records = profile_round_robin(engine, profiled, engine.clock, sink)
    assert engine.runner.launched == [PLAIN[0], TWINS[0]] * 4
    assert [r.round_robin is None for r in records] == [False, True, False]
    assert records[0].round_robin.launch.count == 3
    frame = sink.table().to_pandas()
    assert np.count_nonzero(frame["phase"] == "round-robin") == 6


def test_profile_round_robin_of_no_rounds_changes_nothing():
    engine = ScriptedEngine(PLAIN)
    measure = engine.config.measure.model_copy(update={"round_robin_rounds": 0})
    engine.config = engine.config.model_copy(update={"measure": measure})
    profiled, sink = _profiled(engine)
    assert profile_round_robin(engine, profiled, engine.clock, sink) == profiled


@pytest.mark.parametrize("has_device", [True, False])
def test_profile_key_has_device_times_only_with_a_device(has_device):
    records, _ = _profiled(ScriptedEngine(PLAIN[:1], has_device=has_device))
    device = records[0].replay.device
    assert (device.median_ns == 3_000) if has_device else device is None


def test_profile_key_says_what_bounds_an_eager_step_only_with_a_device():
    records, _ = _profiled(ScriptedEngine(PLAIN[:1], has_device=True))
    assert records[0].bound == "host"
    records, _ = _profiled(ScriptedEngine(PLAIN[:1]))
    assert records[0].bound is None


def test_capture_where_processes_are_hidden_has_no_per_process_figure_and_says_unknown():
    class Hidden(_ScriptedMemory):
        def read(self):
            return dataclasses.replace(
                self.read_between(), processes=process_view([(501, None)], pid=1)
            )

    memory = Hidden()
    engine = ScriptedEngine(PLAIN + TWINS, on_mark=_script(memory))
    records, points, _ = _capture(engine, memory)
    totals = memory_totals(engine, points, records)
    assert [r.failure for r in records] == [None] * 3
    for seen in (*(r.witness for r in records), totals.plain_witness, totals.twin_witness):
        assert seen.device_delta_bytes > 0
        assert seen.nvml_delta_bytes is None
        assert seen.nvml_note.startswith("per-process view not available here")
        assert seen.neighbours == "unknown"
    table = totals_table(RankRecord(graphs=tuple(records), totals=totals)).to_text()
    assert "other processes on the device: unknown" in table


def _within(engine, limit_bytes):
    capture = CaptureConfig(max_graph_memory_bytes=limit_bytes)
    engine.config = engine.config.model_copy(update={"capture": capture})
    engine.model_config = tiny_model()
    return engine


def test_keys_are_left_out_by_the_memory_that_those_before_them_took():
    memory = _ScriptedMemory()
    engine = _within(ScriptedEngine(PLAIN + TWINS, on_mark=_script(memory)), 50 * MIB)
    records, points, _ = _capture(engine, memory)
    # 32 + 8 + 3 MiB by the first key, 4 + 3 by the second: none is left for any twin.
    assert [record.key for record in records] == PLAIN
    assert list(points.left_out) == [str(TWINS[0])]
    assert "50 MiB measured before it" in points.left_out[str(TWINS[0])]


def test_budget_of_graph_memory_asks_nothing_of_a_tape():
    engine = _within(ScriptedEngine(PLAIN), 1)
    records, points, _ = _capture(engine, _NoMemory())
    assert [record.key for record in records] == PLAIN
    assert not points.left_out


def test_a_profiled_key_says_at_which_pace_the_host_ran_beside_it():
    records, _ = _profiled(ScriptedEngine(PLAIN))
    assert all(record.host_pace_ns is not None for record in records)


def _paced(monkeypatch, *paces_us):
    """Lets the host's loop take these times, two for each hot series, then the last one."""
    left = list(paces_us)
    monkeypatch.setattr(
        profile, "host_pace_ns", lambda clock: 1000 * (left.pop(0) if len(left) > 1 else left[0])
    )


def test_hot_series_that_met_a_slow_host_are_taken_again(monkeypatch):
    _paced(monkeypatch, 310, 320, 300, 600, 700, 310, 300, 320)
    engine = ScriptedEngine(PLAIN)
    records, sink = _profiled(engine)
    assert [one.host_pace_ns for one in records] == [320_000, 600_000]
    engine.runner.costs["launch"] = lambda key: 2_000
    told = []
    # The second pass meets a host as fast as the others'; the first does not help.
    (again,) = repeat_slow(engine, records, engine.clock, sink, say=told.append)
    assert (again.key, again.host_pace_ns) == (PLAIN[1], 320_000)
    assert again.replay.launch.median_ns == 2_000
    assert (again.eager, again.hot_repeats) == (records[1].eager, 1)
    assert len(told) == 2
    table = sink.table().to_pandas()
    hot = table[table.phase == "hot"].groupby("key", observed=True).launch_ns.max()
    assert hot.to_dict() == {str(PLAIN[0]): 3_000, str(PLAIN[1]): 2_000}
    assert again.replay.launch.count == (table[table.phase == "hot"].key == again.label).sum()


def test_the_pace_alone_chooses_the_series_and_never_the_launches(monkeypatch):
    _paced(monkeypatch, 300, 300, 600, 600, 599)
    engine = ScriptedEngine(PLAIN)
    records, sink = _profiled(engine)
    engine.runner.costs["launch"] = lambda key: 9_000
    (again,) = repeat_slow(engine, records, engine.clock, sink)
    assert (again.replay.launch.median_ns, again.host_pace_ns) == (9_000, 599_000)


def test_doubts_of_a_series_go_with_it(monkeypatch):
    _paced(monkeypatch, 300, 300, 600, 600, 300)
    costs = iter([90_000] * 100)
    engine = ScriptedEngine(PLAIN)
    records, sink = _profiled(engine)
    doubted = records[1].model_copy(
        update={"warnings": ("neighbour-moved: a", "noisy: replay: b", "throttled: c")}
    )
    engine.runner.costs["launch"] = lambda key: next(costs)
    (again,) = repeat_slow(engine, [records[0], doubted], engine.clock, sink)
    assert again.warnings == ("neighbour-moved: a",)


def test_a_refused_repeat_fails_its_key_and_the_others_go_on(monkeypatch):
    _paced(monkeypatch, 300, 300, 600, 600, 600, 600, 300)
    engine = ScriptedEngine([full_key(8), full_key(4), full_key(2)])
    records, sink = _profiled(engine)
    engine._refused.add(full_key(4))
    refused, again = repeat_slow(engine, records, engine.clock, sink)
    assert (refused.key, again.key) == (full_key(4), full_key(2))
    assert "a planted refusal" in refused.failure
    assert (again.failure, again.host_pace_ns) == (None, 300_000)


def test_keys_of_another_process_are_compared_with_and_not_taken_again(monkeypatch):
    _paced(monkeypatch, 600, 600, 300, 300, 300)
    engine = ScriptedEngine(PLAIN)
    records, sink = _profiled(engine)
    kept = [one.model_copy(update={"timing_process_id": 1}) for one in records]
    assert list(repeat_slow(engine, kept, engine.clock, sink)) == []
    (again,) = repeat_slow(engine, [records[0], kept[1]], engine.clock, sink)
    assert again.key == PLAIN[0]


def test_repeating_ends_when_its_time_is_up(monkeypatch):
    _paced(monkeypatch, 300, 300, 600, 600, 590)
    engine = ScriptedEngine(PLAIN)
    records, sink = _profiled(engine)
    now_s = iter([0, 10, 50, 61, 62, 63, 64])
    monkeypatch.setattr(profile.time, "monotonic", lambda: next(now_s))
    told = []
    (again,) = repeat_slow(engine, records, engine.clock, sink, say=told.append)
    assert (again.hot_repeats, len(told)) == (1, 1)


@pytest.mark.parametrize("why", ["quiet", "ranks", "tape", "setting"])
def test_nothing_is_taken_again_where_it_would_not_help_or_must_not(monkeypatch, why):
    _paced(monkeypatch, 300, 300, 370 if why == "quiet" else 600, 300)
    engine = ScriptedEngine(PLAIN)
    records, sink = _profiled(engine)
    before = sink.table()
    if why == "ranks":
        engine.runner.has_peers = True
    if why == "tape":
        engine.recorder.kind = "tape"
    if why == "setting":
        measure = engine.config.measure.model_copy(update={"slow_host_repeats": 0})
        engine.config = engine.config.model_copy(update={"measure": measure})
    launched = len(engine.runner.launched)
    assert list(repeat_slow(engine, records, engine.clock, sink)) == []
    assert len(engine.runner.launched) == launched
    assert sink.table().equals(before)
