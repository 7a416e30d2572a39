import numpy as np
import pytest

from cgprof.cost.launch_model import fit
from cgprof.record.types import RankRecord
from cgprof.report.canvas import png
from cgprof.report.frames import launch_points_frame
from cgprof.report.plots_of_launch import event_records_figure, waits_figure
from tests.support.kept import kept_run
from tests.support.planted_launches import WAITS, planted_points, truth_ns
from tests.support.runs import cuda_dbo_run, run_record

POINTS = planted_points()
MODEL = fit(POINTS, seed=0)


def run_with(*models):
    ranks = tuple(RankRecord(rank=rank, launch_model=model) for rank, model in enumerate(models))
    return run_record("cuda", (), ranks=ranks)


def with_first(**changes):
    """The planted points; the first of them says something else."""
    points = (POINTS[0].model_copy(update=changes), *POINTS[1:])
    return run_with(MODEL.model_copy(update={"points": points}))


def series(axes):
    return {group.get_label(): group.lines[0] for group in axes.containers}


def bar_ends_us(axes, name):
    (lines,) = next(group for group in axes.containers if group.get_label() == name).lines[2]
    return [(below[1], above[1]) for below, above in lines.get_segments()]


def test_waits_figure_joins_graphs_of_as_many_kernels_by_rising_wait():
    (axes,) = waits_figure(launch_points_frame(run_with(MODEL))).axes
    lines = series(axes)
    assert {"10 kernels", "600 kernels", "1200 kernels"} <= set(lines)
    waited_ms = np.array(list(WAITS)) / 1e6 + 2e-3 * 600
    assert lines["600 kernels"].get_xdata() == pytest.approx(waited_ms)
    launch_us = [truth_ns({"kernel": 600}, round(1e6 * waited)) / 1e3 for waited in waited_ms]
    assert lines["600 kernels"].get_ydata() == pytest.approx(launch_us, abs=1e-3)
    assert axes.get_ylim()[0] == 0


def test_waits_figure_holds_straight_graphs_of_kernels_alone():
    kernels = [point for point in POINTS if point.kind == "kernel"]
    (axes,) = waits_figure(launch_points_frame(run_with(MODEL))).axes
    assert sum(len(line.get_xdata()) for line in series(axes).values()) == len(kernels)


def test_bars_are_iqr_half_on_each_side_and_never_below_zero():
    assert (POINTS[0].kind, POINTS[0].counts["kernel"]) == ("kernel", 10)
    wide = with_first(median_ns=20_000, iqr_ns=60_000, waited_ns=0)
    (axes,) = waits_figure(launch_points_frame(wide)).axes
    assert bar_ends_us(axes, "10 kernels")[0] == pytest.approx((0, 50))
    assert series(axes)["10 kernels"].get_xdata()[0] == 0
    narrow = with_first(median_ns=20_000, iqr_ns=4_000, waited_ns=0)
    (axes,) = waits_figure(launch_points_frame(narrow)).axes
    assert bar_ends_us(axes, "10 kernels")[0] == pytest.approx((18, 22))


def test_bars_reach_from_the_lower_quartile_to_the_upper_where_it_is_known():
    run = with_first(median_ns=20_000, p25_ns=19_000, iqr_ns=6_000, waited_ns=0)
    (axes,) = waits_figure(launch_points_frame(run)).axes
    assert bar_ends_us(axes, "10 kernels")[0] == pytest.approx((19, 25))
    assert series(axes)["10 kernels"].get_ydata()[0] == pytest.approx(19)


def test_event_records_figure_sets_launch_against_their_number():
    (axes,) = event_records_figure(launch_points_frame(run_with(MODEL))).axes
    (line,) = series(axes).values()
    assert list(line.get_xdata()) == [1, 10, 50, 100, 200, 400]
    points = [point for point in POINTS if point.kind == "event-record"]
    assert list(line.get_ydata()) == [point.median_ns / 1e3 for point in points]


@pytest.mark.parametrize("draw", [waits_figure, event_records_figure])
def test_each_rank_has_its_axes(draw):
    figure = draw(launch_points_frame(run_with(MODEL, None, MODEL)))
    assert [axes.get_title() for axes in figure.axes] == ["rank 0", "rank 2"]


@pytest.mark.parametrize("draw", [waits_figure, event_records_figure])
def test_run_without_a_launch_model_has_nothing_to_plot(draw):
    (axes,) = draw(launch_points_frame(cuda_dbo_run())).axes
    assert [text.get_text() for text in axes.texts] == ["nothing to plot"]


@pytest.mark.parametrize("draw", [waits_figure, event_records_figure])
def test_figures_of_a_real_run_are_drawn_with_their_legends_beside(draw):
    figure = draw(launch_points_frame(kept_run()))
    assert png(figure).startswith(b"\x89PNG")
    for axes in figure.axes:
        legend = axes.get_legend().get_window_extent()
        assert axes.get_window_extent().x1 - 1 <= legend.x0 < legend.x1 <= figure.bbox.x1
