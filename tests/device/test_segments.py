"""GPU kernels for segments equal the reference: every byte of a wire, every decoded bit, one launch for all.

On a machine with a GPU they run there. Without one, Triton's interpreter runs the same programs on the CPU,
with fewer cases, since it is slow.
"""

# ruff: noqa: E402 (the environment must be set before Triton is imported)

import itertools
import os
from dataclasses import replace

import pytest
import torch

HAS_GPU = torch.cuda.is_available()
if not HAS_GPU:
    os.environ["TRITON_INTERPRET"] = "1"  # read when Triton is first imported
pytest.importorskip("triton", reason="Triton is not installed")

from thinwire import Stream, kernels
from thinwire.codecs.block import Block
from thinwire.codecs.onebit import OneBit
from thinwire.kernels import (
    block_cuda,
    block_reference,
    segment_cuda,
    segment_reference,
    segment_selftest,
    selftest,
)
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

DEVICE = torch.device("cuda" if HAS_GPU else "cpu")
DRAW = Draw(seed=(9 << 40) + 1, step=(3 << 33) + 7, rank=5)
GUARD = 0xA5  # what memory around wires holds
NUMELS = (1000, 1, 65, 2064, 130, 20000) if HAS_GPU else (1000, 1, 65, 1100)
COUNTS = (1, 2, 5, 9) if HAS_GPU else (3,)
needs_gpu = pytest.mark.skipif(not HAS_GPU, reason="needs a CUDA device")


@pytest.fixture(autouse=True)
def _no_device_switch(monkeypatch):
    if not HAS_GPU:
        monkeypatch.setattr(torch.cuda, "current_device", lambda: None)


def minmax(bits, block, mode):
    p = BlockParams(GridParams(bits, 0, 0, 2**bits - 1), mode, block, MINMAX, 2.0**bits - 1.0)

    def layout(numel):
        codes, blocks = packed_nbytes(numel, bits), p.blocks(numel)
        return WireLayout(numel, codes + 8 * blocks + 4, codes, codes + 4 * blocks, -7)

    return p, layout


CODECS = (
    Block("int8", 256),
    Block("int4", 128, "stochastic"),
    Block("int2", 128),
    Block("float8_e4m3fn", 32, scaling=Scaling("pow2", store="e8m0")),
    Block("float4_e2m1fn", 32, "stochastic", scaling=Scaling("floor", store="e8m0")),
    Block("nf4", 64),
    Block("dynamic_tree", 2048),
    Block("float6_e2m3fn", 64, "stochastic"),
    Block("int8", None),
    Block("float4_e2m1fn", 16, scaling=Scaling("absmax", store="e4m3")),
)
LARGE = (Block("int8", 16384), Block("int4", 16384, "stochastic"))
CASES = [(codec._params, codec.layout) for codec in (*CODECS, *(LARGE if HAS_GPU else LARGE[:1]))]
CASES += [minmax(8, 64, NEAREST), minmax(4, 128, STOCHASTIC), minmax(8, 16384, NEAREST)]
NAMES = [
    *(codec.name for codec in (*CODECS, *(LARGE if HAS_GPU else LARGE[:1]))),
    "minmax8",
    "minmax4",
    "minmax8l",
]
BLOCK_CASES = pytest.mark.parametrize(("p", "layout"), CASES, ids=NAMES)
STEPS = (1, 4, 8, 16)
ALIGNMENTS = (
    (1, False, 1),
    (4, True, 0),
    (8, False, 0),
    (16, True, 1),
)  #: with feedback, and where vectors begin
ONEBITS = [OneBit(block, threshold) for block, threshold in ((64, "zero"), (128, "sign"), (2048, "zero"))]
ONEBITS += [OneBit(16384, "sign"), OneBit(64, "mean")] if HAS_GPU else []


def segments_of(layouts, step=1):
    """Segments that begin at odd multiples of a step, the last one first."""
    room = [-(-layout.numel // step) // 2 * 2 * step + 4 * step for layout in layouts]
    ends = list(itertools.accumulate(room))
    wires = tuple(itertools.accumulate((layout.nbytes + 8 for layout in layouts), initial=4))
    return Segments(
        layouts=tuple(layouts),
        starts=tuple(step + ends[-1] - end for end in ends),
        wires=wires[: len(layouts)],
        held=tuple(step + end - each for end, each in zip(ends, room, strict=True)),
        tensors=tuple(0xFFFFFF00 + 3 * i for i in range(len(layouts))),
        rows=tuple(5 * i for i in range(len(layouts))),
    )


def sizes(segments):
    """Elements and bytes that flat tensors must have."""
    last = max(range(len(segments.layouts)), key=lambda i: segments.starts[i])
    ends = (segments.starts[last], max(segments.held))
    numel = max(ends) + max(layout.numel for layout in segments.layouts) + 8
    return numel, segments.wires[-1] + segments.layouts[-1].nbytes + 12


def numbers(numel, seed=0):
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(numel, generator=generator) * torch.exp(3 * torch.randn(numel, generator=generator))
    x[5::700] = -0.0
    x[100:2000:400] = torch.nan
    x[1500:1600:90] = torch.inf
    x[600:750] = 0.0
    x[800:900] *= 1e-39
    x[900:1000] *= 1e36
    return x


def buffer(nbytes):
    return torch.full((nbytes,), GUARD, dtype=torch.uint8)


def move(x, offset=0):
    """A copy on the device, some elements after an aligned place."""
    room = torch.zeros(x.numel() + offset, dtype=x.dtype, device=DEVICE)
    room[offset:] = x.to(DEVICE)
    return room[offset:]


def same(one, other):
    """Equal bits, but for the bits of NaNs."""
    one, other = one.cpu().float(), other.cpu().float()
    known = ~one.isnan()
    assert torch.equal(known, ~other.isnan())
    assert torch.equal(one[known].view(torch.int32), other[known].view(torch.int32))


def fill(p, segments, x, wire, residual=None):
    """Scales of every segment into its wire, of any size; NaN where something is not finite."""
    for i, layout in enumerate(segments.layouts):
        there = segment_reference.wire_of(wire, segments, i)
        u = segment_reference.row_of(x, segments.starts[i], layout.numel).float()
        if residual is not None:
            u = u + segment_reference.held_of(residual, segments, i)
        cut = block_reference._cut(u, p.block, 0.0)
        scales = torch.rand(cut.shape[:2], generator=torch.Generator().manual_seed(i)) + 0.01
        scales = block_reference._poison(scales * u.nan_to_num(1, 1, 1).abs().mean(), ~cut.isfinite().all(-1))
        one = torch.ones(1, 1)
        if layout.extra_at < layout.nbytes - 4:
            block_reference._put(there, layout.extra_at, block_reference._as_bytes(one))
        block_reference._put(there, layout.scales_at, block_reference.store_scales(p, scales, one))


def numels_for(p):
    return NUMELS if p.block <= 4096 else (*NUMELS[:2], 17000, 40000)[: 4 if HAS_GPU else 3]


def check_encode(p, layout, step, dtype, feedback, offset):
    segments = segments_of([layout(numel) for numel in numels_for(p)], step)
    numel, nbytes = sizes(segments)
    x, wire = numbers(numel).to(dtype), buffer(nbytes)
    residual = numbers(numel, 1) if feedback else None
    if p.rule == FILLED:
        fill(p, segments, x, wire, residual)
    there, held = move(wire, 4 * offset), None if residual is None else move(residual, offset)
    segment_cuda.encode(p, move(x, offset), there, segments, DRAW, held)
    segment_reference.encode(p, x, wire, segments, DRAW, residual)
    assert torch.equal(there.cpu(), wire)
    if residual is not None:
        same(held, residual)


@BLOCK_CASES
def test_encoding(p, layout):
    index = CASES.index((p, layout))
    if HAS_GPU:
        every = itertools.product(STEPS, (False, True), (0, 1))
        for step, feedback, offset in every if index == 0 else ALIGNMENTS:
            check_encode(p, layout, step, torch.float32, feedback, offset)
    else:
        check_encode(p, layout, STEPS[index % 4], torch.float32, index % 2 == 0, index % 3)


def test_random_numbers_come_from_memory():
    """So that a program that was recorded draws anew at every replay, whatever the host said before."""
    p, layout = minmax(4, 128, STOCHASTIC)
    segments = segments_of([layout(numel) for numel in NUMELS[:3]], 4)
    numel, nbytes = sizes(segments)
    x, wire, words = numbers(numel), buffer(nbytes), None
    stale = Draw(1, 2, 3)
    for draw in (DRAW, Draw(2**64 - 1, 2**64 - 1, 2**32 - 1)):
        words = kernels.put_draw(draw, words, DEVICE) if HAS_GPU else put_draw_here(draw, words)
        there, expected = move(wire), wire.clone()
        segment_cuda.encode(p, move(x), there, segments, replace(stale, words=words), None)
        segment_reference.encode(p, x, expected, segments, draw, None)
        assert torch.equal(there.cpu(), expected)


def put_draw_here(draw, words):
    """As `kernels.put_draw`, which knows no GPU in Triton's interpreter."""
    words = torch.empty(segment_cuda.WORDS, dtype=torch.int32) if words is None else words
    segment_cuda.put_draw(draw, words)
    return words


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("codec", [CODECS[0], CODECS[1], CODECS[5], OneBit()], ids=lambda codec: codec.name)
def test_vectors_of_16_bits(codec, dtype):
    step = 8 if dtype == torch.bfloat16 else 1
    segments = segments_of([codec.layout(numel) for numel in NUMELS], step)
    numel, nbytes = sizes(segments)
    x, wire, out = numbers(numel).to(dtype), buffer(nbytes), torch.full((numel,), 7.0, dtype=dtype)
    there, result = move(wire), move(out, 3)
    if isinstance(codec, OneBit):
        segment_cuda.onebit_encode(move(x, 1), there, segments, "zero", None)
        segment_reference.onebit_encode(x, wire, segments, "zero", None)
        segment_cuda.onebit_decode(there, result, segments, 0.3, 1, 0)
        segment_reference.onebit_decode(wire, out, segments, 0.3, 1, 0)
    else:
        p = codec._params
        segment_cuda.encode(p, move(x, 1), there, segments, DRAW, None)
        segment_reference.encode(p, x, wire, segments, DRAW, None)
        segment_cuda.decode(p, there, result, segments, 0.3, 1, 0)
        segment_reference.decode(p, wire, out, segments, 0.3, 1, 0)
    assert torch.equal(there.cpu(), wire)
    same(result, out)


def wires_of(p, segments, count):
    """Wires of several ranks, one buffer after another, and bytes from one to the next."""
    numel, nbytes = sizes(segments)
    stride = nbytes + 4
    wires = buffer(count * stride)
    for k in range(count):
        wire = wires[k * stride : (k + 1) * stride]
        if p.rule == FILLED:
            fill(p, segments, numbers(numel, k), wire)
        segment_reference.encode(p, numbers(numel, k), wire, segments, DRAW, None)
    return wires, stride


def steps_of(index, count):
    """Steps, and whether there is feedback: all of them for the first codec, one of them for others."""
    if HAS_GPU and index == 0:
        return itertools.product(STEPS, (False, True))
    turn = index + COUNTS.index(count) if HAS_GPU else index
    return ((STEPS[turn % 4], turn % 2),)


@pytest.mark.parametrize("count", COUNTS)
@BLOCK_CASES
def test_decoding_and_reducing(p, layout, count):
    index = CASES.index((p, layout))
    for step, feedback in steps_of(index, count):
        segments = segments_of([layout(numel) for numel in numels_for(p)], step)
        numel = sizes(segments)[0]
        wires, stride = wires_of(p, segments, count)
        there = move(wires, 8)
        out = torch.full((numel,), 7.0)
        result = move(out, index % 2)
        segment_cuda.decode(p, there, result, segments, 0.3, count, stride)
        segment_reference.decode(p, wires, out, segments, 0.3, count, stride)
        same(result, out)
        residual, wire = numbers(numel, 9) if feedback else None, buffer(stride)
        if p.rule == FILLED:
            fill(p, segments, out, wire, residual)
        held, reduced = None if residual is None else move(residual, 1), move(wire, 12)
        segment_cuda.reduce(p, there, reduced, segments, 0.3, count, stride, DRAW, held)
        segment_reference.reduce(p, wires, wire, segments, 0.3, count, stride, DRAW, residual)
        assert torch.equal(reduced.cpu(), wire)
        if residual is not None:
            same(held, residual)


@pytest.mark.parametrize("count", COUNTS)
@pytest.mark.parametrize("codec", ONEBITS, ids=lambda codec: codec.name)
def test_one_bit(codec, count):
    cases = steps_of(ONEBITS.index(codec), count) if HAS_GPU else ((4, False), (1, True))
    for step, feedback in cases:
        segments = segments_of([codec.layout(numel) for numel in (*NUMELS, codec.block + 3)], step)
        numel, nbytes = sizes(segments)
        wires, there = buffer(count * nbytes), move(buffer(count * nbytes), 4)
        for k in range(count):
            x, residual = numbers(numel, k), numbers(numel, 9 - k) if feedback else None
            held, part = None if residual is None else move(residual), slice(k * nbytes, (k + 1) * nbytes)
            segment_cuda.onebit_encode(move(x), there[part], segments, codec.threshold, held)
            segment_reference.onebit_encode(x, wires[part], segments, codec.threshold, residual)
            if residual is not None:
                same(held, residual)
        assert torch.equal(there.cpu(), wires)
        check_signs(codec, segments, wires, there, count, feedback)


def check_signs(codec, segments, wires, there, count, feedback):
    numel, nbytes = sizes(segments)
    out = torch.full((numel,), 7.0)
    result = move(out)
    segment_cuda.onebit_decode(there, result, segments, 0.3, count, nbytes)
    segment_reference.onebit_decode(wires, out, segments, 0.3, count, nbytes)
    same(result, out)
    residual, wire = numbers(numel, 4) if feedback else None, buffer(nbytes)
    held, reduced = None if residual is None else move(residual), move(wire)
    rest = (segments, codec.threshold, 0.3, count, nbytes)
    segment_cuda.onebit_reduce(there, reduced, *rest, held)
    segment_reference.onebit_reduce(wires, wire, *rest, residual)
    assert torch.equal(reduced.cpu(), wire)
    if residual is not None:
        same(held, residual)


def test_one_bit_rows_reduce_as_segments():
    codec = OneBit(64)
    layout = codec.layout(1100)
    wires = torch.stack([codec.encode(numbers(2200, k).view(2, 1100)) for k in range(3)])
    out, expected = (torch.empty(2, layout.nbytes, dtype=torch.uint8) for _ in range(2))
    result = move(out.view(-1)).view(2, -1)
    block_cuda.onebit_reduce(wires.to(DEVICE), result, layout, "zero", 0.5)
    from thinwire.kernels import onebit_reference

    onebit_reference.reduce(wires, expected, layout, "zero", 0.5)
    assert torch.equal(result.cpu(), expected)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("feedback", [False, True])
def test_largest_magnitudes(dtype, feedback):
    segments = segments_of([SignLayout(n, 64, 64, -1, 0, 0) for n in (*NUMELS, 9000, 0)], 4)
    numel = sizes(segments)[0]
    x, residual = numbers(numel).to(dtype), numbers(numel, 1) if feedback else None
    held = None if residual is None else move(residual)
    maxima = segment_cuda.magnitudes(move(x), segments, held)
    assert torch.equal(maxima.cpu(), segment_reference.magnitudes(x, segments, residual))


def test_keys_are_those_of_streams():
    """The same bytes as rows whose key the stream gives."""
    codec = Block("int4", 64, "stochastic")
    p, layout, x = codec._params, codec.layout(1000), torch.randn(1000)
    segments = Segments((layout,), (0,), (0,), (0,), (77,), (2,))
    stream = Stream(DRAW.seed, DRAW.step, 77, DRAW.rank)
    expected = codec.encode(torch.stack([torch.zeros(1000), torch.zeros(1000), x]), stream)[2]
    wire = move(buffer(layout.nbytes))
    segment_cuda.encode(p, move(x), wire, segments, DRAW, None)
    assert torch.equal(wire.cpu(), expected)


def test_wires_with_another_tag_are_nan_and_segments_without_elements_have_a_tag():
    codec = Block("int8", 64)
    p = codec._params
    segments = segments_of([codec.layout(numel) for numel in (300, 0, 200)])
    numel, nbytes = sizes(segments)
    wire = move(buffer(nbytes))
    segment_cuda.encode(p, move(torch.ones(numel)), wire, segments, None, None)
    tag = wire[segments.wires[1] : segments.wires[1] + 4].cpu().view(torch.int32).item()
    assert tag == codec.tag(0)
    wire[segments.wires[2] + segments.layouts[2].nbytes - 1] ^= 1
    out = move(torch.zeros(numel))
    segment_cuda.decode(p, wire, out, segments, 1.0, 1, 0)
    assert not out[segments.starts[0] : segments.starts[0] + 300].isnan().any()
    assert out[segments.starts[2] : segments.starts[2] + 200].isnan().all()


def test_a_draw_is_written_with_all_its_bits():
    draw = Draw((1 << 63) + (1 << 31) + 5, (1 << 40) + (1 << 31) + 3, (1 << 31) + 7)
    words = move(torch.zeros(8, dtype=torch.int32))
    segment_cuda.put_draw(draw, words)
    found = [each % (1 << 32) for each in words.tolist()][:5]
    assert found == [(1 << 31) + 5, 1 << 31, (1 << 31) + 3, 1 << 8, (1 << 31) + 7]


KIND = (torch.float32, True, True, DEVICE)


def test_the_trial_tells_a_sound_program_from_one_that_mixes_up_scales(monkeypatch):
    p = Block("int8", 256)._params
    assert segment_selftest._try_encode(p, KIND, 4)
    assert segment_selftest._try_decode(p, (torch.float32, True, 2, DEVICE), 1)
    assert segment_selftest._try_reduce(p, (None, 2, DEVICE), 1)
    signs = selftest.sample_signs(64, 100, scaled=False)
    assert segment_selftest._try_signs(signs, KIND, 8)
    assert segment_selftest._try_unsigned(signs, (torch.float32, False, 2, DEVICE), 1)
    assert segment_selftest._try_resigned(signs, (True, 2, DEVICE), 1)
    right = segment_cuda.run_encode

    def wrong(ready, p, x, wire, segments, draw, residual):
        right(ready, p, x, wire, segments, draw, residual)
        at = segments.wires[0] + segments.layouts[0].scales_at
        wire[at : at + 8] = wire[at : at + 8].clone().roll(4)  # two blocks trade scales

    monkeypatch.setattr(segment_cuda, "run_encode", wrong)
    assert not segment_selftest._try_encode(p, KIND, 4)


@needs_gpu
def test_a_compiled_program_is_called_directly():
    codec = Block("int8", 256)
    segments = segments_of([codec.layout(numel) for numel in NUMELS], 4)
    numel, nbytes = sizes(segments)
    x, wire = move(numbers(numel)), move(buffer(nbytes))
    for _ in range(3):
        segment_cuda.encode(codec._params, x, wire, segments, None, None)
    ready = segments.known["encode", codec._params, (torch.float32, True, None, x.device)]
    assert ready.compiled is not None
    expected = buffer(nbytes)
    segment_reference.encode(codec._params, x.cpu(), expected, segments, None, None)
    assert torch.equal(wire.cpu(), expected)


@needs_gpu
def test_more_elements_than_32_bits_count():
    codec = Block("int8", 256)
    layouts = [codec.layout(numel) for numel in ((1 << 31) + 1536, 700)]
    segments = Segments(tuple(layouts), (0, (1 << 31) + 1544), (0, layouts[0].nbytes), (0, 0), (0, 0), (0, 0))
    x = torch.zeros((1 << 31) + 4096, dtype=torch.bfloat16, device=DEVICE)
    x[(1 << 31) - 512 :] = torch.randn(4608, device=DEVICE).to(torch.bfloat16)
    wire = torch.empty(layouts[0].nbytes + layouts[1].nbytes, dtype=torch.uint8, device=DEVICE)
    segment_cuda.encode(codec._params, x, wire, segments, None, None)
    out = torch.empty_like(x)
    segment_cuda.decode(codec._params, wire, out, segments, 1.0, 1, 0)
    tail = x[(1 << 31) - 512 : (1 << 31) + 1536].float().cpu()
    expected = codec.decode(codec.encode(tail), 2048).to(torch.bfloat16)
    assert torch.equal(out[(1 << 31) - 512 : (1 << 31) + 1536].cpu(), expected)
    last = x[(1 << 31) + 1544 : (1 << 31) + 2244].float().cpu()
    assert torch.equal(wire[layouts[0].nbytes :].cpu(), codec.encode(last))
