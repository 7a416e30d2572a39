import pytest

from cgprof.config.schema import MeasureConfig
from cgprof.measure.stopping import CountRule, NoiseRule


def _feed(rule, samples, seconds_each=0.0):
    for index, sample in enumerate(samples, start=1):
        if rule.add(sample, index * seconds_each):
            return index
    return None


def _rule(**changes):
    settings = {"min_samples": 6, "max_samples": 20, "max_seconds": 1.0, "relative_noise": 0.05}
    return NoiseRule(**{**settings, **changes})


@pytest.mark.parametrize(
    ("samples", "seconds_each", "taken", "stopped_by"),
    [
        ([100] * 30, 0.0, 6, "noise"),
        ([50, 150] * 15, 0.0, 20, "max_samples"),
        ([50, 150] * 15, 0.25, 4, "max_seconds"),
        ([100] * 30, 0.5, 2, "max_seconds"),  # the time limit holds below min_samples too
        ([50, 150] * 3 + [100] * 30, 0.0, 13, "noise"),
        ([100] * 5, 0.0, None, "unfinished"),
        ([0] * 30, 0.0, 20, "max_samples"),  # no noise figure without a median
    ],
)
def test_noise_rule_stops_at_the_first_criterion_met(samples, seconds_each, taken, stopped_by):
    rule = _rule()
    assert _feed(rule, samples, seconds_each) == taken
    assert rule.stopped_by == stopped_by


def test_noise_rule_asks_for_noise_strictly_below_the_wish():
    exactly = [98, 98, 100, 100, 102, 102]  # quartiles 98.5 and 101.5: noise 0.03
    assert _feed(_rule(relative_noise=0.03), exactly) is None
    assert _feed(_rule(relative_noise=0.0301), exactly) == 6


def test_noise_rule_takes_the_settings_of_a_run():
    config = MeasureConfig(min_samples=7, max_samples=9, relative_noise=0.5)
    assert _feed(NoiseRule.from_config(config), [100] * 30) == 7
    assert _feed(NoiseRule.from_config(config), [1, 10**6] * 30) == 9


def test_count_rule_stops_at_its_count():
    rule = CountRule(3)
    assert rule.stopped_by == "unfinished"
    assert _feed(rule, [1, 2, 3, 4]) == 3
    assert rule.stopped_by == "count"
