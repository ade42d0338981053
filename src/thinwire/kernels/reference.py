"""The kernels in plain torch: slow, short, and the definition of what every other kernel must return.

All of them take a flat float32 tensor (or flat codes) and return a new one. Integer work is done in
int64, where 32-bit patterns are non-negative and no shift overflows.
"""

from typing import TypeAlias, TypeVar

import torch
from torch import Tensor

from thinwire.kernels.params import (
    AWAY,
    CANONICAL_NAN,
    DOWN,
    NEAREST,
    STOCHASTIC,
    UP,
    ZERO,
    FloatParams,
    GridParams,
    Params,
    StepsParams,
)

Key: TypeAlias = tuple[int, int, int, int]
Word = TypeVar("Word", int, Tensor)

MASK32 = 0xFFFFFFFF
INFINITY = 0x7F800000
ROUNDS = 7
STREAM_BLOCK = 512  # elements that share STREAM_BLOCK // 4 calls of the generator


def code_dtype(bits: int) -> torch.dtype:
    """Return the smallest unsigned dtype that holds a code."""
    return torch.uint8 if bits <= 8 else torch.uint16 if bits <= 16 else torch.uint32


def to_codes(params: Params, x: Tensor, mode: int, words: Tensor | None = None) -> Tensor:
    """Return the codes of a flat float32 tensor. STOCHASTIC needs `words`, random uint32, one per element."""
    pattern = x.view(torch.int32).long() & MASK32
    random = torch.zeros_like(pattern) if words is None else words.view(torch.int32).long() & MASK32
    if isinstance(params, FloatParams):
        codes = _float_codes(params, pattern, mode, random)
    elif isinstance(params, GridParams):
        codes = _grid_codes(params, x, mode, random)
    else:
        codes = _steps_codes(params, pattern, x, mode, random)
    return codes.to(code_dtype(params.bits))


def from_codes(params: Params, codes: Tensor) -> Tensor:
    """Return the float32 values of flat codes; bits above the format's are ignored."""
    wide = codes.long() & ((1 << params.bits) - 1)
    if isinstance(params, FloatParams):
        return _float_values(params, wide)
    if isinstance(params, GridParams):
        half = 1 << (params.bits - 1) if params.low < 0 else 0
        return (((wide + half) % (1 << params.bits)) - half).float() * 2.0**-params.frac_bits
    return torch.from_numpy(params.values).to(codes.device)[wide]


def round(params: Params, x: Tensor, mode: int, words: Tensor | None = None) -> Tensor:
    """Return the value of each element's code."""
    return from_codes(params, to_codes(params, x, mode, words))


def _float_codes(p: FloatParams, pattern: Tensor, mode: int, random: Tensor) -> Tensor:
    """Return (exponent steps above the smallest normal) * 2**man + rounded significand, with the sign.

    A carry out of the significand increments the exponent, and a subnormal is a normal significand
    shifted further.
    """
    negative = pattern >> 31 == 1
    magnitude = pattern & 0x7FFFFFFF
    exponent = (magnitude >> 23).clamp(min=1)
    significand = torch.where(magnitude >> 23 > 0, magnitude & 0x7FFFFF | 0x800000, magnitude)
    below = (p.min_exponent - exponent).clamp(min=0)  # binades under the smallest normal
    base = (exponent - p.min_exponent).clamp(min=0) << p.man
    flush = (magnitude < p.min_exponent << 23) & (not p.subnormals)
    drop = torch.where(flush, 23, 23 - p.man)
    if mode == STOCHASTIC:
        code = _shift_stochastic(significand, drop, below, random)
    else:
        code = _shift_round(significand, (drop + below).clamp(max=32), base, mode, negative)
    code = base + torch.where(flush, code << p.man, code)
    overflow = code > p.max_code
    sign = negative & ((code > 0) | p.negative_zero)
    code = code | sign.long() << (p.exp + p.man)
    code = torch.where(overflow, _pick(negative, p.over_pos, p.over_neg), code)
    code = torch.where(magnitude == INFINITY, _pick(negative, p.inf_pos, p.inf_neg), code)
    return torch.where(magnitude > INFINITY, _pick(negative, p.nan_pos, p.nan_neg), code)


def _pick(negative: Tensor, positive_code: int, negative_code: int) -> Tensor:
    return torch.where(negative, negative_code, positive_code)


def _shift_stochastic(significand: Tensor, drop: Tensor, below: Tensor, random: Tensor) -> Tensor:
    """Shift a 24-bit significand right by `below`, then drop `drop` bits with stochastic rounding.

    Seven more bits are kept below the significand, so that a value far below the smallest subnormal
    can still round up. Then the top bits of the random word are added and the sum is truncated.
    """
    shifted = (significand << 7) >> below.clamp(max=31)
    return (shifted + (random >> (25 - drop))) >> (drop + 7)


def _shift_round(significand: Tensor, drop: Tensor, base: Tensor, mode: int, negative: Tensor) -> Tensor:
    """Drop the low bits of a 24-bit significand; a tie tests the whole code, which matters if man = 0."""
    whole, rest = significand >> drop, significand & ((1 << drop) - 1)
    half = (1 << drop) >> 1
    if mode == NEAREST:
        up = (rest > half) | ((rest == half) & (whole + base & 1 == 1) & (drop > 0))
    elif mode == AWAY:
        up = (rest >= half) & (drop > 0)
    elif mode == ZERO:
        up = torch.zeros_like(negative)
    else:
        up = (rest > 0) & (negative if mode == DOWN else ~negative)
    return whole + up.long()


def _float_values(p: FloatParams, codes: Tensor) -> Tensor:
    magnitude = codes & ((1 << (p.exp + p.man)) - 1)
    negative = codes >> (p.exp + p.man) & 1 == 1
    subnormal = magnitude >> p.man == 0
    pattern = (magnitude << (23 - p.man)) + ((127 - p.bias) << 23)
    small = magnitude.double() * 2.0 ** (1 - p.bias - p.man) * float(p.subnormals)
    value = torch.where(subnormal, small.float(), pattern.int().view(torch.float32))
    value = torch.where(negative, -value, value)
    special = torch.where(negative, -torch.inf, torch.inf)
    value = torch.where(magnitude == p.inf_code, special, value)
    is_nan = (magnitude > p.max_code) & (magnitude != p.inf_code)
    is_nan |= negative & (magnitude == 0) & (not p.negative_zero)
    return torch.where(is_nan, torch.tensor(CANONICAL_NAN, dtype=torch.int32).view(torch.float32), value)


def _grid_codes(p: GridParams, x: Tensor, mode: int, random: Tensor) -> Tensor:
    """Return grid codes with one rounding: the scaling and the distance to the integer below are exact."""
    steps = (x * 2.0**p.frac_bits).clamp(p.low - 1.0, p.high + 1.0)  # NaN stays NaN
    size = steps.abs()
    whole = size.floor()
    rest = size - whole
    if mode == NEAREST:
        size = size.round()
    elif mode == AWAY:
        size = whole + (rest >= 0.5)
    elif mode == STOCHASTIC:
        size = whole + (_chance(random) < rest)
    elif mode == ZERO:
        size = whole
    else:
        size = whole + ((rest > 0) & ((steps > 0) == (mode == UP)))
    steps = torch.where(steps < 0, -size, size).clamp(p.low, p.high)
    return steps.nan_to_num(0.0).long() & ((1 << p.bits) - 1)


def _steps_codes(p: StepsParams, pattern: Tensor, x: Tensor, mode: int, random: Tensor) -> Tensor:
    device = x.device
    starts = torch.from_numpy(p.starts.astype("int64")).to(device)
    segment = torch.searchsorted(starts, pattern, right=True) - 1
    codes = torch.from_numpy(p.codes).to(device)[segment]
    if mode != STOCHASTIC:
        return codes
    assert p.inverse is not None
    assert p.codes_up is not None
    lower = torch.from_numpy(p.values).to(device)[codes]  # NaN where the code is NaN, which never rounds up
    position = (x - lower) * torch.from_numpy(p.inverse).to(device)[segment]
    return torch.where(_chance(random) < position, torch.from_numpy(p.codes_up).to(device)[segment], codes)


def _chance(random: Tensor) -> Tensor:
    """Return 23 complemented random bits as a float in [0, 1); a larger word makes rounding up likelier."""
    return ((~random & MASK32) >> 9).float() * 2.0**-23


def philox(call: Word, key: Key) -> tuple[Word, Word, Word, Word]:
    """Return four random words for a call number, or a tensor of them: Philox4x32-7 (Salmon et al. 2011).

    Seven rounds are the fewest that the authors found to pass all of BigCrush. The call number is the
    lower half of the counter; the upper half and the generator's key come from the stream's key. Int64
    tensors wrap; the masks undo it.
    """
    k0, k1 = key[:2]
    a, b, c, d = call & MASK32, call >> 32, 0 * call + key[2], 0 * call + key[3]
    for _ in range(ROUNDS):
        p, q = a * 0xD2511F53, c * 0xCD9E8D57
        a, b, c, d = (q >> 32 & MASK32) ^ b ^ k0, q & MASK32, (p >> 32 & MASK32) ^ d ^ k1, p & MASK32
        k0, k1 = k0 + 0x9E3779B9 & MASK32, k1 + 0xBB67AE85 & MASK32
    return a, b, c, d


def stream_words(key: Key, numel: int, device: torch.device | None = None) -> Tensor:
    """Return the random words of elements 0..numel-1 of a stream, as uint32.

    Element i uses word (i // 128) % 4 of the generator's call number 128 * (i // 512) + i % 128. Long
    runs of neighbours share a word position, which suits vector units.
    """
    blocks = -(-numel // STREAM_BLOCK)
    calls = torch.arange(blocks * (STREAM_BLOCK // 4), dtype=torch.int64, device=device)
    words = philox(calls, key)
    stacked = torch.stack([word.view(blocks, STREAM_BLOCK // 4) for word in words], dim=1)
    return stacked.flatten()[:numel].to(torch.int32).view(torch.uint32)
