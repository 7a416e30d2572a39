"""Figures of the synthetic graphs whose launches were timed: by the wait before, by event records.

`frame` is that of `launch_points_frame`. Bars are quartiles: a dot stands at the lower one, or in
older runs at the median, with half of their distance on each side.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pandas as pd
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import StrMethodFormatter
from numpy.typing import NDArray

from cgprof.report.canvas import (
    NS_PER_MS,
    NS_PER_US,
    blank_figure,
    legend_beside,
    nothing_to_plot,
    numbers,
)

_LEAST_WAIT_MS = 0.01  # below it the axis is linear, so that no wait has its place too


def waits_figure(frame: pd.DataFrame) -> Figure:
    """Returns launch against the host's wait before it, graphs of as many kernels joined."""
    rows = frame[(frame["series"] == "kernel") & (frame["forks"] == 0)]
    return _by_rank(rows, "launch after a wait for the device", _draw_waits)


def event_records_figure(frame: pd.DataFrame) -> Figure:
    """Returns launch against the number of event-record nodes; kernels and forks come with them."""
    rows = frame[frame["event_records"] > 0]
    return _by_rank(rows, "launch with event-record nodes", _draw_event_records)


def _by_rank(rows: pd.DataFrame, title: str, draw: Callable[[Axes, pd.DataFrame], None]) -> Figure:
    ranks = list(dict.fromkeys(rows["rank"]))
    columns = max(len(ranks), 1)
    figure = blank_figure(rows=1, columns=columns, width=7 * columns)
    if not ranks:
        return nothing_to_plot(figure)
    figure.suptitle(title)
    for axes, rank in zip(figure.axes, ranks, strict=True):
        axes.set_title(f"rank {rank}")
        draw(axes, rows[rows["rank"] == rank])
        axes.set_ylabel("launch and its quartiles, us")
        axes.grid(visible=True, alpha=0.3)
        legend_beside(axes)
    return figure


def _draw_waits(axes: Axes, rows: pd.DataFrame) -> None:
    for kernels, some in rows.sort_values("waited_ns").groupby("kernels"):
        waited = numbers(some, "waited_ns") / NS_PER_MS
        _draw_launches(axes, waited, some, f"{kernels} kernels")
    axes.set_xscale("symlog", linthresh=_LEAST_WAIT_MS)
    axes.xaxis.set_major_formatter(StrMethodFormatter("{x:g}"))
    axes.set_xlabel("host waited before each launch, ms")
    axes.set_ylim(bottom=0)


def _draw_event_records(axes: Axes, rows: pd.DataFrame) -> None:
    rows = rows.sort_values("event_records")
    _draw_launches(axes, numbers(rows, "event_records"), rows, "beside a kernel each")
    axes.set_xscale("log")
    axes.set_yscale("log")
    axes.xaxis.set_major_formatter(StrMethodFormatter("{x:g}"))
    axes.set_xlabel("event-record nodes of the graph")


def _draw_launches(axes: Axes, places: NDArray[np.float64], rows: pd.DataFrame, name: str) -> None:
    """Draws no bar below zero, which no launch takes."""
    launch = numbers(rows, "launch_ns") / NS_PER_US
    low, high = (
        numbers(rows, column) / NS_PER_US for column in ("launch_low_ns", "launch_high_ns")
    )
    spread = [launch - low, high - launch]
    axes.errorbar(places, launch, yerr=spread, marker="o", markersize=3, capsize=3, label=name)
