"""Block codecs in plain torch: they define every byte that the fast kernels must produce.

A row is cut into blocks of equal length (the last may be short). Each block has a scale; an element is
stored as the code of `element / scale`. All arithmetic is float32 with one rounding per operation. The
only reductions are maxima, which do not depend on the order of evaluation.
"""

import torch
from torch import Tensor
from torch.nn.functional import pad

from thinwire.kernels import reference
from thinwire.kernels.params import (
    ABSMAX,
    BFLOAT16,
    CANONICAL_NAN,
    E4M3,
    E8M0,
    FILLED,
    GROUP,
    MINMAX,
    POW2_CEIL,
    SCALE_NBYTES,
    STOCHASTIC,
    BlockParams,
    FloatParams,
    WireLayout,
    _part_nbytes,
    components,
)
from thinwire.kernels.reference import INFINITY, STREAM_BLOCK, Key

#: float8_e4m3fn, the format of E4M3 scales
SCALE_FORMAT = FloatParams(
    exp=4, man=3, bias=7, subnormals=True, negative_zero=True, max_code=126, inf_code=-1, over_pos=126,
    over_neg=254, inf_pos=126, inf_neg=254, nan_pos=127, nan_neg=255,
)  # fmt: skip


# Packing


def pack(codes: Tensor, bits: int) -> Tensor:
    """Pack codes [rows, n] into bytes [rows, packed_nbytes(n, bits)].

    A part of eight bits or more is stored as little-endian bytes. A narrower part of b bits is
    packed in groups of 64 codes, laid out as 8/b rows of 8b. Each column becomes a byte, with the first row
    in its lowest bits. Neighbouring codes are thus in neighbouring bytes, which suits vector units and GPUs.
    """
    codes = codes.long()
    rows, numel = codes.shape
    parts, shift = [], 0
    for part in components(bits):
        piece = codes >> shift & ((1 << part) - 1)
        if part < 8:
            piece = pad(piece, (0, -numel % GROUP)).view(rows, -1, 8 // part, 8 * part)
            places = torch.arange(0, 8, part, device=codes.device).view(-1, 1)
            packed = (piece << places).sum(-2).to(torch.uint8).view(rows, -1)
        else:
            places = torch.arange(0, part, 8, device=codes.device)
            packed = (piece.unsqueeze(-1) >> places & 255).to(torch.uint8).view(rows, -1)
        parts.append(pad(packed, (0, _part_nbytes(numel, part) - packed.shape[1])))
        shift += part
    return torch.cat(parts, 1)


def unpack(packed: Tensor, numel: int, bits: int) -> Tensor:
    """Unpack bytes into int64 codes [rows, numel]."""
    rows = packed.shape[0]
    codes = torch.zeros((rows, numel), dtype=torch.int64, device=packed.device)
    at = shift = 0
    for part in components(bits):
        nbytes = _part_nbytes(numel, part)
        piece = packed[:, at : at + nbytes].long()
        if part < 8:
            places = torch.arange(0, 8, part, device=packed.device).view(-1, 1)
            piece = (piece.view(rows, -1, 1, 8 * part) >> places & ((1 << part) - 1)).view(rows, -1)
        else:
            places = torch.arange(0, part, 8, device=packed.device)
            whole = piece[:, : numel * part // 8].view(rows, numel, part // 8)
            piece = (whole << places).sum(-1)
        codes |= piece[:, :numel] << shift
        at, shift = at + nbytes, shift + part
    return codes


# Scales


def block_scales(p: BlockParams, u: Tensor) -> tuple[Tensor, Tensor]:
    """Return each block's float32 scale and base (0 unless MINMAX); NaN if an element is not finite."""
    cut = _cut(u, p.block, 0.0)
    magnitude = (cut.view(torch.int32) & 0x7FFFFFFF).amax(-1)  # as integers, so that NaN is largest
    largest = magnitude.view(torch.float32)
    base = torch.zeros_like(largest)
    limit = torch.full((), p.limit, dtype=torch.float32, device=u.device)
    if p.rule == MINMAX:
        low, high = _cut(u, p.block, torch.inf).amin(-1), _cut(u, p.block, -torch.inf).amax(-1)
        scale, base = high / limit - low / limit, low + 0.0
        magnitude = torch.maximum(magnitude, (high - low).view(torch.int32))  # infinite on overflow
    elif p.rule == ABSMAX:
        scale = largest / limit
    else:
        scale = _power_of_two(magnitude, limit, ceil=p.rule == POW2_CEIL)
    bad = magnitude >= INFINITY
    return _poison(scale, bad), _poison(base, bad)


def _power_of_two(magnitude: Tensor, limit: Tensor, *, ceil: bool) -> Tensor:
    """Return 2**e, e >= -127, or NaN if e > 127.

    With `ceil` it is the smallest power that scales the block to at most the limit. Otherwise e is the
    difference of the exponents.
    """
    top = limit.view(torch.int32)
    exponent = (magnitude >> 23) - (top >> 23)
    if ceil:
        exponent = exponent + ((magnitude & 0x7FFFFF) > (top & 0x7FFFFF)).int()
    return _poison(_exp2(exponent.clamp(-127, 127)), exponent > 127)


def _exp2(exponent: Tensor) -> Tensor:
    return torch.where(exponent > -127, exponent + 127 << 23, 0x400000).view(torch.float32)


def _poison(values: Tensor, bad: Tensor) -> Tensor:
    nan = torch.full((), CANONICAL_NAN, dtype=torch.int32, device=values.device)
    return torch.where(bad, nan, values.view(torch.int32)).view(torch.float32)


def store_scales(p: BlockParams, scale: Tensor, factor: Tensor | None = None) -> Tensor:
    """Return scales [rows, blocks] as bytes, padded to whole words. `factor` [rows, 1] is for E4M3."""
    packed = _stored(p, scale, factor)
    return pad(packed, (0, -packed.shape[1] % 4))


def _stored(p: BlockParams, scale: Tensor, factor: Tensor | None) -> Tensor:
    if p.store == BFLOAT16:
        up = (scale.view(torch.int32) + 0xFFFF >> 16).clamp(max=0x7F7F)  # a smaller scale would saturate
        return _as_bytes(torch.where(scale.isnan(), CANONICAL_NAN >> 16, up).to(torch.int16))
    if p.store == E8M0:
        field = scale.view(torch.int32) >> 23
        return torch.where(scale.isnan(), 255, field).to(torch.uint8)
    if p.store == E4M3:
        assert factor is not None
        flat = (scale / factor).nan_to_num(0.0).flatten()  # 0/0 where a row is all zero
        codes = reference.to_codes(SCALE_FORMAT, flat, 0).view(scale.shape)
        return torch.where(scale.isnan(), 127, codes)
    return _as_bytes(scale)


def stored_scales(p: BlockParams, wire: Tensor, layout: WireLayout) -> Tensor:
    """Read the scales of a wire as float32 [rows, blocks]."""
    count = p.blocks(layout.numel)
    raw = wire[:, layout.scales_at : layout.scales_at + count * SCALE_NBYTES[p.store]].contiguous()
    if p.store == BFLOAT16:
        return raw.view(torch.bfloat16).float()
    if p.store == E8M0:
        return _poison(_exp2(raw.int() - 127), raw == 255)
    if p.store == E4M3:
        values = reference.from_codes(SCALE_FORMAT, raw.flatten()).view(raw.shape)
        return values * _extra(wire, layout, 1)
    return raw.view(torch.float32)


def _extra(wire: Tensor, layout: WireLayout, count: int) -> Tensor:
    return wire[:, layout.extra_at : layout.extra_at + 4 * count].contiguous().view(torch.float32)


def _as_bytes(values: Tensor) -> Tensor:
    return values.contiguous().view(torch.uint8)


# Rows


def encode(
    p: BlockParams,
    x: Tensor,
    wire: Tensor,
    layout: WireLayout,
    key: Key | None = None,
    residual: Tensor | None = None,
    first: int = 0,
) -> None:
    """Encode rows [rows, numel] into their wires. With FILLED, these already hold scales (and factor).

    A residual is added first; afterwards it holds the encoding error. `first` is the row of the random
    stream for the first row.
    """
    u = x.float() if residual is None else x.float() + residual
    rows, numel = u.shape
    if p.rule != FILLED:
        scale, base = block_scales(p, u)
        _put(wire, layout.scales_at, store_scales(p, scale))
        if p.affine:
            _put(wire, layout.extra_at, _as_bytes(base))
    scale = _spread(stored_scales(p, wire, layout), p, numel)
    before, inverse = _inverse(scale)
    y = u * before
    if p.affine:
        y = y - _spread(_extra(wire, layout, p.blocks(numel)), p, numel) * before
    y = y * inverse
    words = _row_words(key, rows, numel, u.device, first) if p.mode == STOCHASTIC else None
    codes = reference.to_codes(p.element, y.flatten(), p.mode, words).view(rows, numel).long()
    codes = torch.where(scale.isnan(), 0, codes)
    _put(wire, 0, pack(codes, p.element.bits))
    tag = torch.tensor([layout.tag], dtype=torch.int64).to(torch.int32).view(torch.uint8).to(wire.device)
    _put(wire, layout.nbytes - 4, tag.expand(rows, 4))
    if residual is not None:
        residual.copy_(u - decode(p, wire, layout))


def decode(p: BlockParams, wire: Tensor, layout: WireLayout, weight: float = 1.0) -> Tensor:
    """Decode wires [rows, nbytes] to float32 [rows, numel]; `weight` multiplies the scales."""
    numel = layout.numel
    times = torch.full((), weight, dtype=torch.float32, device=wire.device)
    scale = _spread(stored_scales(p, wire, layout) * times, p, numel)
    codes = unpack(wire, numel, p.element.bits)
    values = reference.from_codes(p.element, codes.flatten()).view(codes.shape) * scale
    if p.affine:
        values = values + _spread(_extra(wire, layout, p.blocks(numel)) * times, p, numel)
    return values


def reduce(
    p: BlockParams,
    wires: Tensor,
    out: Tensor,
    layout: WireLayout,
    weight: float,
    key: Key | None = None,
    residual: Tensor | None = None,
) -> None:
    """Encode the weighted sums of wires [K, rows, nbytes] into `out`, added in the order given."""
    total = torch.zeros((wires.shape[1], layout.numel), device=wires.device)
    for wire in wires:
        total += decode(p, wire, layout, weight)
    encode(p, total, out, layout, key, residual)


def _inverse(scale: Tensor) -> tuple[Tensor, Tensor]:
    """Return two factors that do not overflow and whose product is 1 / scale; (1, 0) for zero and NaN."""
    before = torch.where(scale < 2.0**-64, 2.0**64, torch.where(scale > 2.0**64, 2.0**-64, 1.0))
    usable = scale > 0
    inverse = torch.where(usable, 1.0 / (scale * before), 0.0)
    return torch.where(usable, before, 1.0), inverse


def _cut(u: Tensor, block: int, filler: float) -> Tensor:
    """Return [rows, n] as [rows, blocks, block], padded with `filler`."""
    rows, numel = u.shape
    if not block:
        return u.view(rows, 1, numel) if numel else u.view(rows, 0, 1)
    return pad(u, (0, -numel % block), value=filler).view(rows, -1, block)


def _spread(scale: Tensor, p: BlockParams, numel: int) -> Tensor:
    """Repeat [rows, blocks] for each element: [rows, n]."""
    if not p.block:
        return scale.expand(-1, numel) if numel else scale.new_empty((scale.shape[0], 0))
    return scale.repeat_interleave(p.block, 1)[:, :numel]


def _put(wire: Tensor, at: int, part: Tensor) -> None:
    wire[:, at : at + part.shape[1]] = part


def _row_words(key: Key | None, rows: int, numel: int, device: torch.device, first: int = 0) -> Tensor:
    """Return random words for every row; each row starts at a whole block of the stream (`stream_words`)."""
    assert key is not None
    blocks, quarter = -(-numel // STREAM_BLOCK), STREAM_BLOCK // 4
    calls = torch.arange(
        first * blocks * quarter, (first + rows) * blocks * quarter, dtype=torch.int64, device=device
    )
    words = [word.view(rows, blocks, quarter) for word in reference.philox(calls, key)]
    stacked = torch.stack(words, dim=2).view(rows, -1)[:, :numel]
    return stacked.to(torch.int32).reshape(-1).view(torch.uint32)


def guard(wire: Tensor, tag: int, values: Tensor) -> Tensor:
    """Replace rows whose wire has another tag by NaN. On a CPU the tag was checked before."""
    if wire.device.type == "cpu":
        return values
    tags = wire[:, -4:].contiguous().view(torch.int32)
    return torch.where(tags == tag, values, torch.nan)
