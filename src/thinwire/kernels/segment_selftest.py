"""Tests of a GPU's programs for segments: each is tested before it is used, as in `selftest`.

`kind` is what the compiler knows of the tensors; `segment_cuda` lists it for each program.
"""

from collections.abc import Callable
from functools import partial
from itertools import accumulate
from typing import Any

import torch
from torch import Tensor

from thinwire.kernels import segment_reference, selftest
from thinwire.kernels.params import FILLED, BlockParams, Draw, Segments, SignLayout, WireLayout

DRAW = Draw(seed=(1 << 33) + 5, step=(1 << 32) + 2, rank=3)
GUARD = 0xA5  # fills the memory around wires
WEIGHT = 0.3
Kind = tuple[Any, ...]


def encoding_holds(p: BlockParams, kind: Kind, step: int) -> bool:
    """Whether encoding such a vector gives the reference's bytes."""
    return _remembered(p, "encoding", kind, step, partial(_try_encode, p, kind, step))


def decoding_holds(p: BlockParams, kind: Kind, step: int) -> bool:
    """Whether decoding into such a vector gives the reference's numbers."""
    return _remembered(p, "decoding", kind, step, partial(_try_decode, p, kind, step))


def reduction_holds(p: BlockParams, kind: Kind, step: int) -> bool:
    """Whether reducing such wires gives the reference's bytes."""
    return _remembered(p, "reducing", kind, step, partial(_try_reduce, p, kind, step))


def signs_hold(layout: SignLayout, kind: Kind, step: int) -> bool:
    """Whether encoding such a vector in one bit gives the reference's bytes."""
    return _remembered(layout, "encoding", kind, step, partial(_try_signs, layout, kind, step))


def unsigned_hold(layout: SignLayout, kind: Kind, step: int) -> bool:
    """Whether decoding one bit into such a vector gives the reference's numbers."""
    return _remembered(layout, "decoding", kind, step, partial(_try_unsigned, layout, kind, step))


def signs_reduce(layout: SignLayout, kind: Kind, step: int) -> bool:
    """Whether reducing such wires of one bit gives the reference's bytes."""
    return _remembered(layout, "reducing", kind, step, partial(_try_resigned, layout, kind, step))


def _remembered(
    codec: BlockParams | SignLayout, does: str, kind: Kind, step: int, trial: Callable[[], bool]
) -> bool:
    key: tuple[Any, ...] = ("segments", does, kind, step)
    if isinstance(codec, SignLayout):
        key = (*key, codec.block, codec.low_at < 0)
        return selftest.remembered(None, key, f"{does} segments of one bit", trial, kind[-1])
    what = f"{does} segments of {codec.element.bits}-bit codes in blocks of {codec.block}"
    return selftest.remembered(codec, key, what, trial, kind[-1])


# Trials


def _try_encode(p: BlockParams, kind: Kind, step: int) -> bool:
    from thinwire.kernels import segment_cuda

    dtype, aligned, held, device = kind
    segments, x, wire = _sample(p, step)
    x = x.to(dtype)
    residual = None if held is None else 0.25 * x.float().flip(0)
    actual, left = wire.to(device, copy=True), None
    if residual is not None:
        left = selftest.placed(residual, held, device)
    moved = selftest.placed(x, aligned, device)
    ready = segment_cuda.encoder(p, kind, segments)
    segment_cuda.run_encode(ready, p, moved, actual, segments, DRAW, left)
    segment_reference.encode(p, x.float(), wire, segments, DRAW, residual)
    return _alike(actual, wire, left, residual)


def _try_decode(p: BlockParams, kind: Kind, step: int) -> bool:
    from thinwire.kernels import segment_cuda

    segments, wires, stride = _wires(p, step, kind[2])
    ready = segment_cuda.decoder(p, kind, segments)
    run = partial(segment_cuda.run_decode, ready)
    return _decodes_alike(run, partial(segment_reference.decode, p), segments, wires, stride, kind)


def _try_reduce(p: BlockParams, kind: Kind, step: int) -> bool:
    from thinwire.kernels import segment_cuda

    held, count, device = kind
    segments, wires, stride = _wires(p, step, count)
    _, x, out = _sample(p, step)
    residual = None if held is None else 0.25 * x
    actual, left = out.to(device, copy=True), None
    if residual is not None:
        left = selftest.placed(residual, held, device)
    ready = segment_cuda.reducer(p, kind, segments)
    numbers = (stride >> 2, count, p.limit, WEIGHT, segment_cuda._drawn(DRAW, actual))
    segment_cuda.run_reduce(ready, wires.to(device), actual, left, numbers)
    segment_reference.reduce(p, wires, out, segments, WEIGHT, count, stride, DRAW, residual)
    return _alike(actual, out, left, residual)


def _try_signs(layout: SignLayout, kind: Kind, step: int) -> bool:
    from thinwire.kernels import segment_cuda

    dtype, aligned, held, device = kind
    segments, x, wire = _sign_sample(layout, step)
    x = x.to(dtype)
    residual = None if held is None else 0.25 * x.float().flip(0)
    actual, left = wire.to(device, copy=True), None
    if residual is not None:
        left = selftest.placed(residual, held, device)
    moved = selftest.placed(x, aligned, device)
    segment_cuda.run_signs(segment_cuda.signer(kind, segments), moved, actual, left)
    segment_reference.onebit_encode(x.float(), wire, segments, _threshold(layout), residual)
    return _alike(actual, wire, left, residual)


def _try_unsigned(layout: SignLayout, kind: Kind, step: int) -> bool:
    from thinwire.kernels import segment_cuda

    segments, wires, stride = _sign_wires(layout, step, kind[2])
    run = partial(segment_cuda.run_decode, segment_cuda.unsigner(kind, segments))
    return _decodes_alike(run, segment_reference.onebit_decode, segments, wires, stride, kind)


def _try_resigned(layout: SignLayout, kind: Kind, step: int) -> bool:
    from thinwire.kernels import segment_cuda

    held, count, device = kind
    segments, wires, stride = _sign_wires(layout, step, count)
    _, x, out = _sign_sample(layout, step)
    residual = None if held is None else 0.25 * x
    actual, left = out.to(device, copy=True), None
    if residual is not None:
        left = selftest.placed(residual, held, device)
    ready = segment_cuda.resigner(kind, segments)
    segment_cuda.run_reduce(ready, wires.to(device), actual, left, (stride >> 2, count, WEIGHT))
    reduce = partial(segment_reference.onebit_reduce, wires, out, segments, _threshold(layout))
    reduce(WEIGHT, count, stride, residual)
    return _alike(actual, out, left, residual)


def _decodes_alike(
    run: Callable[..., None],
    reference: Callable[..., None],
    segments: Segments,
    wires: Tensor,
    stride: int,
    kind: Kind,
) -> bool:
    dtype, aligned, count, device = kind
    out = torch.ones(_numel(segments), dtype=dtype)
    actual = selftest.placed(out, aligned, device)
    run(wires.to(device), actual, WEIGHT, count, stride)
    reference(wires, out, segments, WEIGHT, count, stride)
    return torch.equal(actual.cpu().float(), out.float())


def _alike(there: Tensor, wire: Tensor, left: Tensor | None, residual: Tensor | None) -> bool:
    same = torch.equal(there.cpu(), wire)
    return same and (left is None or residual is None or torch.equal(left.cpu(), residual))


# Samples


def _segments(layouts: list[WireLayout] | list[SignLayout], step: int) -> Segments:
    """Return segments that start at odd multiples of a step, with gaps between them."""
    starts = list(accumulate((-(-layout.numel // step) // 2 * 2 + 4 for layout in layouts), initial=1))
    places = tuple(step * at for at in starts[: len(layouts)])
    wires = tuple(accumulate((layout.nbytes + 8 for layout in layouts), initial=4))[: len(layouts)]
    return Segments(
        tuple(layouts), places, wires, places, tuple(range(7, 7 + len(layouts))), (2,) * len(layouts)
    )


def _numel(segments: Segments) -> int:
    return segments.starts[-1] + segments.layouts[-1].numel + 5


def _nbytes(segments: Segments) -> int:
    return segments.wires[-1] + segments.layouts[-1].nbytes + 16


def _sizes(block: int) -> tuple[int, ...]:
    return 3 * max(block, 1024) + 200, 70, 1, max(block, 1024)


def _sample(p: BlockParams, step: int) -> tuple[Segments, Tensor, Tensor]:
    """Return segments, a vector, and memory for wires (with scales, if encoding expects them)."""
    segments = _segments([selftest.sample_layout(p, numel) for numel in _sizes(p.block)], step)
    x, wire = _vector(segments, p.block or 512), _memory(segments)
    for i, layout in enumerate(segments.layouts):
        if p.rule == FILLED:
            assert isinstance(layout, WireLayout)
            selftest.fill(p, segment_reference.wire_of(wire, segments, i), layout)
    return segments, x, wire


def _sign_sample(layout: SignLayout, step: int) -> tuple[Segments, Tensor, Tensor]:
    scaled = layout.low_at < 0
    layouts = [selftest.sample_signs(layout.block, numel, scaled) for numel in _sizes(layout.block)]
    segments = _segments(layouts, step)
    return segments, _vector(segments, layout.block), _memory(segments)


def _memory(segments: Segments) -> Tensor:
    return torch.full((_nbytes(segments),), GUARD, dtype=torch.uint8)


def _vector(segments: Segments, block: int) -> Tensor:
    x = torch.zeros(_numel(segments))
    for at, layout in zip(segments.starts, segments.layouts, strict=True):
        x[at : at + layout.numel] = selftest.numbers(1, layout.numel, block)[0]
    return x


def _wires(p: BlockParams, step: int, count: int) -> tuple[Segments, Tensor, int]:
    """Return segments, the wires of several ranks one after another, and the bytes from one to the next."""
    segments, x, wire = _sample(p, step)
    wires = wire.repeat(count)
    for k in range(count):
        target = wires[k * wire.numel() :]
        segment_reference.encode(p, x.roll(31 * k), target, segments, DRAW, None)
    return segments, wires, wire.numel()


def _sign_wires(layout: SignLayout, step: int, count: int) -> tuple[Segments, Tensor, int]:
    segments, x, wire = _sign_sample(layout, step)
    wires = wire.repeat(count)
    for k in range(count):
        target = wires[k * wire.numel() :]
        segment_reference.onebit_encode(x.roll(31 * k), target, segments, _threshold(layout), None)
    return segments, wires, wire.numel()


def _threshold(layout: SignLayout) -> str:
    return "sign" if layout.low_at < 0 else "zero"
