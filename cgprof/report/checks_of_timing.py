"""Checks of whether times can be trusted: clocks, noise, and the pace of the host. Pure."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from cgprof.record.types import RankRecord, RunRecord
from cgprof.report import needs
from cgprof.report.finding import Check, Finding
from cgprof.stats.pace import MOST_SLOWER, slower

THROTTLED = "throttled-clocks"
NOISY = "noisy-timing"
SLOW_HOST = "slow-host"

_HELD_BACK = "NVML said that the clocks were held back while a key was timed"
_WIDE = "quartiles of launch are as far apart as measure.relative_noise, or samples too few"
_SLOW = (
    f"a fixed loop of Python, timed beside a key's replays, took over {MOST_SLOWER:g} times as "
    "long as beside another key of the run; a host that was slow throughout does not show so"
)


def throttled_clocks(run: RunRecord) -> Iterator[Finding]:
    """Finds keys that were timed while the device was held back."""
    for rank in run.ranks:
        warned = _warned(rank, "throttled")
        if warned:
            reasons = dict.fromkeys(text.partition(": ")[2] for text in warned.values())
            yield Finding(
                name=THROTTLED,
                severity="doubt",
                keys=tuple(warned),
                evidence={"reasons": ", ".join(reasons)},
                threshold=_HELD_BACK,
                way_out="let the device cool or raise its power limit, then time again; launch "
                "times of the host stand, device times do not",
                rank=rank.rank,
            )


def noisy_timing(run: RunRecord) -> Iterator[Finding]:
    """Finds keys whose launch times scatter, all in one finding."""
    for rank in run.ranks:
        warned = _warned(rank, "noisy")
        if warned:
            noises = [
                stats.launch.noise
                for graph in rank.graphs
                for stats in (graph.eager, graph.replay)
                if graph.label in warned and stats is not None and stats.launch.noise is not None
            ]
            yield Finding(
                name=NOISY,
                severity="info",
                keys=tuple(warned),
                evidence={
                    "largest_noise": max(noises, default=None),
                    "wanted": run.config.measure.relative_noise,
                },
                threshold=_WIDE,
                way_out="compare only what one run measured; a quiet host, or more samples "
                "(measure.max_samples, measure.max_seconds_per_key), narrows it",
                rank=rank.rank,
            )


def slow_host(run: RunRecord) -> Iterator[Finding]:
    """Finds keys beside whose replays the host itself ran slower than beside others."""
    for rank in run.ranks:
        found = slower_keys(run, rank)
        if found:
            worst = max(found, key=lambda label: found[label])
            launches = {one.label: one.replay.launch.median_ns for one in rank.graphs if one.replay}
            yield Finding(
                name=SLOW_HOST,
                severity="doubt",
                keys=tuple(found),
                evidence={
                    "worst": worst,
                    "host_slower_ratio": found[worst],
                    "launch_ns": launches.get(worst),
                },
                threshold=_SLOW,
                way_out="launch, prepare and finish of these keys may read high for the host's "
                "sake, whose cores are shared or change their clock: compare keys of equal pace "
                "(host loop in --table stages), or run again on a quiet host",
                rank=rank.rank,
            )


def slower_keys(run: RunRecord, rank: RankRecord) -> dict[str, float]:
    """Returns by how much the host ran slower beside a key than at its best, where it is too much.

    Its best is the fastest pace beside any key of any rank.
    """
    fastest_ns = min((pace for one in run.ranks for pace in _paces(one).values()), default=0)
    return slower(_paces(rank), fastest_ns)


def _paces(rank: RankRecord) -> dict[str, int]:
    return {one.label: one.host_pace_ns for one in rank.graphs if one.host_pace_ns}


TIMING_CHECKS: Mapping[str, Check] = {
    THROTTLED: Check(throttled_clocks, (needs.DEVICE, needs.TIMES)),
    NOISY: Check(noisy_timing, (needs.TIMES,)),
    SLOW_HOST: Check(slow_host, (needs.PACE,)),
}


def _warned(rank: RankRecord, kind: str) -> dict[str, str]:
    return {
        graph.label: text
        for graph in rank.graphs
        for text in graph.warnings
        if text.partition(":")[0] == kind
    }
