import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from cgprof.cost.launch_model import WAITED_KNOTS_NS, fit
from cgprof.cost.launch_prediction import predict
from cgprof.cost.synthetic_layout import specs
from cgprof.errors import DeviceError
from tests.support.planted_launches import BASE_NS, RECORDS, SLOPES, WAITS, planted_points, truth_ns

SETTINGS = settings(deadline=None, derandomize=True, max_examples=8)


def slopes(model):
    return {term.kind: term.ns_per_node for term in model.terms}


def curve(model):
    return next(term.curve for term in model.terms if term.kind == "event-record")


def every_estimate(model):
    yield model.base_ns
    for term in model.terms:
        yield term.ns_per_node
        yield from (point.ns for point in term.curve)
    for waited in model.waited:
        yield waited.ns
        yield waited.ns_per_node


def test_fit_recovers_planted_coefficients_from_exact_points():
    model = fit(planted_points(), seed=0)
    assert model.base_ns.value == pytest.approx(BASE_NS, rel=0.001)
    found = slopes(model)
    for kind, planted in SLOPES.items():
        assert found[kind].value == pytest.approx(planted, rel=0.01), kind
    assert {point.nodes: point.ns.value for point in curve(model)} == pytest.approx(
        {nodes: ns for nodes, ns in RECORDS.items() if nodes}, rel=0.01
    )
    assert [waited.waited_ns for waited in model.waited] == list(WAITED_KNOTS_NS)
    for waited in model.waited:
        once, each = WAITS[waited.waited_ns]
        assert waited.ns.value == pytest.approx(once, rel=0.001)
        assert waited.ns_per_node.value == pytest.approx(each, rel=0.02)
    assert model.largest_error < 0.001


def test_points_are_fitted_by_their_lower_quartile_where_they_have_it():
    slow = [
        point.model_copy(update={"p25_ns": point.median_ns, "median_ns": 5 * point.median_ns})
        for point in planted_points()
    ]
    assert fit(slow, seed=0).base_ns.value == pytest.approx(BASE_NS, rel=0.001)


@SETTINGS
@given(seed=st.integers(0, 10_000))
def test_fit_of_noisy_points_foretells_what_matters_and_is_never_negative(seed):
    model = fit(planted_points(noise=0.05, seed=seed), seed=0)
    for estimate in every_estimate(model):
        assert 0 <= estimate.low <= estimate.value <= estimate.high
    assert model.base_ns.value == pytest.approx(BASE_NS, rel=0.15)
    assert slopes(model)["peer-copy"].value == pytest.approx(SLOPES["peer-copy"], rel=0.2)
    assert 0.01 < model.scatter < 0.15
    for counts, waited_ns in (
        ({"kernel": 300, "memset": 40}, 600_000),
        ({"kernel": 700, "fork": 50}, 1_400_000),
        ({"kernel": 578, "memcpy": 192}, 16_000_000),
        ({"kernel": 192, "event-record": 48, "fork": 48, "event-wait": 1}, 300_000),
    ):
        found = predict(model, counts, None, waited_ns).ns
        assert found.value == pytest.approx(truth_ns(counts, waited_ns), rel=0.3)


def test_intervals_hold_the_planted_values_nearly_always_and_grow_with_noise():
    held = total = 0
    for seed in range(10):
        model = fit(planted_points(noise=0.05, seed=seed), seed=0)
        found = slopes(model)
        for kind in ("peer-copy", "fork", "event-wait"):
            held += found[kind].low <= SLOPES[kind] <= found[kind].high
            total += 1
        held += model.base_ns.low <= BASE_NS <= model.base_ns.high
        total += 1
    assert held >= 0.85 * total
    quiet, loud = (
        fit(planted_points(noise=noise, seed=3), seed=0).base_ns for noise in (0.01, 0.1)
    )
    assert quiet.high - quiet.low < loud.high - loud.low


@SETTINGS
@given(seed=st.integers(0, 1000), falls=st.booleans())
def test_curve_and_waits_rise_even_where_noise_makes_points_fall(seed, falls):
    points = planted_points(noise=0.1, seed=seed)
    if falls:
        points = [
            point.model_copy(update={"median_ns": point.median_ns // 3})
            if point.counts.get("event-record") == 200 or point.waited_ns > 20_000_000
            else point
            for point in points
        ]
    model = fit(points, seed=0)
    heights = [point.ns.value for point in curve(model)]
    assert heights == sorted(heights)
    for name in ("ns", "ns_per_node"):
        waits = [getattr(waited, name).value for waited in model.waited]
        assert waits == sorted(waits)


def test_terms_are_only_of_what_was_measured():
    straight = [spec for spec in specs(with_peer=False) if spec.kind in ("kernel", "memset")]
    model = fit(planted_points(graphs=straight), seed=0)
    assert [term.kind for term in model.terms] == ["kernel", "memset"]
    idle = [spec for spec in straight if not spec.busy_ns and spec.counts["kernel"] < 4000]
    waits = fit(planted_points(graphs=idle), seed=0).waited
    assert [waited.waited_ns for waited in waits] == [1_000_000]


def test_points_of_a_host_that_waited_do_not_blur_those_of_one_that_worked():
    """As runs have them: no wait but where it is asked for, and noise in those launches alone."""
    rng = np.random.default_rng(4)
    points = []
    for spec, point in zip(specs(with_peer=True), planted_points(), strict=True):
        waited_ns = point.waited_ns if spec.busy_ns else 0
        noise = 0.4 * rng.standard_normal() if spec.busy_ns else 0.0
        met = round(truth_ns(spec.counts, waited_ns) * max(1 + noise, 0.1))
        points.append(point.model_copy(update={"waited_ns": waited_ns, "median_ns": met}))
    model = fit(points, seed=0)
    assert model.base_ns.value == pytest.approx(BASE_NS, rel=0.03)
    assert slopes(model)["peer-copy"].value == pytest.approx(SLOPES["peer-copy"], rel=0.03)
    assert model.warm_scatter < 0.03 < model.scatter
    assert model.warm_largest_error < 0.1 < model.largest_error
    assert model.base_ns.high - model.base_ns.low < 0.2 * BASE_NS
    assert fit(planted_points(), seed=0).warm_scatter is None


def test_same_seed_gives_the_same_model():
    points = planted_points(noise=0.05, seed=1)
    assert fit(points, seed=7) == fit(points, seed=7)
    assert fit(points, seed=7).base_ns.low != fit(points, seed=8).base_ns.low


def test_too_few_points_or_a_time_of_zero_are_refused():
    points = planted_points()
    with pytest.raises(DeviceError, match="synthetic graphs"):
        fit(points[:3], seed=0)
    with pytest.raises(DeviceError, match="synthetic graphs"):
        fit((), seed=0)
    with pytest.raises(DeviceError, match="launch_model=false"):
        fit([*points, points[0].model_copy(update={"median_ns": 0})], seed=0)
