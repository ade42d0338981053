"""Segments of a flat vector: one call for all equals rows of the reference one by one, bit for bit."""

import itertools
from dataclasses import replace

import pytest
import torch

from thinwire import Stream, kernels
from thinwire.codecs.block import Block
from thinwire.codecs.onebit import OneBit
from thinwire.codecs.sparse import TopK
from thinwire.kernels import block_reference, onebit_reference, segment_cpu, segment_reference
from thinwire.kernels.params import (
    FILLED,
    MINMAX,
    NEAREST,
    STOCHASTIC,
    BlockParams,
    Draw,
    GridParams,
    Segments,
    SignLayout,
    WireLayout,
    packed_nbytes,
)
from thinwire.scaling import Scaling

NUMELS = (1000, 1, 64, 4097, 130, 9000, 17)
GUARD = 0xA5
DRAW = Draw(seed=(7 << 40) + 3, step=(5 << 33) + 2, rank=4)
CODECS = (
    Block("int8", 256),
    Block("int4", 128, "stochastic"),
    Block("int2", 128),
    Block("float8_e4m3fn", 32, scaling=Scaling("pow2", store="e8m0")),
    Block("float4_e2m1fn", 32, "stochastic", scaling=Scaling("floor", store="e8m0")),
    Block("nf4", 64),
    Block("float6_e2m3fn", 64, "stochastic"),
    Block("int8", 64, scaling=Scaling("absmax", store="bfloat16")),
    Block("posit16_1", 512),
    Block("int8", 16384),
    Block("int8", None),
    Block("int4", None, "stochastic", scaling=Scaling("fixed", -3.0)),
    Block("float4_e2m1fn", 16, scaling=Scaling("absmax", store="e4m3")),
)
SPREADS = (  # bits, block, mode of scales between minimum and maximum
    (8, 64, NEAREST),
    (4, 128, STOCHASTIC),
)


def minmax(bits, block, mode):
    """A codec of its own: layouts are made here."""
    p = BlockParams(GridParams(bits, 0, 0, 2**bits - 1), mode, block, MINMAX, 2.0**bits - 1.0)

    def layout(numel):
        codes, blocks = packed_nbytes(numel, bits), p.blocks(numel)
        return WireLayout(numel, codes + 8 * blocks + 4, codes, codes + 4 * blocks, -7)

    return p, layout


CASES = [(codec._params, codec.layout) for codec in CODECS] + [minmax(*each) for each in SPREADS]
BLOCK_CASES = pytest.mark.parametrize(
    ("p", "layout"), CASES, ids=[*(each.name for each in CODECS), "minmax8", "minmax4"]
)
ONEBITS = [OneBit(block, threshold) for block in (64, 128, 16384) for threshold in ("zero", "sign", "mean")]


def segments_of(layouts, gap=3, wire_gap=8):
    """Segments with gaps between them, in the vector from last to first."""
    numels = [layout.numel for layout in layouts]
    ends = list(itertools.accumulate(numel + gap for numel in numels))
    wires = itertools.accumulate((layout.nbytes + wire_gap for layout in layouts), initial=4)
    return Segments(
        layouts=tuple(layouts),
        starts=tuple(sum(numels) + gap * len(numels) - end for end in ends),
        wires=tuple(wires)[: len(layouts)],
        held=tuple(end - numel for end, numel in zip(ends, numels, strict=True)),
        tensors=tuple(0xFFFFFF00 + 3 * i for i in range(len(layouts))),
        rows=tuple(i % 3 for i in range(len(layouts))),
    )


def sizes(segments):
    """Elements and bytes that flat tensors must have."""
    numel = segments.numel + 3 * len(segments.layouts)
    return numel, segments.wires[-1] + segments.layouts[-1].nbytes + 12


def numbers(numel, seed=0):
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(numel, generator=generator) * torch.exp(3 * torch.randn(numel, generator=generator))
    x[5::700] = -0.0
    x[100:2000:400] = torch.nan
    x[4000:4100:90] = torch.inf
    x[6000:6200] = 0.0
    x[7000:7300] *= 1e-39
    x[8000:8100] *= 1e36
    return x


def buffer(nbytes):
    return torch.full((nbytes,), GUARD, dtype=torch.uint8)


def same(one, other):
    """Equal bits, but for the bits of NaNs."""
    known = ~one.isnan()
    assert torch.equal(known, ~other.isnan())
    assert torch.equal(one[known].view(torch.int32), other[known].view(torch.int32))


def row_of(x, at, numel):
    return x[at : at + numel].view(1, -1)


def fill(p, segments, x, wire, residual=None):
    """Scales of every segment into its wire, of any size; NaN where something is not finite."""
    for i, layout in enumerate(segments.layouts):
        there, u = row_of(wire, segments.wires[i], layout.nbytes), row_of(x, segments.starts[i], layout.numel)
        if residual is not None:
            u = u + row_of(residual, segments.held[i], layout.numel)
        cut = block_reference._cut(u, p.block, 0.0)
        scales = torch.rand(cut.shape[:2], generator=torch.Generator().manual_seed(i)) + 0.01
        scales *= u.nan_to_num(1.0, 1.0, 1.0).abs().mean()
        scales = block_reference._poison(scales, ~cut.isfinite().all(-1))
        one = torch.ones(1, 1)
        if layout.extra_at < layout.nbytes - 4:
            block_reference._put(there, layout.extra_at, block_reference._as_bytes(one))
        block_reference._put(there, layout.scales_at, block_reference.store_scales(p, scales, one))


def by_rows(p, segments, x, wire, held):
    """The definition: one row after another."""
    for i, layout in enumerate(segments.layouts):
        key = Stream(DRAW.seed, DRAW.step, segments.tensors[i], DRAW.rank).key
        u, rows = row_of(x, segments.starts[i], layout.numel), segments.rows[i] + 1
        left = None if held is None else row_of(held, segments.held[i], layout.numel)
        # the stream's earlier rows are there, and go nowhere
        many = torch.zeros(rows, layout.numel)
        many[-1] = u
        wires = row_of(wire, segments.wires[i], layout.nbytes).repeat(rows, 1)
        others = None if left is None else left.repeat(rows, 1)
        block_reference.encode(p, many, wires, layout, key if p.mode == STOCHASTIC else None, others)
        wire[segments.wires[i] : segments.wires[i] + layout.nbytes] = wires[-1]
        if left is not None:
            left.copy_(others[-1].nan_to_num(0.0, 0.0, 0.0))


@BLOCK_CASES
@pytest.mark.parametrize("feedback", [False, True])
def test_encoding_equals_rows_of_the_reference(p, layout, feedback):
    segments = segments_of([layout(numel) for numel in NUMELS])
    numel, nbytes = sizes(segments)
    x, wire, expected = numbers(numel), buffer(nbytes), buffer(nbytes)
    residual = numbers(numel, 1) if feedback else None
    if p.rule == FILLED:
        fill(p, segments, x, wire, residual)
        fill(p, segments, x, expected, residual)
    left = None if residual is None else residual.clone()
    draw = DRAW if p.mode == STOCHASTIC else None
    by_rows(p, segments, x, expected, left)
    for module in (kernels, segment_reference):
        there, held = wire.clone(), None if residual is None else residual.clone()
        call = getattr(module, "block_encode_segments", None) or module.encode
        call(p, x, there, segments, draw, held)
        assert torch.equal(there, expected)
        if held is not None:
            same(held, left)
            inside = [
                row_of(held, at, layout.numel)
                for at, layout in zip(segments.held, segments.layouts, strict=True)
            ]
            assert all(each.isfinite().all() for each in inside)


@BLOCK_CASES
@pytest.mark.parametrize("count", [1, 2, 5])
def test_decoding_adds_wires_in_order(p, layout, count):
    segments, wires, stride = filled_wires(p, layout, count)
    numel = sizes(segments)[0]
    out = torch.full((numel,), 7.0)
    expected = out.clone()
    for i, each in enumerate(segments.layouts):
        total = None
        for k in range(count):
            wire = row_of(wires, k * stride + segments.wires[i], each.nbytes)
            values = block_reference.decode(p, wire, each, 0.3)[0]
            total = values if total is None else total + values
        expected[segments.starts[i] : segments.starts[i] + each.numel] = total
    kernels.block_decode_segments(p, wires, out, segments, 0.3, count, stride)
    same(out, expected)


def filled_wires(p, layout, count):
    """Wires of several ranks, one buffer after another."""
    segments = segments_of([layout(numel) for numel in NUMELS])
    numel, nbytes = sizes(segments)
    stride = -(-nbytes // 4) * 4 + 8
    wires = buffer(count * stride)
    for k in range(count):
        wire = wires[k * stride : (k + 1) * stride]
        if p.rule == FILLED:
            fill(p, segments, numbers(numel, k), wire)
        segment_reference.encode(p, numbers(numel, k), wire, segments, DRAW, None)
    return segments, wires, stride


@BLOCK_CASES
@pytest.mark.parametrize(("count", "feedback"), [(1, False), (2, True), (5, False), (5, True)])
def test_reducing_equals_a_sum_that_is_encoded(p, layout, count, feedback):
    segments, wires, stride = filled_wires(p, layout, count)
    numel = sizes(segments)[0]
    total = torch.zeros(numel)
    segment_reference.decode(p, wires, total, segments, 0.3, count, stride)
    if not feedback:
        total += 0.0
    residual = numbers(numel, 9) if feedback else None
    left = None if residual is None else residual.clone()
    out = buffer(stride)
    if p.rule == FILLED:
        fill(p, segments, total, out, residual)
    expected = out.clone()
    by_rows(p, segments, total, expected, left)
    draw = DRAW if p.mode == STOCHASTIC else None
    kernels.block_reduce_segments(p, wires, out, segments, 0.3, count, stride, draw, residual)
    assert torch.equal(out, expected)
    if residual is not None:
        same(residual, left)


@pytest.mark.parametrize("codec", ONEBITS, ids=[each.name for each in ONEBITS])
@pytest.mark.parametrize("feedback", [False, True])
def test_one_bit(codec, feedback):
    segments = segments_of([codec.layout(numel) for numel in NUMELS])
    numel, nbytes = sizes(segments)
    stride, count = nbytes + 4, 3
    wires, expected = buffer(count * stride), buffer(count * stride)
    for k in range(count):
        x, residual = numbers(numel, k), numbers(numel, 9 - k) if feedback else None
        left = None if residual is None else residual.clone()
        kernels.onebit_encode_segments(x, wires[k * stride :], segments, codec.threshold, residual)
        for i, layout in enumerate(segments.layouts):
            wire = row_of(expected, k * stride + segments.wires[i], layout.nbytes)
            held = None if left is None else row_of(left, segments.held[i], layout.numel)
            row = row_of(x, segments.starts[i], layout.numel)
            onebit_reference.encode(row, wire, layout, codec.threshold, held)
            if held is not None:
                held.nan_to_num_(0.0, 0.0, 0.0)
        if residual is not None:
            same(residual, left)
    assert torch.equal(wires, expected)
    out, sums = torch.full((numel,), 7.0), torch.full((numel,), 7.0)
    kernels.onebit_decode_segments(wires, out, segments, 0.3, count, stride)
    segment_reference.onebit_decode(wires, sums, segments, 0.3, count, stride)
    same(out, sums)
    check_signs_reduced(codec, segments, wires, sums, numbers(numel, 4) if feedback else None)


def check_signs_reduced(codec, segments, wires, sums, residual):
    stride = wires.numel() // 3
    left = None if residual is None else residual.clone()
    out, expected = buffer(stride), buffer(stride)
    kernels.onebit_reduce_segments(wires, out, segments, codec.threshold, 0.3, 3, stride, residual)
    total = sums + 0.0 if residual is None else sums
    segment_reference.onebit_encode(total, expected, segments, codec.threshold, left)
    assert torch.equal(out, expected)
    if residual is not None:
        same(residual, left)


@pytest.mark.parametrize("threshold", ["zero", "sign", "mean"])
def test_one_bit_rows_reduce_as_a_sum_that_is_encoded(threshold):
    codec = OneBit(64, threshold)
    layout, x = codec.layout(5000), torch.stack([numbers(5000, k).view(1, -1).repeat(2, 1) for k in range(4)])
    wires = codec.encode(x)
    out, expected = (
        torch.empty(2, layout.nbytes, dtype=torch.uint8),
        torch.empty(2, layout.nbytes, dtype=torch.uint8),
    )
    onebit_reference.reduce(wires, expected, layout, threshold, 0.25)
    kernels.onebit_reduce(wires, out, layout, threshold, 0.25)
    assert torch.equal(out, expected)
    total = torch.zeros(2, 5000)
    for wire in wires:
        codec.decode_add(wire, total, 0.25)
    assert torch.equal(codec.encode(total), expected)


@pytest.mark.parametrize("feedback", [False, True])
def test_largest_magnitudes(feedback):
    segments = segments_of([SignLayout(n, 64, 64, -1, 0, 0) for n in (*NUMELS, 20000, 0)])
    numel = sizes(segments)[0]
    x, residual = numbers(numel), numbers(numel, 1) if feedback else None
    maxima = kernels.segment_magnitudes(x, segments, residual)
    assert maxima.dtype == torch.int32
    for i, layout in enumerate(segments.layouts):
        u = row_of(x, segments.starts[i], layout.numel)
        if residual is not None:
            u = u + row_of(residual, segments.held[i], layout.numel)
        expected = (u.view(torch.int32) & 0x7FFFFFFF).amax().item() if layout.numel else 0
        assert maxima[i].item() == expected


def test_no_segments_and_segments_without_elements():
    none = Segments((), (), (), (), (), ())
    p, x, wire = Block("int8", 64)._params, torch.ones(4), buffer(16)
    kernels.block_encode_segments(p, x, wire, none)
    kernels.block_decode_segments(p, wire, x, none, 1.0)
    kernels.block_reduce_segments(p, wire, wire, none, 1.0, 1, 0)
    kernels.onebit_encode_segments(x, wire, none, "zero")
    assert kernels.segment_magnitudes(x, none).numel() == 0
    assert (wire == GUARD).all()
    codec = Block("int8", 64)
    segments = segments_of([codec.layout(0), codec.layout(5)])
    wire = buffer(64)
    kernels.block_encode_segments(p, torch.ones(20), wire, segments)
    assert torch.equal(wire[4:8].view(torch.int32), torch.tensor([codec.tag(0)], dtype=torch.int32))
    assert (wire[8:16] == GUARD).all()


def test_rows_of_a_tensor_that_lie_apart_are_encoded_one_by_one():
    """By codecs without kernels for segments, which take neighbouring rows at once."""
    codec, x = TopK(0.5), torch.arange(1.0, 17.0)
    for starts in ((0, 4), (0, 8), (8, 0)):
        layouts, wires = (codec.layout(4),) * 2, (0, codec.nbytes(4))
        segments = Segments(layouts, starts, wires, (0, 4), (7, 7), (0, 1))
        wire = buffer(2 * codec.nbytes(4))
        codec.encode_segments(x, wire, segments)
        assert torch.equal(wire, torch.cat([codec.encode(x[at : at + 4]) for at in starts]))


def test_keys_are_those_of_streams():
    for tensor in (0, 5, 0xFFFFFFFF):
        assert segment_reference.key(DRAW, tensor) == Stream(DRAW.seed, DRAW.step, tensor, DRAW.rank).key


@pytest.mark.parametrize("codec", [Block("int8", 256), Block("int4", 64, "stochastic")], ids=str)
def test_threads_share_spans(codec, monkeypatch):
    p = codec._params
    segments = segments_of([codec.layout(numel) for numel in (*NUMELS, 30000)])
    numel, nbytes = sizes(segments)
    x, one, many = numbers(numel), buffer(nbytes), buffer(nbytes)
    draw = DRAW if codec.needs_rng else None
    segment_cpu.encode(p, x, one, segments, draw, None)
    monkeypatch.setattr("thinwire.kernels.cpu.threads", lambda _: 3)
    segment_cpu.encode(p, x, many, segments, draw, None)
    assert torch.equal(one, many)


def test_packed_segments_keep_their_wires():
    segments = segments_of([OneBit().layout(numel) for numel in NUMELS])
    packed = segments.packed
    assert (packed.wires, packed.held) == (segments.wires, segments.held)
    assert packed.starts == (0, *itertools.accumulate(NUMELS[:-1]))
    assert packed is segments.packed
    assert replace(segments).known is not segments.known
