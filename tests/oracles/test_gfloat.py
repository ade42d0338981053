"""Floats of many widths against gfloat, which computes in float64 from the definition.

Every code must decode to the same value, and rounding in every mode must return the same bits for every
probe: nearest, away, zero, up and down, and stochastic with the same random bits.
"""

from dataclasses import replace

import gfloat
import numpy as np
import pytest
import torch
from gfloat import Domain, FormatInfo, RoundMode

from thinwire import FormatError
from thinwire.formats import Float

pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning")  # casts of NaN and of large values

WIDTHS = [
    (1, 1), (1, 2), (1, 4), (2, 0), (2, 1), (2, 2), (2, 3), (2, 5), (3, 0), (3, 1), (3, 2), (3, 3), (3, 4),
    (3, 8), (4, 0), (4, 1), (4, 2), (4, 3), (4, 7), (5, 0), (5, 1), (5, 2), (5, 3), (5, 10), (6, 1), (6, 9),
    (7, 0), (7, 2), (7, 5), (8, 0), (8, 1), (8, 3), (8, 7), (8, 10), (8, 23),
]  # fmt: skip
BIASED = [
    Float(4, 3, specials="fnuz", bias=11),
    Float(5, 2, specials="fn", bias=20),
    Float(4, 3, bias=2),
    Float(3, 0, bias=2),
    Float(3, 0, specials="none", bias=-3),
    Float(2, 0, specials="none", bias=-111),  # near the top of float32
    Float(2, 3, specials="none", bias=-110),
    Float(3, 4, bias=120),
    Float(5, 10, bias=127),  # subnormals among float32's
    Float(7, 0, specials="fn", bias=100),
]


def existing_formats():
    """Every combination of width and specials that fits into float32, and some with other biases."""
    for exp, man in WIDTHS:
        for specials in ("ieee", "fn", "fnuz", "none"):
            try:
                yield Float(exp, man, specials=specials)
            except FormatError:
                continue
    yield from BIASED


FORMATS = list(existing_formats())
MODES = {
    "nearest": RoundMode.TiesToEven,
    "away": RoundMode.TiesToAway,
    "zero": RoundMode.TowardZero,
    "up": RoundMode.TowardPositive,
    "down": RoundMode.TowardNegative,
}
WITHOUT_SUBNORMALS = [
    Float(4, 3, subnormals=False),
    Float(5, 2, specials="fn", subnormals=False),
    Float(4, 3, specials="fnuz", subnormals=False),
    Float(2, 1, specials="none", subnormals=False),
    Float(3, 0, subnormals=False),
    Float(8, 7, subnormals=False),
    Float(6, 9, subnormals=False),
]
each_format = pytest.mark.parametrize("format", FORMATS, ids=lambda format: format.name)


class Info(FormatInfo):
    @property
    def max(self):
        """The value of the largest finite code.

        gfloat's own formula takes it for a normal number, which it is not if exp=1 and specials="ieee".
        """
        return gfloat.decode_float(self, self.code_of_max).fval


def info(format):
    high_nans = {"ieee": (1 << format.man) - 1, "fn": 1, "fnuz": 0, "none": 0}[format.specials]
    default_bias = (1 << (format.exp - 1)) - (0 if format.specials == "fnuz" else 1)
    return Info(
        name=format.name,
        k=1 + format.exp + format.man,
        precision=format.man + 1,
        bias=default_bias if format.bias is None else format.bias,
        is_signed=True,
        domain=Domain.Extended if format.specials == "ieee" else Domain.Finite,
        has_nz=format.specials != "fnuz",
        num_high_nans=high_nans,
        has_subnormals=True,
        is_twos_complement=False,
    )


def saturating(format):
    return replace(format, saturate=True)


def assert_same_bits(ours, theirs, x):
    """Equal patterns, signs of zero included; NaN equals NaN."""
    theirs = theirs.astype(np.float32)
    same = (ours.view(np.uint32) == theirs.view(np.uint32)) | (np.isnan(ours) & np.isnan(theirs))
    where = np.flatnonzero(~same)
    shown = [(float(x[i]).hex(), float(ours[i]), float(theirs[i])) for i in where[:5]]
    assert same.all(), f"{where.size} of {same.size} differ; (input, ours, gfloat): {shown}"


def test_at_least_27_widths_are_compared():
    assert len({(format.exp, format.man) for format in FORMATS}) >= 27


@pytest.mark.parametrize("format", [f for f in FORMATS if f.bits <= 16], ids=lambda format: format.name)
def test_every_code_has_the_same_value(format):
    codes = np.arange(1 << format.bits)
    ours = format.from_codes(torch.from_numpy(codes.astype(np.uint8 if format.bits <= 8 else np.uint16)))
    assert_same_bits(ours.numpy(), gfloat.decode_ndarray(info(format), codes), codes)


@each_format
@pytest.mark.parametrize("mode", MODES)
def test_rounding_gives_the_same_bits(format, mode, probes):
    """Without mantissa bits too, where a tie of nearest goes to the even exponent code in both."""
    x = probes(format)
    if not format.has_nan:
        x = x[~x.isnan()]  # gfloat has no rule for them
    wide = x.numpy().astype(np.float64)
    theirs = gfloat.round_ndarray(info(format), wide, MODES[mode], sat=True)
    assert_same_bits(saturating(format).round(x, mode).numpy(), theirs, x)
    if format.specials != "none":  # gfloat raises if there is nothing beyond the largest value
        theirs = gfloat.round_ndarray(info(format), wide, MODES[mode], sat=False)
    assert_same_bits(format.round(x, mode).numpy(), theirs, x)


@pytest.mark.parametrize("format", WITHOUT_SUBNORMALS, ids=lambda format: format.name)
@pytest.mark.parametrize("mode", MODES)
def test_rounding_without_subnormals_gives_the_same_bits(format, mode, probes):
    """Below the smallest normal it is the format with no mantissa, where the only neighbour is zero.

    gfloat 0.5.2 does not flush such inputs itself: it rounds them to values that the format has not.
    """
    x = probes(format)
    x = x[x.isfinite()]
    wide = x.numpy().astype(np.float64)
    saturate = format.specials == "none"
    normal = gfloat.round_ndarray(info(format), wide, MODES[mode], sat=saturate)
    small = gfloat.round_ndarray(info(replace(format, man=0)), wide, MODES[mode], sat=saturate)
    theirs = np.where(np.abs(wide) < format.min_normal, small, normal)
    assert_same_bits(format.round(x, mode).numpy(), theirs, x)


@each_format
def test_stochastic_rounding_gives_the_same_bits(format, probes):
    """The top 30 - man bits of a random word are added to the fraction that is cut off."""
    x = probes(format)
    x = x[x.isfinite()]
    words = random_words(x.numel())
    theirs = gfloat_stochastic(format, x, words, sat=format.specials == "none")
    assert_same_bits(format.round(x, "stochastic", torch.from_numpy(words)).numpy(), theirs, x)


@pytest.mark.parametrize("format", WITHOUT_SUBNORMALS, ids=lambda format: format.name)
def test_stochastic_rounding_without_subnormals_gives_the_same_bits(format, probes):
    x = probes(format)
    x = x[x.isfinite()]
    words = random_words(x.numel())
    saturate = format.specials == "none"
    normal = gfloat_stochastic(format, x, words, sat=saturate)
    small = gfloat_stochastic(replace(format, man=0), x, words, sat=saturate)
    theirs = np.where(np.abs(x.numpy()) < format.min_normal, small, normal)
    assert_same_bits(format.round(x, "stochastic", torch.from_numpy(words)).numpy(), theirs, x)


def random_words(numel):
    """Random, with both extremes mixed in."""
    words = np.random.default_rng(3).integers(0, 1 << 32, numel, dtype=np.uint32)
    words[::50], words[25::50] = 0, 0xFFFFFFFF
    return words


def gfloat_stochastic(format, x, words, sat):
    """gfloat adds in the input's precision. Below the smallest normal the sum can need 54 bits or more,
    hence long doubles; where they are only doubles, one sum in 2**50 could come out differently.
    """
    return gfloat.round_ndarray(
        info(format),
        x.numpy().astype(np.longdouble),
        RoundMode.StochasticFastest,
        sat=sat,
        srbits=words.astype(np.int64) >> (2 + format.man),
        srnumbits=30 - format.man,
    )
