"""Figures of traced replays: what the device computed and what it communicated, over time.

`frame` is that of `timelines_frame`. Tracing stretches a replay: read order and overlap.
"""

from __future__ import annotations

import pandas as pd
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from cgprof.report.canvas import NS_PER_MS, blank_figure, nothing_to_plot, numbers

_LANES = {"compute": "tab:blue", "communication": "tab:orange"}
_HEIGHT = 0.8


def overlap_figure(
    frame: pd.DataFrame, begin_ms: float = 0.0, end_ms: float | None = None
) -> Figure:
    """Returns two lanes over time for each key of the frame, all on one scale of time.

    `begin_ms` and `end_ms` cut out a stretch of the replay, in which single layers can be seen.
    """
    keys = list(dict.fromkeys(frame["key"]))
    figure = blank_figure(rows=max(len(keys), 1), columns=1, width=12)
    figure.set_figheight(1.2 + 1.6 * max(len(keys), 1))
    if not keys:
        return nothing_to_plot(figure)
    last_ms = (frame["start_ns"] + frame["duration_ns"]).max() / NS_PER_MS
    figure.suptitle("one traced replay of each key, stretched by tracing")
    for axes, key in zip(figure.axes, keys, strict=True):
        _draw_lanes(axes, frame[frame["key"] == key])
        axes.set_title(str(key), loc="left")
        axes.set_xlim(begin_ms, last_ms if end_ms is None else end_ms)
    figure.axes[-1].set_xlabel("since the first activity, ms")
    return figure


def _draw_lanes(axes: Axes, rows: pd.DataFrame) -> None:
    for lane, (role, colour) in enumerate(_LANES.items()):
        some = rows[rows["role"] == role]
        starts, widths = (numbers(some, name) / NS_PER_MS for name in ("start_ns", "duration_ns"))
        bars = list(zip(starts.tolist(), widths.tolist(), strict=True))
        axes.broken_barh(bars, (lane - _HEIGHT / 2, _HEIGHT), facecolors=colour, label=role)
    axes.set_yticks(range(len(_LANES)), list(_LANES))
    axes.invert_yaxis()
