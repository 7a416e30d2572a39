import numpy as np
import pytest

from cgprof.measure.samples import launch_stats


@pytest.mark.parametrize(("count", "p99"), [(99, None), (100, 98_010)])
def test_p90_is_always_known_and_p99_from_a_hundred_samples_on(count, p99):
    stats = launch_stats(np.arange(count, dtype=np.int64) * 1_000, "count")
    assert stats.p90_ns == round(0.9 * (count - 1) * 1_000)
    assert stats.p95_ns == round(0.95 * (count - 1) * 1_000)
    assert stats.p99_ns == p99
    assert stats.p25_ns == stats.quiet_ns == round(0.25 * (count - 1) * 1_000)
