"""Figures of the graph memory of one run, off screen: key by key, and of the whole capture."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np
import pandas as pd
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from numpy.typing import NDArray

from cgprof.record.types import RunRecord
from cgprof.report.canvas import (
    BYTES_PER_MIB,
    KINDS,
    blank_figure,
    legend_beside,
    nothing_to_plot,
    numbers,
)
from cgprof.report.headline import headline_lines
from cgprof.report.memory_sum import MOVED, RELEASED

_PARTS = {
    "pool_bytes": "pool",
    "instantiate_bytes": "instantiate + upload",
    "outputs_bytes": "outputs",
    "workspaces_bytes": "workspaces",
    "rest_bytes": "rest",
}
_SUM_PARTS = {name: of for name, of in _PARTS.items() if name != "outputs_bytes"}
_SUM_OTHERS = {"device_delta_bytes": "device delta", "nvml_bytes": "NVML, this process"}
_MOST_TICKS = 20


def memory_figure(frame: pd.DataFrame, record: RunRecord) -> Figure:
    """Returns the parts of each key's growth, and the growth over the capture, plain then twins."""
    figure = blank_figure(rows=2, columns=1, width=11)
    parts, growth = figure.axes
    figure.suptitle("; ".join(headline_lines(record)[:1]))
    captured = frame[frame["failure"].isna()]
    if captured.empty:
        return nothing_to_plot(figure)
    _stack(parts, captured)
    _cumulate(growth, captured, record)
    for axes in figure.axes:
        _name_keys(axes, list(captured["label"]))
    return figure


def memory_sum_figure(frame: pd.DataFrame) -> Figure:
    """Returns the parts of all keys beside the device's growth and NVML's; released below zero.

    `frame` is that of `memory_sums_frame`. Where neighbours moved or memory was released, device
    delta and rest are not this process's, and are left out.
    """
    figure = blank_figure(rows=1, columns=1, width=4 + 2 * max(len(frame), 1))
    if frame.empty:
        return nothing_to_plot(figure)
    (axes,) = figure.axes
    figure.suptitle("graph memory, part by part")
    frame = frame.copy()
    doubtful = frame["verdict"].isin([MOVED, RELEASED])
    frame.loc[doubtful, ["rest_bytes", "released_bytes", "device_delta_bytes"]] = pd.NA
    places = np.arange(len(frame))
    _stack_parts(axes, frame, _SUM_PARTS, places - 0.2, 0.36)
    released = numbers(frame, "released_bytes") / BYTES_PER_MIB
    if np.isfinite(released).any():
        axes.bar(places - 0.2, -np.nan_to_num(released), 0.36, label="released")
    for place, (column, name) in zip((0.1, 0.3), _SUM_OTHERS.items(), strict=True):
        axes.bar(places + place, numbers(frame, column) / BYTES_PER_MIB, 0.18, label=name)
    axes.set_xticks(places, [_name_of_sum(row) for _, row in frame.iterrows()], fontsize=8)
    if doubtful.any():
        axes.set_xlabel("doubtful: no rest and no device delta drawn; parts may hold neighbours'")
    axes.set_ylabel("MiB")
    legend_beside(axes)
    return figure


def _name_of_sum(row: pd.Series) -> str:
    doubt, _, why = row["verdict"].partition(": ")
    return "\n".join((f"rank {row['rank']}, {row['what']}", doubt, why))


def _stack(axes: Axes, rows: pd.DataFrame) -> None:
    _stack_parts(axes, rows, _PARTS, np.arange(len(rows)), 0.8)
    axes.set_ylabel("parts of a key, MiB")
    legend_beside(axes)


def _stack_parts(
    axes: Axes,
    rows: pd.DataFrame,
    parts: Mapping[str, str],
    places: NDArray[np.floating] | NDArray[np.integer],
    width: float,
) -> None:
    """Draws negative parts below zero."""
    above, below = np.zeros(len(rows)), np.zeros(len(rows))
    for column, name in parts.items():
        sizes = np.nan_to_num(numbers(rows, column)) / BYTES_PER_MIB
        bottoms = np.where(sizes >= 0, above, below)
        axes.bar(places, sizes, width, bottom=bottoms, label=name)
        above += np.maximum(sizes, 0)
        below += np.minimum(sizes, 0)


def _cumulate(axes: Axes, rows: pd.DataFrame, record: RunRecord) -> None:
    places = np.arange(len(rows))
    added = numbers(rows, "memory_bytes") / BYTES_PER_MIB
    total = np.where(np.isnan(added), np.nan, np.nancumsum(added))
    for kind in KINDS:
        is_kind = (rows["kind"] == kind).to_numpy(dtype=bool)
        if is_kind.any():
            axes.bar(places[is_kind], total[is_kind], label=f"{kind} keys")
    source = "tape arena" if record.recorder == "tape" else "device delta"
    axes.set_ylabel(f"{source} so far, MiB")
    legend_beside(axes)


def _name_keys(axes: Axes, labels: Sequence[str]) -> None:
    step = -(-len(labels) // _MOST_TICKS)
    axes.set_xticks(
        range(0, len(labels), step), labels[::step], rotation=60, ha="right", fontsize=7
    )
