"""Means, intervals and paired differences, against scipy and against numbers worked out by hand."""

import math

import pytest

from thinwire.statistics import Estimate, differences, estimate, ratios, student


@pytest.mark.parametrize(
    ("freedom", "expected"), [(1, 12.7062), (2, 4.3027), (3, 3.1824), (4, 2.7764), (9, 2.2622), (30, 2.0423)]
)
def test_quantiles_are_those_of_the_printed_table(freedom, expected):
    assert student(freedom) == pytest.approx(expected, abs=5e-5)


@pytest.mark.parametrize("confidence", [0.5, 0.9, 0.95, 0.99])
def test_quantiles_agree_with_scipy(confidence):
    stats = pytest.importorskip("scipy.stats")
    for freedom in (*range(1, 60), 200, 1001):
        expected = stats.t.ppf((1 + confidence) / 2, freedom)
        assert student(freedom, confidence) == pytest.approx(expected, rel=1e-9)


def test_interval_agrees_with_scipy():
    stats = pytest.importorskip("scipy.stats")
    values = [0.91, 0.93, 0.90, 0.95, 0.92]
    result = estimate(values)
    low, high = stats.t.interval(0.95, len(values) - 1, result.mean, stats.sem(values))
    assert result.interval == pytest.approx((low, high))


def test_one_value_has_no_spread_and_none_no_mean():
    assert estimate([0.5]) == Estimate(1, 0.5, None, None)
    assert estimate([0.5]).interval is None
    assert estimate([]) is None


def test_equal_values_have_no_width():
    assert estimate([0.1] * 3) == Estimate(3, pytest.approx(0.1), pytest.approx(0), pytest.approx(0))


def test_values_that_are_not_finite_have_no_interval():
    for bad in (math.nan, math.inf):
        result = estimate([1.0, bad, 2.0])
        assert math.isnan(result.mean)
        assert result.margin is None


def test_differences_are_taken_over_equal_seeds_only():
    result = differences({0: 1.0, 1: 2.0, 2: 9.0}, {1: 1.5, 0: 0.7, 5: 100.0})
    assert (result.count, result.mean) == (2, pytest.approx(0.4))
    assert result.deviation == pytest.approx(math.sqrt(0.02))
    assert differences({0: 1.0}, {1: 1.0}) is None
    assert differences({}, {}) is None


def test_differences_are_as_sure_as_asked():
    values, base = {0: 1.0, 1: 2.0, 2: 4.0}, {0: 0.5, 1: 0.7, 2: 0.1}
    result = differences(values, base, confidence=0.5)
    assert result == estimate([values[seed] - base[seed] for seed in values], confidence=0.5)
    assert result.margin < differences(values, base).margin


def test_pairing_takes_out_what_the_seed_does():
    base = {seed: 0.9 + 0.05 * math.sin(seed) for seed in range(5)}
    better = {seed: value + 0.001 * (1 + seed % 2) for seed, value in base.items()}
    paired = differences(better, base)
    assert paired.interval[0] > 0
    assert paired.margin < estimate(base.values()).margin / 10


def test_ratios_leave_out_a_base_of_zero():
    assert ratios({0: 6.0, 1: 1.0}, {0: 2.0, 1: 0.0}) == Estimate(1, 3.0)
