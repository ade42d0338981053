"""Formats that torch has too, against torch's own casts on the CPU.

Every code must decode to the same value, and nearest rounding must give the same code for every probe
that is a number. torch's NaNs have other codes (payloads kept, or all ones), so there being NaN counts.
"""

import pytest
import torch

from thinwire import formats
from thinwire.formats import Float

NAMES = [
    "float16",
    "bfloat16",
    "float8_e4m3fn",
    "float8_e5m2",
    "float8_e4m3fnuz",
    "float8_e5m2fnuz",
    "float8_e8m0fnu",
]
DTYPES = {name: getattr(torch, name) for name in NAMES if hasattr(torch, name)}
PATTERN = {1: torch.uint8, 2: torch.uint16, 4: torch.int32}


def pattern(x):
    return x.view(PATTERN[x.element_size()])


def assert_same_codes(format, dtype, x):
    """NaN where torch has NaN, the same code elsewhere."""
    ours, theirs = format.to_codes(x), x.to(dtype)
    nan = theirs.float().isnan()
    assert torch.equal(format.from_codes(ours).isnan(), nan)
    assert torch.equal(ours[~nan], pattern(theirs)[~nan])


@pytest.mark.parametrize("name", DTYPES)
def test_every_code_has_the_same_value(name):
    format = formats.get(name)
    codes = torch.arange(1 << format.bits).to(PATTERN[DTYPES[name].itemsize])
    ours, theirs = format.from_codes(codes), codes.view(DTYPES[name]).float()
    nan = theirs.isnan()
    assert torch.equal(ours.isnan(), nan)
    assert torch.equal(pattern(ours[~nan]), pattern(theirs[~nan]))


@pytest.mark.parametrize("name", [n for n in DTYPES if n not in ("float8_e4m3fn", "float8_e8m0fnu")])
def test_nearest_gives_the_same_code(name, probes):
    format = formats.get(name)
    assert_same_codes(format, DTYPES[name], probes(format))


def test_nearest_gives_the_same_e4m3fn_code_in_range(probes):
    format = formats.get("float8_e4m3fn")
    x = probes(format)
    assert_same_codes(format, torch.float8_e4m3fn, x[(x.abs() <= 464) | x.isnan()])  # 464 still becomes 448


def test_e4m3fn_overflows_in_one_of_the_two_ways(probes):
    """Up to torch 2.11 values beyond the range and infinities become NaN; since 2.12 they saturate."""
    x = probes(formats.get("float8_e4m3fn"))
    theirs = pattern(x.to(torch.float8_e4m3fn))
    plain, saturating = (Float(4, 3, specials="fn", saturate=flag).to_codes(x) for flag in (False, True))
    assert torch.equal(theirs, plain) or torch.equal(theirs, saturating)


@pytest.mark.skipif("float8_e8m0fnu" not in DTYPES, reason="this torch has no float8_e8m0fnu")
def test_nearest_gives_the_same_e8m0_code_for_positive_numbers(probes):
    """Ties go up in torch, ml_dtypes and here.

    torch drops the sign and makes 2**-127 of zero, where ml_dtypes and thinwire have NaN.
    """
    format = formats.get("float8_e8m0fnu")
    x = probes(format)
    x = x[(x > 0) | x.isnan()]
    assert_same_codes(format, torch.float8_e8m0fnu, x)
    powers = 2.0 ** torch.arange(-126.0, 127.0)
    assert torch.equal(format.round(1.5 * powers), 2 * powers)
