import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from cgprof.report.canvas import png
from cgprof.report.frames import graphs_frame
from cgprof.report.plots import launch_figure, stages_figure
from cgprof.report.plots_of_memory import memory_figure
from tests.support.runs import (
    cuda_dbo_run,
    cuda_graph,
    failed_graph,
    key,
    run_record,
    stages,
    tape_dbo_run,
)

ROOT = Path(__file__).parents[2]
PNG = b"\x89PNG"


def figures(record):
    frame = graphs_frame(record)
    return [launch_figure(frame), memory_figure(frame, record), stages_figure(frame)]


def line(axes, name):
    return next(one for one in axes.lines if one.get_label() == name)


@pytest.mark.parametrize(
    "record",
    [
        cuda_dbo_run(),
        tape_dbo_run(),
        run_record("cuda", (cuda_graph(key(8)),)),
        run_record("cuda", (failed_graph(key(8)),)),
        run_record("cuda", ()),
    ],
    ids=["twins", "tape", "one", "failed", "none"],
)
def test_figures_are_drawn_for_any_number_of_keys(record):
    assert all(png(figure).startswith(PNG) for figure in figures(record))


def test_figures_without_keys_say_nothing_to_plot():
    for figure in figures(run_record("cuda", ())):
        assert {text.get_text() for axes in figure.axes for text in axes.texts} == {
            "nothing to plot"
        }


def test_launch_figure_keeps_plain_keys_and_twins_apart():
    plain, twins = launch_figure(graphs_frame(cuda_dbo_run())).axes
    assert (plain.get_title(), twins.get_title()) == ("plain keys", "twins")
    assert list(line(plain, "replay, hot").get_ydata()) == [10, 20]
    assert list(line(plain, "replay, hot").get_xdata()) == [8, 64]
    assert line(twins, "replay, hot").get_ydata()[1] == 36
    assert plain.get_yscale() == "log"


def test_launch_figure_draws_a_null_as_a_gap_and_names_a_zero():
    graphs = (
        cuda_graph(key(4)),
        cuda_graph(key(8), replay=None),
        cuda_graph(key(16), replay=stages(0)),
    )
    axes = launch_figure(graphs_frame(run_record("cuda", graphs))).axes[0]
    assert np.array_equal(
        line(axes, "replay, hot").get_ydata(), [20, np.nan, np.nan], equal_nan=True
    )
    assert "zero, not on the log axis: replay, hot" in axes.get_xlabel()


def test_launch_figure_labels_tape_times():
    figure = launch_figure(graphs_frame(tape_dbo_run()))
    assert "CPU stand-in" in figure.get_suptitle()


def test_figures_need_no_display_whatever_the_backend():
    program = (
        "from tests.support.runs import cuda_dbo_run\n"
        "from cgprof.report.frames import graphs_frame\n"
        "from cgprof.report.canvas import png\n"
        "from cgprof.report.plots import launch_figure\n"
        "assert png(launch_figure(graphs_frame(cuda_dbo_run()))).startswith(b'\\x89PNG')\n"
        "import sys; assert 'matplotlib.pyplot' not in sys.modules"
    )
    environment = os.environ | {"MPLBACKEND": "TkAgg"}
    environment.pop("DISPLAY", None)
    subprocess.run([sys.executable, "-c", program], check=True, env=environment, cwd=ROOT)


def test_stages_figure_leaves_out_what_a_tape_does_not_measure():
    def names(record):
        axes = stages_figure(graphs_frame(record)).axes[0]
        return {text.get_text() for text in axes.get_legend().get_texts()}

    assert names(cuda_dbo_run()) - names(tape_dbo_run()) == {"device"}


@pytest.mark.parametrize("record", [cuda_dbo_run(), tape_dbo_run()], ids=["cuda", "tape"])
def test_legends_lie_beside_the_axes(record):
    for figure in figures(record):
        png(figure)
        for axes in figure.axes:
            legend = axes.get_legend().get_window_extent()
            assert legend.x0 >= axes.get_window_extent().x1 - 1
            assert legend.x1 <= figure.bbox.x1
