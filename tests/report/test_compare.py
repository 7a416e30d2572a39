import dataclasses

import pytest

from cgprof.errors import RecordError, UnsupportedError
from cgprof.record.place import Device
from cgprof.report.compare import compare_runs, compare_sides
from cgprof.report.pairing import Side
from tests.support.documents import data_of, text_of
from tests.support.runs import (
    MIB,
    cuda_dbo_run,
    cuda_graph,
    cuda_run,
    failed_graph,
    key,
    leg,
    run_record,
    samples_of,
    stages,
    tape_dbo_run,
    tape_graph,
    totals,
    write_run,
)

SLOWER = {"replay": stages(26_000, 4_000_000), "round_robin": stages(60_000, 4_000_000)}
FASTER = {"replay": stages(14_000, 4_000_000), "round_robin": stages(30_000, 4_000_000)}


def side(record, path="runs/x", spread=0.01):
    return Side(path=path, record=record, samples=samples_of(record, spread).table().to_pandas())


def one_key(**changes):
    return run_record("cuda", (cuda_graph(key(8), **changes),))


def test_plain_against_dbo_reads_as_agreed():
    text = text_of(
        compare_sides(side(cuda_run(), "runs/a"), side(cuda_dbo_run(), "runs/b")).to_document()
    )
    head, keys, twins, alone, foot = text.split("\n\n")
    assert head == (
        "A: runs/a (a1b2)\n"
        "B: runs/b (a1b2)\n"
        "recorder: cuda: launch times are host times, device times come from device events\n"
        "differs: microbatch.enabled: False in A, True in B"
    )
    assert keys.splitlines()[3] == (
        "FULL-64x64q1     20 us     20 us  x1.00 [1.00, 1.00]  x1.00 [1.00, 1.00]  "
        "x1.00 [1.00, 1.00]  x1.00 [1.00, 1.00]      x1.00         0 B  pass      pass      same"
    )
    assert "x1.80 [1.79, 1.81]" in twins.splitlines()[3]
    assert "shown, not judged" in twins
    assert alone == (
        "keys without a partner\n"
        "FULL-64x64q1-mb2: only in B: not planned in A\n"
        "FULL-32x32q1-mb2: not planned in A; "
        "failed (out of memory: 3 MiB free, lower --max-capture-size) in B"
    )
    assert foot == (
        "A: graph memory: 0.31 GiB\n"
        "B: graph memory: 0.31 GiB plain -> 0.63 GiB with twins (x2.03)\n"
        "graph memory B/A: x2.03\n"
        "a change counts only if the 95 % bootstrap interval of the ratio of medians excludes 1 "
        "and the median moves by more than 5 %\n"
        "same: the interval lies within 5 % of 1, or excludes 1 while the median moves by 5 % or "
        "less, or the samples are identical; all else is inconclusive\n"
        "an interval covers one burst of samples, not what moves between bursts: a launch change "
        "counts only if replay and round robin both count in one direction, and the host's own "
        "pace did not change that way by over 1.25 times; else inconclusive\n"
        "judged: launch and device time (replay, round robin, device), parity, keys lost, "
        "scores by replay; "
        "shown only: eager, nodes, memory (one reading each, no interval)\n"
        "the whole is the first found of: regression, inconclusive, improved, same\n"
        "verdict: same"
    )


@pytest.mark.parametrize(
    ("changes", "spread", "verdict"),
    [
        ({}, 0.01, "same"),
        (SLOWER, 0.01, "regression"),
        (FASTER, 0.01, "improved"),
        ({"replay": stages(26_000, 4_000_000)}, 0.01, "inconclusive"),
        ({"replay": stages(14_000, 4_000_000)}, 0.01, "inconclusive"),
        ({"replay": stages(20_600, 4_000_000)}, 0.01, "same"),
        ({"replay": stages(20_000, 5_000_000)}, 0.01, "regression"),
        ({"round_robin": stages(60_000)}, 0.01, "inconclusive"),
        ({"eager": stages(80_000_000)}, 0.01, "same"),
        ({"replay": stages(21_000, 4_000_000)}, 0.5, "inconclusive"),
        ({"replay": None}, 0.01, "inconclusive"),
        ({"parity": (leg("replay-eager", passed=False),)}, 0.01, "regression"),
        ({"parity": ()}, 0.01, "inconclusive"),
    ],
)
def test_verdict_follows_times_and_parity(changes, spread, verdict):
    comparison = compare_sides(
        side(one_key(), spread=spread), side(one_key(**changes), spread=spread)
    )
    assert comparison.verdict == verdict
    assert text_of(comparison.to_document()).endswith(f"verdict: {verdict}")
    assert data_of(comparison.to_document())["verdict"] == verdict


def test_slower_launch_on_a_slower_host_is_no_regression_and_the_host_is_shown():
    a = side(one_key(host_pace_ns=300_000))
    b = side(one_key(host_pace_ns=570_000, **SLOWER))
    comparison = compare_sides(a, b)
    assert comparison.verdict == "inconclusive"
    document = comparison.to_document()
    assert "host loop B/A" in text_of(document)
    assert "x1.90" in text_of(document)
    assert data_of(document)["keys"][0]["host_ratio"] == pytest.approx(1.9)
    assert "host loop" not in text_of(compare_sides(side(one_key()), b).to_document())


def test_key_that_fails_in_b_is_listed_and_a_regression():
    a = run_record("cuda", (cuda_graph(key(64)), cuda_graph(key(32))))
    d = run_record("cuda", (cuda_graph(key(64)), failed_graph(key(32), "boom")))
    comparison = compare_sides(side(a), side(d))
    assert [pair.label_b for pair in comparison.pairs] == ["FULL-64x64q1"]
    assert "FULL-32x32q1: only in A: failed (boom) in B" in text_of(comparison.to_document())
    assert comparison.verdict == "regression"
    assert compare_sides(side(d), side(a)).verdict == "improved"


def test_keys_of_one_run_only_are_listed_with_their_reasons():
    skipped = cuda_graph(key(512, 2))
    pending = cuda_graph(key(16))
    a = run_record("cuda", (cuda_graph(key(8)), skipped, pending, cuda_graph(key(4))))
    b = run_record("cuda", (cuda_graph(key(8)),), status="partial")
    plan = b.plan.model_copy(update={"labels": ("FULL-8x8q1", "FULL-16x16q1")})
    b = b.model_copy(update={"plan": plan})
    comparison = compare_sides(side(a), side(b))
    assert {one.label: one.reason for one in comparison.unmatched} == {
        "FULL-512x512q1-mb2": "only in A: skipped (unreachable: 256 rows) in B",
        "FULL-16x16q1": "only in A: planned and not recorded (run is partial) in B",
        "FULL-4x4q1": "only in A: not planned in B",
    }
    assert comparison.verdict == "inconclusive"


def test_other_device_is_refused_and_forced_is_stamped(tmp_path):
    sizes = (64, 32, 1)
    h200 = run_record("cuda", [cuda_graph(key(size)) for size in sizes])
    h100 = run_record("cuda", [cuda_graph(key(size)) for size in (128, *sizes)])
    device = Device(index=0, name="NVIDIA H100")
    h100 = h100.model_copy(
        update={"environment": h100.environment.model_copy(update={"device": device})}
    )
    a, b = write_run(tmp_path / "a", h200), write_run(tmp_path / "b", h100)
    with pytest.raises(UnsupportedError, match="device: NVIDIA H200 in A, NVIDIA H100 in B"):
        compare_runs(a, b)
    forced = compare_runs(a, b, force=True)
    assert text_of(forced.to_document()).startswith(
        "FORCED, NOT COMPARABLE: device: NVIDIA H200 in A, NVIDIA H100 in B\n"
    )
    assert [pair.label_a for pair in forced.pairs] == ["FULL-64x64q1", "FULL-32x32q1", "FULL-1x1q1"]
    assert "FULL-128x128q1: only in B: not planned in A" in text_of(forced.to_document())
    assert data_of(forced.to_document())["forced"][0]["field"] == "device"


def test_run_with_another_unit_is_refused(tmp_path):
    path = write_run(tmp_path / "ms", cuda_run())
    summary = path / "summary.json"
    summary.write_text(summary.read_text().replace('"median_ns"', '"median_ms"'))
    with pytest.raises(RecordError, match="median_ns"):
        compare_runs(path, path)


@pytest.mark.parametrize("force", [False, True])
def test_tape_is_never_set_beside_cuda(tmp_path, force):
    a, b = write_run(tmp_path / "a", tape_dbo_run()), write_run(tmp_path / "b", cuda_dbo_run())
    with pytest.raises(UnsupportedError, match="recorder: tape in A, cuda in B"):
        compare_runs(a, b, force=force)


def test_tape_runs_compare_without_device_times(tmp_path):
    path = write_run(tmp_path / "a", tape_dbo_run())
    comparison = compare_runs(path, path)
    assert comparison.verdict == "same"
    assert "CPU stand-in times, never GPU times" in text_of(comparison.to_document())
    assert data_of(comparison.to_document())["keys"][0]["changes"]["device"]["verdict"] is None


def test_zero_baseline_is_null_in_json_and_a_dash_in_text():
    a = run_record(
        "cuda",
        (cuda_graph(key(8), replay=stages(0, 0), nodes={}),),
        rank_totals=totals("device", 0, 0),
    )
    b = run_record("cuda", (cuda_graph(key(8)),), rank_totals=totals("device", MIB, 0))
    comparison = compare_sides(side(a), side(b))
    document = data_of(comparison.to_document())
    assert document["keys"][0]["changes"]["replay"]["ratio"] is None
    assert document["memory_ratio"] is None
    assert "graph memory B/A: -" in text_of(comparison.to_document())
    assert comparison.verdict == "inconclusive"


def test_single_sample_gives_a_ratio_without_an_interval():
    comparison = compare_sides(
        side(one_key(replay=stages(20_000, 4_000_000, count=1))),
        side(one_key(replay=stages(40_000, 4_000_000, count=1))),
    )
    assert "x2.00 [no interval]" in text_of(comparison.to_document())
    assert comparison.verdict == "inconclusive"
    assert data_of(comparison.to_document())["keys"][0]["changes"]["replay"]["low"] is None


@pytest.mark.parametrize("factor", [0.5, 2])
def test_changed_launch_of_a_tape_is_inconclusive_and_says_why(factor):
    times = stages(int(1_000_000 * factor))
    a = run_record("tape", (tape_graph(key(8)),))
    b = run_record("tape", (tape_graph(key(8), replay=times, round_robin=times),))
    comparison = compare_sides(side(a), side(b))
    assert comparison.verdict == "inconclusive"
    assert "stand-ins on a shared CPU" in text_of(comparison.to_document())
    assert data_of(comparison.to_document())["keys"][0]["launch_verdict"] == "inconclusive"


def test_run_beside_itself_is_the_same_whatever_its_spread_and_without_times():
    noisy = side(one_key(), spread=0.9)
    assert compare_sides(noisy, noisy).verdict == "same"
    untimed = side(one_key(eager=None, replay=None, round_robin=None))
    assert compare_sides(untimed, untimed).verdict == "same"


def test_a_twin_stands_beside_the_plain_key_of_any_query_lengths():
    mixed = dataclasses.replace(key(64), uniform_query_len=None)
    plain = run_record("cuda", (cuda_graph(mixed),))
    both = run_record("cuda", (cuda_graph(mixed), cuda_graph(key(64, 2))))
    text = text_of(compare_sides(side(plain, "runs/a"), side(both, "runs/b")).to_document())
    twins = text.split("\n\n")[2]
    assert twins.splitlines()[3].startswith(str(key(64, 2)))
