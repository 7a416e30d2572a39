"""When enough samples are taken: rules fed one sample at a time. Pure: the time is handed in."""

from __future__ import annotations

from typing import Protocol

import numpy as np

from cgprof.config.schema import MeasureConfig
from cgprof.stats.quantiles import relative_noise

UNFINISHED = "unfinished"


class StoppingRule(Protocol):
    """Decides after each sample whether it was the last; good for one series only."""

    @property
    def stopped_by(self) -> str:
        """Which criterion ended the series, 'unfinished' before that."""

    def add(self, sample_ns: int, elapsed_s: float) -> bool:
        """Takes one sample and the time since the series began; True ends the series."""


class NoiseRule:
    """Ends when interquartile range over median is small, at the latest at a count or a time."""

    def __init__(
        self, *, min_samples: int, max_samples: int, max_seconds: float, relative_noise: float
    ) -> None:
        self._min_samples = min_samples
        self._max_seconds = max_seconds
        self._relative_noise = relative_noise
        self._samples = np.zeros(max_samples, np.int64)
        self._count = 0
        self._stopped_by = UNFINISHED

    @classmethod
    def from_config(cls, config: MeasureConfig) -> NoiseRule:
        """Returns a fresh rule with a run's settings."""
        return cls(
            min_samples=config.min_samples,
            max_samples=config.max_samples,
            max_seconds=config.max_seconds_per_key,
            relative_noise=config.relative_noise,
        )

    @property
    def stopped_by(self) -> str:
        """'noise', 'max_samples', 'max_seconds' or 'unfinished'."""
        return self._stopped_by

    def add(self, sample_ns: int, elapsed_s: float) -> bool:
        """Takes one sample; the time limit holds even below the smallest count."""
        self._samples[self._count] = sample_ns
        self._count += 1
        if self._count >= self._min_samples and self._is_quiet():
            self._stopped_by = "noise"
        elif self._count == self._samples.size:
            self._stopped_by = "max_samples"
        elif elapsed_s >= self._max_seconds:
            self._stopped_by = "max_seconds"
        return self._stopped_by != UNFINISHED

    def _is_quiet(self) -> bool:
        noise = relative_noise(self._samples[: self._count])
        return noise is not None and noise < self._relative_noise


class CountRule:
    """Ends after a fixed number of samples."""

    def __init__(self, count: int) -> None:
        self._left = count
        self._stopped_by = UNFINISHED

    @property
    def stopped_by(self) -> str:
        """'count' or 'unfinished'."""
        return self._stopped_by

    def add(self, sample_ns: int, elapsed_s: float) -> bool:
        """Takes one sample; its value and the time mean nothing."""
        self._left -= 1
        if self._left <= 0:
            self._stopped_by = "count"
        return self._left <= 0
