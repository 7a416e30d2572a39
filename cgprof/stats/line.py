"""A straight line through points by least squares, with the intervals of Student's t. Pure."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

_CONFIDENCE = 0.95


@dataclass(frozen=True, slots=True, kw_only=True)
class Line:
    """y = base + slope x; the deviation is that of points from the line."""

    base: float
    slope: float
    slope_half_width: float  # of its 95 % interval
    largest_residual: float
    deviation: float
    count: int
    mean_x: float
    squares_x: float  # sum of the squared distances from the mean

    def at(self, x: float) -> tuple[float, float]:
        """Returns y, and half the width of the 95 % interval of a further point there."""
        leverage = 1 + 1 / self.count + (x - self.mean_x) ** 2 / self.squares_x
        half_width = _quantile(self.count) * self.deviation * math.sqrt(leverage)
        return self.base + self.slope * x, half_width


def fit_line(points: Sequence[tuple[float, float]]) -> Line | None:
    """Returns the line through points (x, y); None below three, or where all x are alike.

    Source: Draper and Smith, "Applied Regression Analysis" (1998), chapter 1.
    """
    count = len(points)
    if count < 3:
        return None
    mean_x = sum(x for x, _ in points) / count
    mean_y = sum(y for _, y in points) / count
    squares_x = sum((x - mean_x) ** 2 for x, _ in points)
    if squares_x == 0:
        return None
    slope = sum((x - mean_x) * (y - mean_y) for x, y in points) / squares_x
    base = mean_y - slope * mean_x
    residuals = [y - base - slope * x for x, y in points]
    deviation = math.sqrt(sum(residual**2 for residual in residuals) / (count - 2))
    return Line(
        base=base,
        slope=slope,
        slope_half_width=_quantile(count) * deviation / math.sqrt(squares_x),
        largest_residual=max(map(abs, residuals)),
        deviation=deviation,
        count=count,
        mean_x=mean_x,
        squares_x=squares_x,
    )


def _quantile(count: int) -> float:
    # scipy takes half a second to load, and records that only hold a line do without.
    from scipy.stats import t as student

    return float(student.ppf((1 + _CONFIDENCE) / 2, count - 2))
