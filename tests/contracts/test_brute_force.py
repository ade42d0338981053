"""Every value, every midpoint and its neighbours against brute force in float64, from the definitions.

The value sets below are built here from first principles, not asked of the format under test.
"""

import numpy as np
import pytest
import torch

from thinwire.formats import FORMATS, Dettmers, Float, Posit, Table, get

DETERMINISTIC = ["nearest", "away", "zero", "up", "down"]
PAIRS = [
    (1, 4), (2, 0), (2, 1), (2, 3), (3, 0), (3, 2), (3, 3), (3, 4), (4, 0), (4, 1), (4, 2), (4, 3), (4, 7),
    (5, 0), (5, 1), (5, 2), (5, 3), (5, 5), (5, 10), (6, 1), (6, 3), (6, 9), (7, 2), (7, 8), (8, 0), (8, 1),
    (8, 3), (8, 7), (8, 10),
]  # fmt: skip
FLOATS = [
    *(Float(exp, man) for exp, man in PAIRS),
    *(f for f in FORMATS.values() if isinstance(f, Float) and f.bits <= 16),
    Float(5, 2, saturate=True),
    Float(4, 3, specials="fn", saturate=True),
    Float(3, 4, specials="fnuz", bias=2),
    Float(2, 2, specials="none", bias=-20),
    Float(4, 3, subnormals=False),
    Float(3, 0, subnormals=False),
    Float(6, 5, specials="fn", subnormals=False, saturate=True),
    Float(8, 7, subnormals=False),
]


def float_magnitudes(f):
    """Magnitude codes in order with their values; the last is one beyond the largest finite one."""
    special = 1 << f.man if f.specials == "ieee" else {"fn": 1, "fnuz": 0, "none": 0}[f.specials]
    count = (1 << (f.exp + f.man)) - special
    bias = f.bias if f.bias is not None else 2 ** (f.exp - 1) - (f.specials != "fnuz")
    codes = np.arange(count + 1)
    field, fraction = codes >> f.man, codes & ((1 << f.man) - 1)
    values = np.where(
        field == 0,
        np.ldexp(fraction.astype(float), 1 - bias - f.man),
        np.ldexp(1 + fraction / 2**f.man, field - bias),
    )
    if not f.subnormals:
        keep = (field > 0) | (codes == 0)
        codes, values = codes[keep], values[keep]
    return codes, values


def choose(low, high, x, mode, negative, odd_low):
    """Whether a magnitude x between two neighbours goes to the upper one."""
    below, above = x - low, high - x
    if mode == "nearest":
        return (below > above) | ((below == above) & odd_low)
    if mode == "away":
        return below >= above
    if mode == "zero":
        return np.zeros(x.shape, bool)
    return (below > 0) & (negative == (mode == "down"))


@pytest.mark.parametrize("mode", DETERMINISTIC)
@pytest.mark.parametrize("f", FLOATS, ids=lambda f: f.name)
def test_floats(f, mode, probes):
    x = probes(f)
    x = x[x.isfinite()]
    exact, negative = x.abs().double().numpy(), np.signbit(x.numpy())
    codes, values = float_magnitudes(f)
    place = np.clip(np.searchsorted(values, exact, side="right") - 1, 0, len(values) - 2)
    odd = codes[place] % 2 == 1
    place = place + choose(values[place], values[place + 1], exact, mode, negative, odd)
    place = np.where(exact >= values[-1], len(values) - 1, place)  # nothing between there and infinity
    overflow = place == len(values) - 1
    toward_zero = (mode == "zero") | ((mode == "up") & negative) | ((mode == "down") & ~negative)
    saturates = f.saturate or f.specials == "none"
    place = np.where(overflow & (toward_zero | saturates), len(values) - 2, place)
    overflow = place == len(values) - 1
    sign = np.where(negative, 1 << (f.exp + f.man), 0)
    if f.specials == "fnuz":
        expected = np.where(codes[place] == 0, 0, codes[place] | sign)
        expected = np.where(overflow, 1 << (f.exp + f.man), expected)
    else:
        expected = codes[place] | sign  # one beyond the largest is Inf in ieee and NaN in fn
    assert np.array_equal(f.to_codes(x, mode).long().numpy(), expected)
    decoded = f.from_codes(f.to_codes(x, mode)).double().numpy()
    finite = ~overflow
    assert np.array_equal(np.abs(decoded[finite]), values[place][finite])


def posit_value(code, n, es):
    """One posit from its bits, as the standard words it."""
    body = f"{code:0{n}b}"[1:]
    run = len(body) - len(body.lstrip(body[0]))
    regime = run - 1 if body[0] == "1" else -run
    rest = body[run + 1 :]
    exponent = int((rest[:es] + "0" * es)[:es] or "0", 2)
    fraction = rest[es:]
    return 2.0 ** (regime * 2**es + exponent) * (1 + int(fraction or "0", 2) / 2 ** len(fraction))


@pytest.mark.parametrize("underflow", [False, True])
@pytest.mark.parametrize("es", range(4))
@pytest.mark.parametrize("n", [2, 3, 4, 5, 6, 8, 11, 16])
def test_posits(n, es, underflow, probes):
    f = Posit(n, es, underflow=underflow)
    codes = np.arange(1, 1 << (n - 1))
    positive = np.array([posit_value(code, n, es) for code in codes])
    between = np.array([posit_value(2 * code + 1, n + 1, es) for code in range(len(codes))])
    near = torch.from_numpy(between.astype(np.float32))
    sides = [torch.nextafter(near, torch.tensor(end)) for end in (0.0, torch.inf)]
    x = torch.cat([probes(f), near, *sides, -near, *(-side for side in sides)])
    x = x[x.isfinite()]
    exact, negative = x.abs().double().numpy(), np.signbit(x.numpy())
    for mode in DETERMINISTIC:
        values, numbers = np.append(0.0, positive), np.append(0, codes)
        place = np.clip(np.searchsorted(values, exact, side="right") - 1, 0, len(values) - 2)
        if mode in ("nearest", "away"):
            up = (exact > between[place]) | (
                (exact == between[place]) & ((numbers[place] % 2 == 1) | (mode == "away"))
            )
        else:
            up = choose(values[place], values[place + 1], exact, mode, negative, None)
        place = np.where(exact >= values[-1], len(values) - 1, place + up)
        if not underflow:
            place = np.where((place == 0) & (exact > 0), 1, place)
        expected = np.where(negative, -numbers[place], numbers[place]) % (1 << n)
        assert np.array_equal(f.to_codes(x, mode).long().numpy(), expected), mode


SETS = {
    "int8": np.arange(-127.0, 128),
    "int4": np.arange(-7.0, 8),
    "int2": np.arange(-1.0, 2),
    "fixed8.8": np.arange(-(2.0**15), 2**15) / 256,
    "fixed2.14": np.arange(-(2.0**15), 2**15) / 2**14,
    "fixed2.6": np.arange(-128.0, 128) / 64,
    "uniform8": np.float32(np.arange(256) / 255),
    "uniform8s": np.float32(np.arange(-127, 128) / 127),
    "uniform4s": np.float32(np.arange(-7, 8) / 7),
    "ternary": np.arange(-1.0, 2),
    "sign": np.array([-1.0, 1.0]),
    "linear": np.float32(np.arange(-127, 128) / 127),
}
TABLES = [
    name
    for name, f in FORMATS.items()
    if isinstance(f, Table) or (isinstance(f, Dettmers) and not f.legacy) or name in SETS
]


@pytest.mark.parametrize("mode", DETERMINISTIC)
@pytest.mark.parametrize("name", TABLES)
def test_saturating_sets(name, mode, probes):
    f = get(name)
    values = np.unique(SETS.get(name, f.values().numpy())).astype(np.float64)
    assert np.array_equal(f.values().double().numpy(), values)
    x = probes(f)
    x = x[x.isfinite()]
    exact = x.double().numpy()
    place = np.clip(np.searchsorted(values, exact, side="right") - 1, 0, len(values) - 2)
    low, high = values[place], values[place + 1]
    below = exact - low
    own = f.to_codes(f.values()).long().numpy()
    if mode in ("nearest", "away"):
        even = own[place] % 2, own[place + 1] % 2
        smaller = np.abs(high) <= np.abs(low)
        tie = np.where(even[0] == even[1], smaller, even[0] > even[1]) | (high == -low)
        tie = np.abs(high) >= np.abs(low) if mode == "away" else tie
        side = 2 * exact - (low + high)
        up = (side > 0) | ((side == 0) & tie)
    elif mode == "zero":
        up = (exact < 0) & (below > 0) & (high <= 0)
        across = (low < 0) & (high > 0)  # no zero between: the nearer one
        up = np.where(across, 2 * exact >= low + high, up)
    else:
        up = (below > 0) & (mode == "up")
    expected = np.where(up, high, low)
    expected = np.where(exact >= values[-1], values[-1], np.where(exact <= values[0], values[0], expected))
    assert np.array_equal(f.round(x, mode).double().numpy(), expected)


@pytest.mark.parametrize("name", TABLES)
def test_stochastic_rounding_of_sets_by_its_definition(name, probes):
    """Up when 23 complemented random bits, as a fraction, are below the position between the neighbours."""
    f = get(name)
    values = f.values().numpy()
    x = probes(f)
    x = x[x.isfinite() & (x > f.min) & (x < f.max)]
    words = torch.from_numpy(np.random.default_rng(1).integers(0, 1 << 32, x.numel(), dtype=np.uint32))
    place = np.searchsorted(values, x.numpy(), side="right") - 1
    low, high = values[place], values[place + 1]
    chance = (~words.numpy() >> np.uint32(9)).astype(np.float64) / 2**23
    grid = name.startswith(("int", "fixed"))
    if grid:  # magnitudes are rounded, so for negative numbers up is away from zero
        position = np.where(x < 0, high.astype(float) - x.double().numpy(), x.double().numpy() - low) / (
            high - low
        )
        up = np.where(x.numpy() < 0, chance >= position, chance < position)
    else:
        position = (x.numpy() - low) * (1 / (high.astype(float) - low)).astype(np.float32)
        up = chance < position
    assert np.array_equal(f.round(x, "stochastic", words).numpy(), np.where(up, high, low))


def test_float32_is_kept_as_it_is(probes):
    f = Float(8, 23)
    x = probes(f)
    same = f.round(x).view(torch.int32) == x.view(torch.int32)
    assert (same | x.isnan()).all()
    assert torch.equal(f.to_codes(x[~x.isnan()]).view(torch.int32), x[~x.isnan()].view(torch.int32))
