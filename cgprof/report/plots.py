"""Figures of the times of one run, drawn off screen whatever backend the machine asks for.

What was not measured is a gap; a zero has no place on a log axis and is named below it instead.
"""

from __future__ import annotations

import numpy as np
import pandas as pd
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import StrMethodFormatter

from cgprof.report.canvas import (
    KINDS,
    NS_PER_US,
    blank_figure,
    legend_beside,
    nothing_to_plot,
    numbers,
)

_LAUNCHES = {
    "eager_launch_ns": "eager",
    "round_robin_launch_ns": "replay, round robin",
    "replay_launch_ns": "replay, hot",
}
_STAGES = {
    "decide_ns": "decide",
    "prepare_ns": "prepare",
    "replay_launch_ns": "launch",
    "finish_ns": "finish",
    "wait_ns": "wait",
    "device_ns": "device",
}
_STEPS = {
    "plain_ns": "plain",
    "split_ns": "split",
    "plain_bare_ns": "plain without exchange",
    "split_bare_ns": "split without exchange",
}


def launch_figure(frame: pd.DataFrame) -> Figure:
    """Returns host launch time against tokens, plain keys and twins apart."""
    return _lines_figure(frame, _LAUNCHES, "launch, first to last enqueue")


def stages_figure(frame: pd.DataFrame) -> Figure:
    """Returns each stage of a hot replay step against tokens; the stages are never added up."""
    return _lines_figure(frame, _STAGES, "stages of a hot replay step")


def worth_figure(frame: pd.DataFrame) -> Figure:
    """Returns step times and the speed of split steps against tokens, decode and prefill apart.

    `frame` is that of `worth_frame`.
    """
    kinds = list(dict.fromkeys(frame["kind"]))
    columns = max(len(kinds), 1)
    figure = blank_figure(rows=2, columns=columns, width=6 * columns)
    if not kinds:
        return nothing_to_plot(figure)
    stand_in = (frame["recorder"] == "tape").any()
    figure.suptitle(f"steps plain and split{' (CPU stand-in times)' if stand_in else ''}")
    for column, kind in enumerate(kinds):
        rows = frame[frame["kind"] == kind].sort_values("num_tokens")
        times, speed = figure.axes[column], figure.axes[columns + column]
        times.set_title(str(kind))
        _draw_lines(times, rows, _STEPS)
        _draw_speed(speed, rows)
    return figure


def _lines_figure(frame: pd.DataFrame, series: dict[str, str], title: str) -> Figure:
    kinds = [kind for kind in KINDS if (frame["kind"] == kind).any()]
    figure = blank_figure(rows=1, columns=max(len(kinds), 1), width=6 * max(len(kinds), 1))
    if not kinds:
        return nothing_to_plot(figure)
    stand_in = (frame["recorder"] == "tape").any()
    figure.suptitle(f"{title}{' (tape: CPU stand-in times)' if stand_in else ''}")
    for axes, kind in zip(figure.axes, kinds, strict=True):
        _draw_lines(axes, frame[frame["kind"] == kind].sort_values("num_tokens"), series)
        axes.set_title("plain keys" if kind == "plain" else "twins")
    return figure


def _draw_lines(axes: Axes, rows: pd.DataFrame, series: dict[str, str]) -> None:
    zeros = []
    anything = False
    for column, name in series.items():
        values = numbers(rows, column) / NS_PER_US
        if (values == 0).any():
            zeros.append(name)
        values[values <= 0] = np.nan
        if not np.isfinite(values).any():
            continue
        anything = True
        axes.plot(numbers(rows, "num_tokens"), values, marker="o", markersize=3, label=name)
    note = f"\nzero, not on the log axis: {', '.join(zeros)}" if zeros else ""
    axes.set_xlabel(f"tokens of the key{note}")
    axes.set_ylabel("median, us")
    axes.set_xscale("log", base=2)
    axes.xaxis.set_major_formatter(StrMethodFormatter("{x:g}"))
    if not anything:
        axes.text(0.5, 0.5, "nothing measured", ha="center", transform=axes.transAxes)
        return
    axes.set_yscale("log")
    axes.grid(visible=True, alpha=0.3)
    legend_beside(axes)


def _draw_speed(axes: Axes, rows: pd.DataFrame) -> None:
    """Draws plain over split with its interval, and the hidden share where it is known."""
    tokens, speed = numbers(rows, "num_tokens"), numbers(rows, "speedup_ratio")
    below, above = speed - numbers(rows, "speedup_low"), numbers(rows, "speedup_high") - speed
    axes.errorbar(tokens, speed, yerr=[below, above], marker="o", capsize=3, label="plain/split")
    hidden = numbers(rows, "hidden")
    if np.isfinite(hidden).any():
        axes.plot(tokens, hidden, marker="s", markersize=3, label="hidden share")
    axes.axhline(1, color="gray", linewidth=0.8)
    axes.set_xscale("log", base=2)
    axes.xaxis.set_major_formatter(StrMethodFormatter("{x:g}"))
    axes.set_xlabel("tokens a rank")
    axes.set_ylabel("ratio; above 1 a split step is faster")
    axes.grid(visible=True, alpha=0.3)
    legend_beside(axes)
