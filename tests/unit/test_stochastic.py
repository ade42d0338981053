"""Stochastic rounding is right on average."""

import pytest
import torch

from thinwire import Rounding, Stream
from thinwire.formats import FORMATS, get
from thinwire.runtimes import local

SAMPLES = 1 << 18
NAMES = [name for name, f in FORMATS.items() if Rounding.STOCHASTIC in f.roundings and f.min < 0]


@pytest.mark.parametrize("name", NAMES)
def test_mean_of_roundings_is_the_number(name):
    """2^18 draws of one number between two neighbours: the mean is within five standard errors, plus the
    resolution of the random word (2^-22 of a step). With 150 such checks, one alarm in 10 000 is false."""
    format = get(name)
    values = (
        format.values().double() if format.bits <= 16 else torch.tensor([-1.0, 1.0, 1.0009765625]).double()
    )
    for share, position in ((0.55, 0.37), (0.9, 0.02), (0.62, 0.993)):
        place = min(int(share * (len(values) - 1)), len(values) - 2)
        low, high = values[place], values[place + 1]
        x = (low + position * (high - low)).float()
        stream = Stream(seed=11, tensor=name, step=place)
        mean = format.round(x.expand(SAMPLES), "stochastic", stream).double().mean()
        exact = (x.double() - low) / (high - low)
        actual = (mean - low) / (high - low)
        error = (exact * (1 - exact) / SAMPLES).sqrt()
        assert abs(actual - exact) <= 5 * error + 2.0**-22, (float(low), float(high))


@pytest.mark.parametrize("name", NAMES)
def test_values_of_the_format_are_kept(name):
    format = get(name)
    values = format.values() if format.bits <= 16 else torch.tensor([0.0, 1.0, -2.5])
    assert torch.equal(format.round(values, "stochastic", Stream(3)), values)


@pytest.mark.parametrize("name", ["float8_e4m3fn", "float16", "int8", "bnb_dynamic"])
def test_numbers_far_below_the_smallest_have_their_chance(name):
    format = get(name)
    x = torch.full((1 << 20,), format.min_subnormal / 1024)
    share = (format.round(x, "stochastic", Stream(4)) > 0).double().mean()
    assert share == pytest.approx(1 / 1024, rel=0.2)


@pytest.mark.parametrize("sign", [1, -1])
@pytest.mark.parametrize("name", [name for name in NAMES if name.startswith("posit")])
def test_posits_become_zero_at_random_only_if_they_may_become_zero_at_all(name, sign):
    format = get(name)
    x = torch.full((1000,), sign * format.min_subnormal / 3)
    rounded = format.round(x, "stochastic", Stream(5))
    assert bool((rounded == 0).any()) == format.underflow
    assert set((rounded * sign).tolist()) <= {0.0, format.min_subnormal}


def test_a_stream_set_apart_keeps_its_step_and_its_rank():
    stream = Stream(3, step=7, tensor="a", rank=2).apart()
    assert (stream.step, stream.tensor, stream.rank) == (7, 0, 2)
    assert len({Stream(3, tensor=tensor).apart().seed for tensor in (0, 1, "a", "b")}) == 4
    assert len({Stream(seed, tensor="a").apart().seed for seed in (0, 3, 3 << 32)}) == 3


def test_steps_of_a_named_stream_round_differently():
    roundings = []
    for step in (1, 2):
        ranks = [torch.linspace(0.0, 1.0, 1000) for _ in range(2)]
        local.all_reduce(ranks, "qsgd4/512", rng=Stream(3, step=step, tensor="mine"))
        roundings.append(ranks[0])
    assert not torch.equal(*roundings)
