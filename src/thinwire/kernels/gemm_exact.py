"""Matrix products with a single rounding at the end, as in a quire (Kulisch 2013), in plain torch.

Operands become integers, written in digits of 16 bits. The product of two matrices of digits is exact in
float64 if at most 2**20 products are summed. Equal powers of 2**16 are added as int64 and carried. The
result is the exact sum rounded to float32, to nearest even or to odd.

Rounding to odd chooses, of two neighbours, the one with an odd pattern, unless the sum is one of them. It
keeps all that a second rounding to a format of at most 22 significant bits needs (Boldo and Melquiond 2008).
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from thinwire.kernels.gemm_reference import one_nan

DIGIT = 16
MASK = (1 << DIGIT) - 1
STEPS = 1 << 20  # 2**16 * 2**16 * 2**20 is below 2**53
TOP = 3.4028234663852886e38


def gemm(a: Tensor, b: Tensor, out: Tensor, *, odd: bool) -> None:
    """Multiply [..., M, K] by [..., K, N] into `out`. K is at least 1."""
    x, y = _digits(a), _digits(b)
    sums = _sums(x, y, out)
    result = _rounded(sums, x.exponent + y.exponent, odd=odd)
    if not (a.isfinite().all() and b.isfinite().all()):
        result = _special(a.double(), b.double(), result)
    out.copy_(one_nan(result))


@dataclass(frozen=True)
class Digits:
    """A matrix as a sum of digits[i] * 2**(16 * places[i] + exponent); digits are signed float64."""

    digits: list[Tensor]
    places: list[int]  #: ascending; places where all digits are zero are left out
    exponent: int


def _digits(x: Tensor) -> Digits:
    pattern = x.contiguous().view(torch.int32).long()
    field = pattern >> 23 & 0xFF
    size = torch.where(field > 0, pattern & 0x7FFFFF | 0x800000, pattern & 0x7FFFFF)
    size = torch.where(field == 0xFF, 0, size)  # `_special` handles infinities and NaN
    exponent = field.clamp(min=1) - 150
    kept = size != 0
    if not kept.any():
        return Digits([], [], 0)
    zeros = _trailing_zeros(size)
    lowest = int((exponent + zeros)[kept].min())
    highest = int(exponent[kept].max()) + 24
    sign = torch.where(pattern < 0, -1, 1)
    parts: list[tuple[int, Tensor]] = []
    for place in range(-(-(highest - lowest) // DIGIT)):
        shift = exponent - (lowest + DIGIT * place)
        part = torch.where(shift < 0, size >> (-shift).clamp(0, 32), size << shift.clamp(0, DIGIT))
        part = torch.where(shift < DIGIT, part & MASK, 0)
        if part.any():
            parts.append((place, (part * sign).double()))
    return Digits([part for _, part in parts], [place for place, _ in parts], lowest)


def _trailing_zeros(size: Tensor) -> Tensor:
    """Return the number of zero bits below the lowest one; 0 for 0."""
    return torch.frexp((size & -size).double())[1].long().clamp(min=1) - 1


def _sums(x: Digits, y: Digits, out: Tensor) -> list[Tensor]:
    """Return the exact sums as int64 multiples of 1, 2**16, 2**32 ..., lowest first."""
    if not x.digits or not y.digits:
        return [torch.zeros_like(out, dtype=torch.int64)]
    sums = [torch.zeros_like(out, dtype=torch.int64) for _ in range(x.places[-1] + y.places[-1] + 1)]
    for i, left in zip(x.places, x.digits, strict=True):
        for j, right in zip(y.places, y.digits, strict=True):
            for k in range(0, left.shape[-1], STEPS):
                sums[i + j] += (left[..., k : k + STEPS] @ right[..., k : k + STEPS, :]).long()
    return sums


def _rounded(sums: list[Tensor], exponent: int, *, odd: bool) -> Tensor:
    """Carry, take the leading bits and whether a lower bit is set, and round to float32."""
    negative = _carried(sums)[-1] < 0
    digits = _carried([torch.where(negative, -part, part) for part in sums])[:-1]
    head = torch.zeros_like(digits[0])
    taken, rest = torch.zeros_like(head), torch.zeros_like(head)
    for digit in reversed(digits):
        take = ((head != 0) | (digit != 0)) & (taken < 3)
        rest |= torch.where(take | (head == 0), 0, digit)
        head = torch.where(take, head << DIGIT | digit, head)
        taken += take
    left = torch.where(taken > 0, _place(digits), 0) - (taken - 1).clamp(min=0)
    head = head << 1 | (rest != 0).long()
    low = DIGIT * left + (exponent - 1)
    length = torch.frexp(head.double())[1].long()
    drop = torch.maximum(length - 24, -149 - low).clamp(min=0)
    cut = drop.clamp(max=62)
    whole, below = head >> cut, head & ((1 << cut) - 1)
    if odd:
        whole = whole | (below != 0).long()
    else:
        half = (1 << cut) >> 1
        up = (below > half) | ((below == half) & (drop > 0) & (whole & 1 == 1))
        whole = whole + up.long()
    value = whole.double() * _power(low + drop)
    if odd:
        value = value.clamp(max=TOP)
    value = torch.where(negative, -value, value)
    return torch.where(head == 0, 0.0, value).float()


def _carried(sums: list[Tensor]) -> list[Tensor]:
    """Return digits of 16 bits, lowest first, then the last carry: 0, or -1 if the number is negative."""
    carry, digits = torch.zeros_like(sums[0]), []
    for part in sums:
        carry = carry + part
        digits.append(carry & MASK)
        carry = carry >> DIGIT
    for _ in range(4):
        digits.append(carry & MASK)
        carry = carry >> DIGIT
    return [*digits, carry]


def _place(digits: list[Tensor]) -> Tensor:
    """Return the place of the highest digit that is not zero."""
    place = torch.zeros_like(digits[0])
    for i, digit in enumerate(digits):
        place = torch.where(digit != 0, i, place)
    return place


def _power(exponent: Tensor) -> Tensor:
    """Return 2**exponent in float64."""
    return (exponent + 1023 << 52).view(torch.float64)


def _special(a: Tensor, b: Tensor, finite: Tensor) -> Tensor:
    """Apply infinities and NaN as float arithmetic does, from counts of infinite products of each sign."""
    x, y = a.nan_to_num(0.0, 1.0, -1.0).sign(), b.nan_to_num(0.0, 1.0, -1.0).sign()
    i, j = a.isinf().double(), b.isinf().double()
    number = i @ y.abs() + x.abs() @ j - i @ j
    balance = (i * x) @ y + x @ (j * y) - (i * x) @ (j * y)
    bad = i @ (b == 0).double() + (a == 0).double() @ j
    bad = bad + a.isnan().double().sum(-1, keepdim=True) + b.isnan().double().sum(-2, keepdim=True)
    result = torch.where(number > 0, torch.where(balance > 0, torch.inf, -torch.inf).float(), finite)
    return torch.where((bad > 0) | (balance.abs() != number), torch.nan, result)
