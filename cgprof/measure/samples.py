"""The samples of a series, one array a stage, and their summary."""

from __future__ import annotations

from dataclasses import dataclass

from cgprof.record.graph import LaunchStats, StageStats
from cgprof.stats.quantiles import (
    MIN_SAMPLES_FOR_P99,
    IntSamples,
    count_outliers,
    interquartile_range,
    median,
    percentile,
    relative_noise,
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Samples:
    """One row a step; all arrays have one length.

    `device_ns` is None without a device, `vote_ns` on a rank without peers.
    """

    vote_ns: IntSamples | None
    decide_ns: IntSamples
    prepare_ns: IntSamples
    launch_ns: IntSamples
    finish_ns: IntSamples
    wait_ns: IntSamples
    device_ns: IntSamples | None
    stopped_by: str

    def columns(self) -> dict[str, IntSamples | None]:
        """Returns the arrays by column name."""
        return {
            "vote_ns": self.vote_ns,
            "decide_ns": self.decide_ns,
            "prepare_ns": self.prepare_ns,
            "launch_ns": self.launch_ns,
            "finish_ns": self.finish_ns,
            "wait_ns": self.wait_ns,
            "device_ns": self.device_ns,
        }

    def stats(self, *, instrumented: bool = False) -> StageStats:
        """Returns the summary of each stage; `instrumented` if something else read meanwhile."""
        by = self.stopped_by
        step_ns = self.decide_ns + self.prepare_ns + self.launch_ns + self.finish_ns + self.wait_ns
        if self.vote_ns is not None:
            step_ns = step_ns + self.vote_ns
        return StageStats(
            vote=None if self.vote_ns is None else launch_stats(self.vote_ns, by),
            decide=launch_stats(self.decide_ns, by),
            prepare=launch_stats(self.prepare_ns, by),
            launch=launch_stats(self.launch_ns, by),
            finish=launch_stats(self.finish_ns, by),
            wait=launch_stats(self.wait_ns, by),
            device=None if self.device_ns is None else launch_stats(self.device_ns, by),
            step=launch_stats(step_ns, by),
            instrumented=instrumented,
        )


def launch_stats(samples: IntSamples, stopped_by: str) -> LaunchStats:
    """Returns the summary of one stage's samples [n], n at least one."""
    return LaunchStats(
        count=samples.size,
        median_ns=median(samples),
        iqr_ns=interquartile_range(samples),
        p25_ns=percentile(samples, 25),
        p90_ns=percentile(samples, 90),
        p95_ns=percentile(samples, 95),
        p99_ns=percentile(samples, 99) if samples.size >= MIN_SAMPLES_FOR_P99 else None,
        min_ns=int(samples.min()),
        outliers=count_outliers(samples),
        noise=relative_noise(samples),
        stopped_by=stopped_by,
    )
