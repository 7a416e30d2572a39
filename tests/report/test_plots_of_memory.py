import numpy as np
import pytest

from cgprof.report.canvas import png
from cgprof.report.frames import graphs_frame, memory_sums_frame
from cgprof.report.plots_of_memory import memory_figure, memory_sum_figure
from tests.support.kept import kept_run
from tests.support.runs import cuda_dbo_run, cuda_graph, key, run_record, tape_dbo_run

MIB = 1024**2
NEIGHBOURS = "h200-smollm2-8-experts-full-dbo-piqa"


def sum_axes(record):
    (axes,) = memory_sum_figure(memory_sums_frame(record)).axes
    return axes


def bars(axes, name):
    return next(group for group in axes.containers if group.get_label() == name).patches


def heights(axes, name):
    return [bar.get_height() for bar in bars(axes, name)]


def labels(axes):
    return [label.get_text() for label in axes.get_xticklabels()]


def test_memory_figure_cumulates_plain_keys_then_twins():
    record = cuda_dbo_run()
    parts, growth = memory_figure(graphs_frame(record), record).axes
    assert [bar.get_height() for bar in growth.patches] == [4, 5, 14]
    tops = {bar.get_y() + bar.get_height() for bar in parts.patches}
    assert max(tops) == pytest.approx(9)
    assert growth.get_ylabel() == "device delta so far, MiB"


def test_memory_figure_leaves_a_gap_where_memory_was_not_read():
    graphs = (cuda_graph(key(8)), cuda_graph(key(4), witness=None), cuda_graph(key(2)))
    record = run_record("cuda", graphs)
    heights = [
        bar.get_height() for bar in memory_figure(graphs_frame(record), record).axes[1].patches
    ]
    assert np.array_equal(heights, [4, np.nan, 8], equal_nan=True)


def test_sum_figure_stacks_parts_up_to_the_delta_that_stands_beside_them():
    axes = sum_axes(kept_run())
    assert heights(axes, "pool") == [28, 0, 28]
    assert heights(axes, "device delta") == heights(axes, "NVML, this process") == [112, 162, 274]
    assert [bar.get_y() + bar.get_height() for bar in bars(axes, "rest")] == [112, 162, 274]
    assert labels(axes)[0] == "rank 0, plain keys\nadds up\n"
    assert "released" not in axes.get_legend_handles_labels()[1]


def test_sum_figure_of_a_run_with_neighbours_says_so_and_draws_nothing_that_is_theirs():
    axes = sum_axes(kept_run(NEIGHBOURS))
    assert heights(axes, "rest") == [0, 0, 0]
    assert np.isnan(heights(axes, "device delta")).all()
    assert heights(axes, "NVML, this process") == [96, 126, 222]
    assert labels(axes)[2] == "rank 0, all\ndoubtful\nneighbours moved"
    assert "no device delta drawn" in axes.get_xlabel()


def test_sum_figure_draws_what_was_released_below_zero():
    run = kept_run()
    totals = run.ranks[0].totals
    less = totals.twin_witness.device_delta_bytes - 9 * MIB
    witness = totals.twin_witness.model_copy(update={"device_delta_bytes": less})
    rank = run.ranks[0].model_copy(
        update={"totals": totals.model_copy(update={"twin_witness": witness})}
    )
    axes = sum_axes(run.model_copy(update={"ranks": (rank,)}))
    assert heights(axes, "released") == [0, -9, -9]


def test_sum_figure_has_a_group_for_each_rank():
    run = kept_run()
    ranks = tuple(run.ranks[0].model_copy(update={"rank": number}) for number in range(2))
    axes = sum_axes(run.model_copy(update={"ranks": ranks}))
    assert heights(axes, "NVML, this process") == [112, 162, 274] * 2
    assert [label.partition(",")[0] for label in labels(axes)] == ["rank 0"] * 3 + ["rank 1"] * 3


@pytest.mark.parametrize("record", [cuda_dbo_run(), tape_dbo_run()], ids=["cuda", "tape"])
def test_sum_figure_is_drawn_for_a_device_and_for_a_tape(record):
    figure = memory_sum_figure(memory_sums_frame(record))
    assert png(figure).startswith(b"\x89PNG")
    on_tape = record.recorder == "tape"
    (axes,) = figure.axes
    assert np.isnan(heights(axes, "device delta")).all() == on_tape
    assert on_tape == ("tape" in labels(axes)[0])
    assert max(heights(axes, "pool")) > 0


def test_sum_figure_without_totals_says_nothing_to_plot():
    axes = sum_axes(run_record("cuda", (cuda_graph(key(8)),)))
    assert [text.get_text() for text in axes.texts] == ["nothing to plot"]
