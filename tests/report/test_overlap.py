import json

import pytest

from cgprof.cost.timeline import summed
from cgprof.graphs.topology import Node, contents
from cgprof.record.timeline import TimelineTable
from cgprof.record.types import RankRecord
from cgprof.report.canvas import png
from cgprof.report.formats import OutputFormat
from cgprof.report.frames import timelines_frame
from cgprof.report.overlap import overlap_table
from cgprof.report.plots_of_overlap import overlap_figure
from cgprof.report.tables import report_document
from cgprof.report.trace import trace_text
from tests.support.runs import cuda_graph, key, run_record
from tests.support.timelines import COPY, GEMM, PLANTED, activity

PLAIN, TWIN = str(key(64)), str(key(64, 2))
LINE = "tracing stretches it, so read the order and the overlap, not the times"
FEW = contents([Node("kernel", GEMM, ())])


def run_with(**timelines):
    graphs = (cuda_graph(key(64)), cuda_graph(key(64, 2)))
    return run_record(
        "cuda", graphs, ranks=(RankRecord(graphs=graphs, timelines=timelines), RankRecord(rank=1))
    )


def test_table_has_the_sums_of_each_traced_key():
    rank = RankRecord(timelines={PLAIN: summed(PLANTED, FEW), TWIN: summed(PLANTED[:1], FEW)})
    table = overlap_table(rank)
    plain, twin = table.records()
    assert [plain[name] for name in ("span_ns", "compute_ns", "communication_ns", "both_ns")] == [
        *(500, 300, 190, 110)
    ]
    assert plain["hidden_share"] == pytest.approx(110 / 190)
    assert (plain["activities"], plain["nodes"], plain["agrees"]) == (7, 1, "NO")
    assert (twin["hidden_share"], twin["agrees"]) == (None, "yes")
    text = table.to_text()
    assert LINE in text
    assert "the run's notes say how they differ" in text
    agreeing = overlap_table(RankRecord(timelines={TWIN: summed(PLANTED[:1], FEW)}))
    assert "differ" not in agreeing.to_text()


def test_report_has_the_table_where_a_replay_was_traced_and_only_there():
    made = report_document([run_with(**{TWIN: summed(PLANTED, None)})])
    text = made.render(OutputFormat.TEXT)
    assert text.count("overlap of communication and compute") == 1
    assert LINE in text
    (row,) = json.loads(made.render(OutputFormat.JSON, "overlap"))
    assert (row["rank"], row["key"], row["both_ns"], row["agrees"]) == (0, TWIN, 110, None)
    assert f"| {TWIN} |" in made.render(OutputFormat.MD, "overlap")
    without = report_document([run_with()])
    assert "overlap of" not in without.render(OutputFormat.TEXT)
    header = without.render(OutputFormat.CSV, "overlap")
    assert header.startswith("run,rank,key,span_ns,")
    assert len(header.splitlines()) == 1


def spans(axes, lane):
    (found,) = [one for one in axes.collections if one.get_label() == lane]
    return [tuple(path.get_extents().intervalx) for path in found.get_paths()]


def test_figure_has_both_lanes_of_each_key_on_one_scale(tmp_path):
    later = [one._replace(start_ns=2 * one.start_ns) for one in PLANTED]
    TimelineTable({PLAIN: PLANTED, TWIN: later}).write(tmp_path / "timelines.parquet")
    figure = overlap_figure(timelines_frame(tmp_path))
    plain, twin = figure.axes
    assert (plain.get_title(loc="left"), twin.get_title(loc="left")) == (PLAIN, TWIN)
    planned = [(50e-6, 200e-6), (240e-6, 260e-6), (300e-6, 320e-6)]
    assert spans(plain, "communication") == [pytest.approx(one) for one in planned]
    assert spans(twin, "compute")[-1] == pytest.approx((800e-6, 900e-6))
    assert plain.get_xlim() == twin.get_xlim() == pytest.approx((0, 900e-6))
    assert [label.get_text() for label in plain.get_yticklabels()] == ["compute", "communication"]
    cut = overlap_figure(timelines_frame(tmp_path), 1e-4, 3e-4)
    assert {axes.get_xlim() for axes in cut.axes} == {(1e-4, 3e-4)}
    assert png(figure).startswith(b"\x89PNG")


def test_figure_of_a_run_without_timelines_says_so(tmp_path):
    (axes,) = overlap_figure(timelines_frame(tmp_path)).axes
    assert [text.get_text() for text in axes.texts] == ["nothing to plot"]


def test_trace_has_a_process_a_role_and_a_thread_a_stream():
    copy = activity("communication", 1_500, 2_000, stream=13, kind="memcpy", name=COPY)
    events = json.loads(trace_text(TWIN, [PLANTED[0], copy]))["traceEvents"]
    names = {one["pid"]: one["args"]["name"] for one in events if one["name"] == "process_name"}
    gemm, copied = (one for one in events if one["ph"] == "X")
    assert names[gemm["pid"]].startswith(f"compute of {TWIN}")
    assert names[copied["pid"]].startswith("communication of")
    assert (gemm["name"], gemm["args"]["name"], gemm["tid"]) == ("gemm", GEMM, 7)
    assert (copied["name"], copied["ts"], copied["dur"], copied["tid"]) == (COPY, 1.5, 0.5, 13)
