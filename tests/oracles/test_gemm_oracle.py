"""Low-precision matrix products against a scalar oracle that shares no code with them, bit for bit.

The oracle knows a format as the ascending list of its magnitudes, from the definition, and rounds an exact
number by looking between which two it lies.
"""

import bisect
import itertools
import math
from dataclasses import dataclass, field
from fractions import Fraction

import numpy as np
import pytest
import torch

from thinwire import simulate
from thinwire.kernels import gemm_exact, gemm_params, gemm_reference
from thinwire.simulate import Arithmetic, gemm

pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning")  # numpy's scalars overflow aloud
F = np.float32
NAN, INF = math.nan, math.inf
DIRECTED = ("away", "zero", "up", "down")


# The oracle


@dataclass(frozen=True)
class NumberLine:
    """Magnitudes in ascending order, change-overs between them, and what becomes of special values."""

    values: list[Fraction]
    over: float  #: what is beyond the last value
    nan: float = NAN
    minus_zero: float = -0.0
    beyond: Fraction | None = None  #: the next value, if there were one more
    middles: list[Fraction] = field(default_factory=list)  #: change-overs, if not half-way
    smallest: bool = False  #: whether what is not zero stays so
    infinite: float | None = None  #: what infinity becomes, if not `over`

    def round(self, x, mode="nearest"):
        """A Fraction or a float, rounded once."""
        if isinstance(x, float) and math.isnan(x):
            return self.nan
        if isinstance(x, float) and math.isinf(x):
            return math.copysign(self.over if self.infinite is None else self.infinite, x)
        if x == 0:
            return self.minus_zero if isinstance(x, float) and math.copysign(1, x) < 0 else 0.0
        sign, size = (-1, -Fraction(x)) if x < 0 else (1, Fraction(x))
        index = self._index(size, mode, sign)
        if index == len(self.values):
            to_zero = mode == "zero" or (mode == "up" and sign < 0) or (mode == "down" and sign > 0)
            return sign * (float(self.values[-1]) if to_zero else self.over)
        if index == 0:
            return self.minus_zero if sign < 0 else 0.0
        return float(sign * self.values[index])

    def _index(self, size, mode, sign):
        if self.beyond is not None and size >= self.beyond:
            return len(self.values)
        low = bisect.bisect_right(self.values, size) - 1
        if self.values[low] == size or (self.beyond is None and low == len(self.values) - 1):
            return low
        above = self.values[low + 1] if low + 1 < len(self.values) else self.beyond
        if mode == "zero" or (mode in ("up", "down") and (sign > 0) == (mode == "down")):
            return low
        if mode in ("up", "down"):
            return low + 1
        middle = self.middles[low] if self.middles else (self.values[low] + above) / 2
        if size == middle:
            low += low % 2 if mode == "nearest" else 1
        else:
            low += size > middle
        return 1 if self.smallest and low == 0 else low


def float_line(exp, man, specials="ieee"):
    bias = 2 ** (exp - 1) - (specials != "fnuz")
    codes = 2 ** (exp + man)

    def value(code):
        whole, part = divmod(code, 2**man)
        step = Fraction(2) ** (max(whole, 1) - bias - man)
        return step * (part + (2**man if whole else 0))

    last = {"ieee": codes - 2**man, "fn": codes - 1}.get(specials, codes) - 1
    values = [value(code) for code in range(last + 1)]
    over = {"ieee": INF, "none": float(values[-1])}.get(specials, NAN)
    nan = {"none": -0.0}.get(specials, NAN if man else INF)
    return NumberLine(values, over, nan, 0.0 if specials == "fnuz" else -0.0, value(last + 1))


class FixedLine:
    """Fixed point, which is not symmetric."""

    def __init__(self, whole, part):
        self.scale, self.count = Fraction(2) ** part, 2 ** (whole + part - 1)

    def round(self, x, mode="nearest"):
        if isinstance(x, float) and not math.isfinite(x):
            return (
                0.0
                if math.isnan(x)
                else math.copysign(self.count, x) / float(self.scale) - (x > 0) / float(self.scale)
            )
        scaled = Fraction(x) * self.scale
        away = math.floor(abs(scaled) + Fraction(1, 2)) * (1 if scaled > 0 else -1)
        whole = {
            "nearest": round(scaled), "away": away, "zero": math.trunc(scaled), "up": math.ceil(scaled),
            "down": math.floor(scaled),
        }[mode]  # fmt: skip
        return float(Fraction(min(max(whole, -self.count), self.count - 1)) / self.scale)


def posit_line(n, es):
    """Change-overs are the posits of one bit more."""

    def value(code, bits):
        body = format(code, f"0{bits}b")[1:]
        run = len(body) - len(body.lstrip(body[0]))
        regime = run - 1 if body[0] == "1" else -run
        rest = body[run + 1 :]
        exponent = int(rest[:es].ljust(es, "0") or "0", 2)
        fraction = rest[es:]
        size = 1 + Fraction(int(fraction or "0", 2), 2 ** len(fraction))
        return size * Fraction(2) ** (regime * 2**es + exponent)

    codes = range(1, 2 ** (n - 1))
    values = [Fraction(0), *(value(code, n) for code in codes)]
    middles = [value(2 * code + 1, n + 1) for code in range(2 ** (n - 1))]
    last = float(values[-1])
    return NumberLine(values, last, minus_zero=0.0, middles=middles, smallest=True, infinite=NAN)


class Single:
    """Float32: exact numbers are rounded to it, floats are in it already."""

    def round(self, x, mode="nearest"):  # noqa: ARG002
        if isinstance(x, float):
            return x
        if x == 0:
            return 0.0
        exponent = max(math.frexp(float(x))[1] - 24, -149) if abs(x) < 2**200 else 110
        whole = round(x / Fraction(2) ** exponent)
        result = whole * Fraction(2) ** exponent
        return float(result) if abs(result) < 2**128 else math.copysign(INF, x)


LINES = {
    None: Single(),
    "e5m2": float_line(5, 2),
    "e4m3": float_line(4, 3),
    "float8_e4m3fn": float_line(4, 3, "fn"),
    "float8_e4m3fnuz": float_line(4, 3, "fnuz"),
    "float4_e2m1fn": float_line(2, 1, "none"),
    "e3m0": float_line(3, 0),
    "e5m10": float_line(5, 10),
    "bfloat16": float_line(8, 7),
    "fixed2.6": FixedLine(2, 6),
    "fixed5.3": FixedLine(5, 3),
    "posit8_1": posit_line(8, 1),
}


def plus(x, y):
    return float(F(x) + F(y))


def times(x, y, multiply):
    if multiply == "exact":
        return float(F(x) * F(y))
    i, j = (int(F(each).view(np.uint32)) for each in (x, y))
    sign = -1.0 if (i ^ j) >> 31 else 1.0
    i, j = i & 0x7FFFFFFF, j & 0x7FFFFFFF
    x, y = (0.0 if each >> 23 == 0 else abs(value) for each, value in ((i, x), (j, y)))
    if not (math.isfinite(x) and math.isfinite(y)):
        return sign * float(F(x) * F(y))
    if x == 0 or y == 0 or (i >> 23) + (j >> 23) <= 127:
        return sign * 0.0
    pattern = i + j - 0x3F800000 + int(float(multiply.partition("/")[2] or 0) * 2**23)
    return sign * (INF if pattern >= 0x7F800000 else float(np.uint32(pattern).view(F)))


def dot(x, y, how):
    """One element of the product."""
    names = [None if each is None else each.name for each in (how.product, how.sum)]
    first, last = (LINES[name] for name in names)

    def total(value):
        return last.round(value, how.rounding)

    if how.order == "exact":
        return exact_dot(x, y, total)
    p = [first.round(times(u, v, how.multiply), how.rounding) for u, v in zip(x, y, strict=True)]
    if how.order == "pairwise":
        return pairwise(p, total)
    if how.order == "kahan":
        return kahan(p, total)
    chunk = int(how.order.partition("/")[2] or len(p))
    sums = []
    for start in range(0, len(p), chunk):
        s = 0.0
        for each in p[start : start + chunk]:
            s = total(plus(s, each))
        sums.append(s)
    if not how.order.startswith("chunked"):
        return sums[0]
    s = 0.0
    for each in sums:
        s = total(plus(s, each))
    return s


def pairwise(p, total):
    level = p
    while True:
        above = [total(plus(u, v)) for u, v in zip(level[::2], level[1::2], strict=False)]
        if len(level) % 2:
            above.append(total(level[-1]))
        level = above
        if len(level) == 1:
            return level[0]


def kahan(p, total):
    s = c = 0.0
    for each in p:
        y = total(plus(each, -c))
        t = total(plus(s, y))
        c = total(plus(total(plus(t, -s)), -y))
        s = t
    return s


def exact_dot(x, y, total):
    if all(math.isfinite(each) for each in (*x, *y)):
        return total(sum(Fraction(u) * Fraction(v) for u, v in zip(x, y, strict=True)))
    products = [u * v for u, v in zip(x, y, strict=True)]  # float64: no overflow, so only true infinities
    if any(math.isnan(each) for each in products) or {INF, -INF} <= set(products):
        return total(NAN)
    return total(INF if INF in products else -INF)


def oracle(a, b, how):
    rows = [[dot(x, y, how) for y in b.t().tolist()] for x in a.tolist()]
    return torch.tensor(rows, dtype=torch.float32)


# Inputs and comparisons


def ordinary(rows, steps, columns, seed):
    """Numbers with few bits, of sizes that keep most sums in range but reach both ends."""
    random = torch.Generator().manual_seed(seed)
    a = torch.randint(-9, 10, (rows, steps), generator=random) / 4
    b = torch.randint(-9, 10, (steps, columns), generator=random) / 4
    return a, b * 2.0 ** torch.randint(-9, 3, (steps, columns), generator=random)


def tiny(rows, steps, columns, seed):
    """The same near the smallest numbers of the formats, where sums become zeros of either sign."""
    a, b = ordinary(rows, steps, columns, seed)
    random = torch.Generator().manual_seed(seed)
    return a * 2.0 ** torch.randint(-16, 0, (rows, 1), generator=random), b


def wild(rows, steps, columns, seed):
    """Float32 numbers of all sizes; zeros, subnormals, large ones, infinities and NaN: a few in each sum."""
    random = np.random.default_rng(seed)
    pool = [0.0, -0.0, 1.0, -1.0, 1e-40, -1e-45, 1.17549435e-38, 448.0, 464.0, 61440.0, -65520.0, 3e38, 0.3]

    def operand(*shape):
        x = (random.standard_normal(shape) * 2.0 ** random.integers(-12, 5, shape)).astype(F)
        from_pool = np.array(pool, F)[random.integers(0, len(pool), shape)]
        x = np.where(random.random(shape) < 1 / (1 + steps), from_pool, x)
        special = np.array([INF, -INF, NAN, -NAN], F)[random.integers(0, 4, shape)]
        return torch.from_numpy(np.where(random.random(shape) < 0.1 / steps, special, x).astype(F))

    return operand(rows, steps), operand(steps, columns)


def bits(x):
    """Patterns, with one for every NaN."""
    return torch.where(x.isnan(), torch.tensor(NAN), x).view(torch.int32)


def by_reference(a, b, how):
    order, chunk = gemm._order(how.order)
    mode = gemm.MODES[how.rounding]
    product, total = how._params(how.product), how._params(how.sum)
    p = gemm_params.GemmParams(product, total, mode, order, chunk, gemm._offset(how.multiply))
    out = torch.empty(1, a.shape[0], b.shape[1])
    gemm_reference.gemm(p, a[None], b[None], out)
    return out[0]


def assert_all_agree(how, steps=(1, 2, 3, 8, 13, 40)):
    for k in steps:
        for make, seed in itertools.product((ordinary, tiny, wild), range(2)):
            a, b = make(5, k, 6, 100 * k + seed)
            expected = bits(oracle(a, b, how))
            product = simulate.matmul(a, b, how)
            assert torch.equal(product.view(torch.int32), expected), (how, k, make)
            if how.order != "exact":
                assert torch.equal(by_reference(a, b, how).view(torch.int32), expected), (how, k, make)


# Tests

PAIRS = [
    ("e5m2", "e5m2"),
    ("e4m3", "e4m3"),
    ("float8_e4m3fn", "float8_e4m3fn"),
    ("float8_e4m3fnuz", "e5m10"),
    ("e3m0", "e3m0"),
    ("e5m10", "e5m10"),
    ("bfloat16", "bfloat16"),
    ("fixed2.6", "fixed5.3"),
    ("posit8_1", "posit8_1"),
    ("float4_e2m1fn", "e5m10"),
    (None, None),
]
ORDERS = ("sequential", "chunked/3", "pairwise", "kahan")


@pytest.mark.parametrize("order", ORDERS)
@pytest.mark.parametrize("pair", PAIRS, ids=str)
def test_every_order_and_format_equals_the_oracle(pair, order):
    assert_all_agree(Arithmetic(*pair, order=order))


@pytest.mark.parametrize(
    "pair", [(None, "e5m2"), ("e5m2", None), (None, "bfloat16"), ("fixed2.6", None)], ids=str
)
def test_one_format_alone_equals_the_oracle(pair):
    assert_all_agree(Arithmetic(*pair))


@pytest.mark.parametrize("rounding", DIRECTED)
@pytest.mark.parametrize("name", ["e5m2", "float8_e4m3fn", "e3m0", "bfloat16", "fixed2.6"])
def test_other_rounding_modes_equal_the_oracle(name, rounding):
    for order in ("sequential", "kahan"):
        assert_all_agree(Arithmetic(name, name, order, rounding=rounding), steps=(1, 8, 13))


@pytest.mark.parametrize("order", ["sequential", "chunked/5", "pairwise", "kahan"])
@pytest.mark.parametrize("multiply", ["mogami", "mogami/0.0625"])
def test_products_of_integers_equal_the_oracle(multiply, order):
    assert_all_agree(Arithmetic("e5m10", "e5m10", order, multiply), steps=(1, 7, 20))
    assert_all_agree(Arithmetic("posit8_1", None, order, multiply), steps=(7,))


def test_products_of_integers_at_the_ends_of_the_range():
    x = torch.tensor([[1e-20, 1e-38, 1e38, -1e30, 1e-45, 1.9999999, INF, -INF, NAN, 0.0]]).t()
    how = Arithmetic(multiply="mogami", order="pairwise")
    assert torch.equal(simulate.matmul(x, x.t(), how).view(torch.int32), bits(oracle(x, x.t(), how)))


def test_products_of_integers_are_zero_up_to_where_exponents_sum_to_127():
    x = torch.tensor([[1.0, 1.25, 1.9999999]]).t() * 2.0 ** -torch.arange(60.0, 67.0)
    x = x.reshape(-1, 1)
    for order in ("sequential", "pairwise", "kahan"):
        how = Arithmetic(multiply="mogami/0.0625", order=order)
        assert torch.equal(simulate.matmul(x, x.t(), how).view(torch.int32), bits(oracle(x, x.t(), how)))


EXACT = ["e5m2", "float8_e4m3fn", "e3m0", "e5m10", "bfloat16", "fixed2.6"]


@pytest.mark.parametrize(
    ("name", "rounding"),
    [(None, "nearest"), ("posit8_1", "nearest"), *itertools.product(EXACT, ("nearest", *DIRECTED))],
)
def test_exact_sums_equal_the_oracle(name, rounding):
    assert_all_agree(Arithmetic(sum=name, order="exact", rounding=rounding))


def test_exact_sums_over_the_whole_range_of_float32():
    random = np.random.default_rng(3)
    patterns = random.integers(0, 1 << 32, (2, 12, 12), dtype=np.uint32)
    a, b = torch.from_numpy(patterns.view(F)).nan_to_num(1.0, 2.0, 3.0)
    a[0], b[:, 0] = torch.tensor(1e38), torch.tensor(-1e-38)
    a[1, :6] = -a[1, 6:]
    b[:6, 1] = b[6:, 1]  # cancels
    for name in (None, "bfloat16"):
        how = Arithmetic(sum=name, order="exact")
        assert torch.equal(simulate.matmul(a, b, how).view(torch.int32), bits(oracle(a, b, how)))


def test_an_exact_sum_is_rounded_once():
    """1 + 2**-8 is a tie of bfloat16; float32 loses what would break it."""
    a = torch.tensor([[1.0, 2.0**-8, 2.0**-60]])
    how = Arithmetic(sum="bfloat16", order="exact")
    assert simulate.matmul(a, torch.ones(3, 1), how).item() == 1 + 2.0**-7
    assert simulate.matmul(a[:, :2], torch.ones(2, 1), how).item() == 1
    assert simulate.matmul(a, torch.tensor([[1.0], [1.0], [-1.0]]), how).item() == 1


def test_long_exact_sums_are_cut_into_pieces(monkeypatch):
    a, b = wild(3, 40, 4, 7)
    whole, pieces = torch.empty(3, 4), torch.empty(3, 4)
    gemm_exact.gemm(a, b, whole, odd=False)
    monkeypatch.setattr(gemm_exact, "STEPS", 7)
    gemm_exact.gemm(a, b, pieces, odd=False)
    assert torch.equal(bits(pieces), bits(whole))
