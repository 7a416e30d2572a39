"""Figures of one run, drawn off screen whatever backend the machine asks for.

What was not measured is a gap; a zero has no place on a log axis and is named below it instead.
"""

from __future__ import annotations

import io
from collections.abc import Sequence

import numpy as np
import pandas as pd
from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from matplotlib.ticker import StrMethodFormatter
from numpy.typing import NDArray

from cgprof.record.types import RunRecord
from cgprof.report.headline import headline_lines

_KINDS = ("plain", "twin")
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
_PARTS = {
    "pool_bytes": "pool",
    "instantiate_bytes": "instantiate + upload",
    "outputs_bytes": "outputs",
    "workspaces_bytes": "workspaces",
    "rest_bytes": "rest",
}
_NS_PER_US = 1e3
_BYTES_PER_MIB = 1024**2
_MOST_TICKS = 20


def launch_figure(frame: pd.DataFrame) -> Figure:
    """Returns host launch time against tokens, plain keys and twins apart."""
    return _lines_figure(frame, _LAUNCHES, "launch, first to last enqueue")


def stages_figure(frame: pd.DataFrame) -> Figure:
    """Returns each stage of a hot replay step against tokens; the stages are never added up."""
    return _lines_figure(frame, _STAGES, "stages of a hot replay step")


def memory_figure(frame: pd.DataFrame, record: RunRecord) -> Figure:
    """Returns the parts of each key's growth, and the growth over the capture, plain then twins."""
    figure = _figure(rows=2, columns=1, width=11)
    parts, growth = figure.axes
    figure.suptitle("; ".join(headline_lines(record)[:1]))
    captured = frame[frame["failure"].isna()]
    if captured.empty:
        return _nothing(figure)
    _stack(parts, captured)
    _cumulate(growth, captured, record)
    for axes in figure.axes:
        _name_keys(axes, list(captured["label"]))
    return figure


def worth_figure(frame: pd.DataFrame) -> Figure:
    """Returns step times and the speed of split steps against tokens, decode and prefill apart.

    `frame` is that of `worth_frame`.
    """
    kinds = list(dict.fromkeys(frame["kind"]))
    columns = max(len(kinds), 1)
    figure = _figure(rows=2, columns=columns, width=6 * columns)
    if not kinds:
        return _nothing(figure)
    stand_in = (frame["recorder"] == "tape").any()
    figure.suptitle(f"steps plain and split{' (CPU stand-in times)' if stand_in else ''}")
    for column, kind in enumerate(kinds):
        rows = frame[frame["kind"] == kind].sort_values("num_tokens")
        times, speed = figure.axes[column], figure.axes[columns + column]
        times.set_title(str(kind))
        _draw_lines(times, rows, _STEPS)
        _draw_speed(speed, rows)
    return figure


def png(figure: Figure) -> bytes:
    """Returns the figure as PNG, for a file or a notebook's cell."""
    buffer = io.BytesIO()
    figure.savefig(buffer, format="png")
    return buffer.getvalue()


def _lines_figure(frame: pd.DataFrame, series: dict[str, str], title: str) -> Figure:
    kinds = [kind for kind in _KINDS if (frame["kind"] == kind).any()]
    figure = _figure(rows=1, columns=max(len(kinds), 1), width=6 * max(len(kinds), 1))
    if not kinds:
        return _nothing(figure)
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
        values = _numbers(rows, column) / _NS_PER_US
        if (values == 0).any():
            zeros.append(name)
        values[values <= 0] = np.nan
        if not np.isfinite(values).any():
            continue
        anything = True
        axes.plot(_numbers(rows, "num_tokens"), values, marker="o", markersize=3, label=name)
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
    _legend(axes)


def _draw_speed(axes: Axes, rows: pd.DataFrame) -> None:
    """Draws plain over split with its interval, and the hidden share where it is known."""
    tokens, speed = _numbers(rows, "num_tokens"), _numbers(rows, "speedup_ratio")
    below, above = speed - _numbers(rows, "speedup_low"), _numbers(rows, "speedup_high") - speed
    axes.errorbar(tokens, speed, yerr=[below, above], marker="o", capsize=3, label="plain/split")
    hidden = _numbers(rows, "hidden")
    if np.isfinite(hidden).any():
        axes.plot(tokens, hidden, marker="s", markersize=3, label="hidden share")
    axes.axhline(1, color="gray", linewidth=0.8)
    axes.set_xscale("log", base=2)
    axes.xaxis.set_major_formatter(StrMethodFormatter("{x:g}"))
    axes.set_xlabel("tokens a rank")
    axes.set_ylabel("ratio; above 1 a split step is faster")
    axes.grid(visible=True, alpha=0.3)
    _legend(axes)


def _stack(axes: Axes, rows: pd.DataFrame) -> None:
    places = np.arange(len(rows))
    above, below = np.zeros(len(rows)), np.zeros(len(rows))
    for column, name in _PARTS.items():
        sizes = np.nan_to_num(_numbers(rows, column)) / _BYTES_PER_MIB
        bottoms = np.where(sizes >= 0, above, below)
        axes.bar(places, sizes, bottom=bottoms, label=name)
        above += np.maximum(sizes, 0)
        below += np.minimum(sizes, 0)
    axes.set_ylabel("parts of a key, MiB")
    _legend(axes)


def _cumulate(axes: Axes, rows: pd.DataFrame, record: RunRecord) -> None:
    places = np.arange(len(rows))
    added = _numbers(rows, "memory_bytes") / _BYTES_PER_MIB
    total = np.where(np.isnan(added), np.nan, np.nancumsum(added))
    for kind in _KINDS:
        is_kind = (rows["kind"] == kind).to_numpy(dtype=bool)
        if is_kind.any():
            axes.bar(places[is_kind], total[is_kind], label=f"{kind} keys")
    source = "tape arena" if record.recorder == "tape" else "device delta"
    axes.set_ylabel(f"{source} so far, MiB")
    _legend(axes)


def _legend(axes: Axes) -> None:
    """Puts the legend right of the axes, where it covers nothing."""
    axes.legend(fontsize="small", loc="upper left", bbox_to_anchor=(1, 1))


def _name_keys(axes: Axes, labels: Sequence[str]) -> None:
    step = -(-len(labels) // _MOST_TICKS)
    axes.set_xticks(
        range(0, len(labels), step), labels[::step], rotation=60, ha="right", fontsize=7
    )


def _numbers(rows: pd.DataFrame, column: str) -> NDArray[np.float64]:
    present = rows[column].astype("Float64")
    return np.array(present.to_numpy(dtype=np.float64, na_value=np.nan), dtype=np.float64)


def _figure(rows: int, columns: int, width: float) -> Figure:
    figure = Figure(figsize=(width, 3.8 * rows), layout="constrained")
    FigureCanvasAgg(figure)
    figure.subplots(rows, columns, sharey="row")
    return figure


def _nothing(figure: Figure) -> Figure:
    for axes in figure.axes:
        axes.text(0.5, 0.5, "nothing to plot", ha="center", transform=axes.transAxes)
        axes.set_axis_off()
    return figure
