import pytest

from cgprof.graphs.estimate import ERROR_BYTES, PlanEstimate, estimate_plan
from cgprof.report.estimates import (
    estimate_lines,
    estimate_rows,
    estimate_warnings,
    estimates_table,
    plan_estimate_line,
)
from tests.support.kept import KEPT, kept_run
from tests.support.runs import cuda_dbo_run, tape_dbo_run

GIB = 1024**3
DECODE_ONLY = "h200-qwen3-30b-a3b-full-decode-only-dbo"


def with_totals(record, **changes):
    rank = record.ranks[0]
    totals = rank.totals.model_copy(update=changes)
    return record.model_copy(update={"ranks": (rank.model_copy(update={"totals": totals}),)})


def with_nvml(record, plain, twins):
    totals = record.ranks[0].totals
    return with_totals(
        record,
        plain_witness=totals.plain_witness.model_copy(update={"nvml_delta_bytes": plain}),
        twin_witness=totals.twin_witness.model_copy(update={"nvml_delta_bytes": twins}),
    )


def test_line_of_a_plan_says_that_it_is_an_estimate_and_how_sure():
    both = PlanEstimate(plain_bytes=GIB // 8, twin_bytes=GIB // 4, error_share=0.3)
    assert plan_estimate_line(both) == (
        "estimate of graph memory: 0.12 GiB plain + 0.25 GiB twins (+-30 % or 4 MiB, from H200 "
        "figures of this engine; not measured)"
    )
    ranks = PlanEstimate(plain_bytes=2**20, twin_bytes=None, error_share=None)
    assert plan_estimate_line(ranks) == (
        "estimate of graph memory: 1 MiB plain (from H200 figures of this engine, never compared "
        "with this exchange; not measured)"
    )
    finished = PlanEstimate(
        plain_bytes=2**20, twin_bytes=None, error_share=None, finish_bytes=3 * 2**20
    )
    assert plan_estimate_line(finished).endswith("; beside it 3 MiB of graphs that finish steps")


def test_graphs_that_finish_steps_are_estimated_near_what_was_measured():
    record = kept_run(DECODE_ONLY)
    keys = [graph.key for graph in record.ranks[0].graphs]
    estimate = estimate_plan(record.model, record.config, keys)
    measured = record.ranks[0].totals.finish_graphs_bytes
    assert abs(measured / estimate.finish_bytes - 1) < 0.1
    capture = record.config.capture.model_copy(update={"finish_graphs": False})
    without = record.config.model_copy(update={"capture": capture})
    assert estimate_plan(record.model, without, keys).finish_bytes is None


@pytest.mark.parametrize("name", KEPT)
def test_kept_runs_lie_within_the_stated_error(name):
    record = kept_run(name)
    parts = ["plain", "twins", "all"] if record.config.microbatch.enabled else ["plain", "all"]
    assert estimate_warnings(record) == []
    for rank in record.ranks:
        rows = [row for row in estimate_rows(record) if row.rank == rank.rank]
        assert [row.part for row in rows] == parts
        assert [row.measured_bytes for row in rows] == [
            pytest.approx(row.estimate_bytes, rel=0.15, abs=ERROR_BYTES) for row in rows
        ]
        *some, whole = rows
        assert whole.estimate_bytes == sum(row.estimate_bytes for row in some)
        assert whole.measured_bytes == sum(row.measured_bytes for row in some)


def test_own_growth_counts_where_other_processes_moved_the_device():
    record = kept_run("h200-smollm2-8-experts-full-dbo-piqa")
    totals = record.ranks[0].totals
    plain = estimate_rows(record)[0]
    assert plain.measured_bytes == totals.plain_witness.nvml_delta_bytes
    assert plain.measured_bytes < totals.plain_bytes // 10
    assert plain.measured_by == "NVML, this process"
    unseen = estimate_rows(with_nvml(record, None, None))
    assert unseen[0].measured_bytes == totals.plain_bytes
    assert unseen[0].measured_by == "device delta"


def test_part_that_is_off_by_more_than_stated_is_warned_of():
    record = kept_run(DECODE_ONLY)
    plain, twins = (row.estimate_bytes for row in estimate_rows(record)[:2])
    assert estimate_warnings(with_nvml(record, int(1.29 * plain), int(0.71 * twins))) == []
    (line, whole) = estimate_warnings(with_nvml(record, plain, 2 * twins))
    assert line == (
        "rank 0: graph memory of twins: 0.28 GiB measured (NVML, this process), 0.14 GiB "
        "estimated: off by more than 30 %; look at the parts of each key, or at other processes"
    )
    assert "graph memory of all keys" in whole
    assert len(estimate_warnings(with_nvml(record, plain // 2, twins))) == 1


def test_small_differences_of_small_graphs_are_no_warning():
    (plain, twins, _) = estimate_rows(cuda_dbo_run())
    close = with_nvml(cuda_dbo_run(), plain.estimate_bytes + 4 * 2**20, twins.estimate_bytes)
    assert estimate_warnings(close) == []
    assert plain.estimate_bytes < 8 * 2**20
    far = with_nvml(cuda_dbo_run(), plain.estimate_bytes + 4 * 2**20 + 1, twins.estimate_bytes)
    assert len(estimate_warnings(far)) >= 1


def test_estimate_is_of_the_keys_that_were_captured():
    record = cuda_dbo_run()
    rows = estimate_rows(record)
    graphs = record.ranks[0].graphs
    captured = [graph.key for graph in graphs if graph.failure is None]
    assert len(captured) < len(graphs)
    expected = estimate_plan(record.model, record.config, captured)
    assert rows[1].estimate_bytes == expected.twin_bytes


def test_tape_and_unfinished_runs_have_nothing_to_compare():
    assert estimate_rows(tape_dbo_run()) == ()
    assert estimate_lines(tape_dbo_run()) == []
    assert estimates_table(tape_dbo_run()).rows == ()
    record = cuda_dbo_run()
    rank = record.ranks[0].model_copy(update={"totals": None})
    assert estimate_rows(record.model_copy(update={"ranks": (rank,)})) == ()


def test_line_and_table_show_both_figures_and_their_ratio():
    record = kept_run(DECODE_ONLY)
    assert estimate_lines(record) == [
        "graph memory by estimate before capture: 0.25 GiB (+-30 % or 4 MiB, from H200 figures "
        "of this engine); measured: 0.27 GiB (x1.07)"
    ]
    table = estimates_table(record)
    assert table.records()[0] == {
        "rank": 0,
        "part": "plain",
        "estimate_bytes": 119537664,
        "measured_bytes": 117440512,
        "measured_over_estimate_ratio": pytest.approx(0.982, abs=0.001),
        "measured_by": "NVML, this process",
    }
    assert table.to_text().splitlines()[-1] == (
        "estimate: +-30 % or 4 MiB, from H200 figures of this engine"
    )
