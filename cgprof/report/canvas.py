"""What all figures share: a canvas off screen, the numbers of a column, the legend's place."""

from __future__ import annotations

import io

import numpy as np
import pandas as pd
from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from numpy.typing import NDArray

NS_PER_US = 1e3
NS_PER_MS = 1e6
BYTES_PER_MIB = 1024**2
KINDS = ("plain", "twin")  # of keys, as frames name them


def blank_figure(rows: int, columns: int, width: float) -> Figure:
    """Returns a figure of empty axes; it needs no display whatever the backend."""
    figure = Figure(figsize=(width, 3.8 * rows), layout="constrained")
    FigureCanvasAgg(figure)
    figure.subplots(rows, columns, sharey="row")
    return figure


def nothing_to_plot(figure: Figure) -> Figure:
    """Returns the figure with those words in place of its axes."""
    for axes in figure.axes:
        axes.text(0.5, 0.5, "nothing to plot", ha="center", transform=axes.transAxes)
        axes.set_axis_off()
    return figure


def numbers(rows: pd.DataFrame, column: str) -> NDArray[np.float64]:
    """Returns a column with NaN where nothing was measured."""
    present = rows[column].astype("Float64")
    return np.array(present.to_numpy(dtype=np.float64, na_value=np.nan), dtype=np.float64)


def legend_beside(axes: Axes) -> None:
    """Puts the legend right of the axes, where it covers nothing."""
    axes.legend(fontsize="small", loc="upper left", bbox_to_anchor=(1, 1))


def png(figure: Figure) -> bytes:
    """Returns the figure as PNG, for a file or a notebook's cell."""
    buffer = io.BytesIO()
    figure.savefig(buffer, format="png")
    return buffer.getvalue()
