"""torch's profiler, as everything here uses it."""

from __future__ import annotations

from collections.abc import Iterable

from torch.profiler import ProfilerActivity, profile


def torch_trace(activities: Iterable[ProfilerActivity]) -> profile:
    """Returns a context that traces what runs in it.

    Events are kept over cycles, though there is one only: else torch 2.11 says on stderr that they
    are not.
    """
    return profile(activities=activities, acc_events=True)
