"""The GPU kernels of block codecs equal the reference: every byte of a wire, every decoded bit.

On a machine with a GPU they run there. Without one, Triton's interpreter runs the same programs on the
CPU, with fewer sizes, since it is slow; the parts that need the real thing are skipped. On a GPU it is
compiling that takes long: formats, blocks and roundings meet in pairs there, not all with all.
"""

# ruff: noqa: E402 (the environment must be set before Triton is imported)

import os

import pytest
import torch

HAS_GPU = torch.cuda.is_available()
if not HAS_GPU:
    os.environ["TRITON_INTERPRET"] = "1"  # read when Triton is first imported
pytest.importorskip("triton", reason="Triton is not installed")

import triton
import triton.language as tl

from thinwire import Stream
from thinwire.codecs.block import Block
from thinwire.codecs.onebit import OneBit
from thinwire.formats import Float
from thinwire.kernels import (
    block_cuda,
    block_reference,
    onebit_reference,
    reference,
    selftest,
    tile_triton,
)
from thinwire.kernels.params import (
    FILLED,
    MINMAX,
    NEAREST,
    STOCHASTIC,
    BlockParams,
    GridParams,
    WireLayout,
    packed_nbytes,
)
from thinwire.scaling import Scaling

DEVICE = torch.device("cuda" if HAS_GPU else "cpu")
KEY = Stream(seed=9, step=1, tensor="weights", rank=3).key
GUARD = 0xA5  # what memory around a wire holds
SIZES = (1, 5, 63, 64, 65, 1000, 1024, 2064, 4097)
NEAR = ("nearest", "stochastic")
WAYS_BACK = ((False, 0.7), (True, -0.3))  # whether a decoded wire is added to what is there, and its weight
needs_gpu = pytest.mark.skipif(not HAS_GPU, reason="needs a CUDA device")


@pytest.fixture(autouse=True)
def _no_device_switch(monkeypatch):
    if not HAS_GPU:
        monkeypatch.setattr(torch.cuda, "current_device", lambda: None)


def sizes(index):
    """All of them on a GPU; two in the interpreter, others for every case."""
    return SIZES if HAS_GPU else (SIZES[index % 6], SIZES[5 + index % 3])


def numbers(numel, seed=0):
    """Three rows: one with NaN and infinities, one from zeros and subnormals to huge, and a plain one."""
    generator = torch.Generator().manual_seed(1000 * numel + seed)
    x = torch.randn(3, numel, generator=generator)
    x *= torch.exp(4 * torch.randn(3, 1, generator=generator))
    x[0, 130:133] = -0.0
    x[0, 3:4] = torch.nan
    x[0, 64:65] = torch.inf
    x[0, 1050:1051] = -torch.inf
    x[1, 64:160] = 0.0
    x[1, 160:288] *= 1e-40
    x[1, 288:512] *= 1e-38
    x[1, 768:900] *= 1e35
    x[1, 900:901] = -1e38
    return x


def move(x):
    """A copy on the device, which may be this one."""
    return x.to(DEVICE, copy=True)


def same(one, other):
    """Equal bits, but for the bits of NaNs."""
    one, other = one.cpu(), other.cpu()
    known = ~one.isnan()
    assert torch.equal(known, ~other.isnan())
    assert torch.equal(one[known].view(torch.int32), other[known].view(torch.int32))


def blank(rows, nbytes, shift=0):
    """Wires inside a buffer whose other bytes must not change, `shift` words after its alignment."""
    buffer = torch.full((rows * nbytes + 64,), GUARD, dtype=torch.uint8)
    return buffer, slice(16 + 4 * shift, 16 + 4 * shift + rows * nbytes)


def ways_back(index):
    """On a GPU one of them, since both are compiled."""
    return WAYS_BACK[index % 2 :][:1] if HAS_GPU else WAYS_BACK


def by_rows(index, numel):
    """Whether to take rows one by one on a GPU: they are aligned then, and need no more compilations."""
    return HAS_GPU and numel % 16 and index % 8


def encoded(p, x, layout, residual=None, shift=0, fill=None, aligned=True):
    """The reference's wires and residual; the kernel's are compared with them."""
    rows = x.shape[0]
    key = KEY if p.mode == STOCHASTIC else None
    buffer, inside = blank(rows, layout.nbytes, shift)
    expected = buffer[inside].view(rows, -1)
    if fill is not None:
        fill(x if residual is None else x.float() + residual, expected)
    there = move(buffer)
    left = None if residual is None else residual.clone()
    block_reference.encode(p, x, expected, layout, key, left)
    held = None if residual is None else move(residual)
    block_cuda.encode(p, selftest.placed(x, aligned, DEVICE), there[inside].view(rows, -1), layout, key, held)
    assert torch.equal(there.cpu(), buffer)
    if residual is not None:
        same(held, left)
    return expected.clone(), there[inside].view(rows, -1)


def check(p, layout, numel, index, fill=None):
    """Encode with a residual, decode, and add."""
    x, residual = numbers(numel, index), numbers(numel, index + 1).roll(7, 1)
    for rows in range(3) if by_rows(index, numel) else (slice(3),):
        check_rows(p, layout, x[rows].view(-1, numel), residual[rows].view(-1, numel), index, fill)


def check_rows(p, layout, x, residual, index, fill):
    shift = index % 4 if not HAS_GPU or index % 3 == 0 else 0  # a wire out of line is compiled for anew
    expected, wire = encoded(p, x, layout, residual, shift, fill)
    for add, weight in ways_back(index):
        out, there = torch.ones(x.shape), torch.ones(x.shape, device=DEVICE)
        block_cuda.decode(p, wire, there, layout, weight, add=add)
        values = block_reference.decode(p, expected, layout, weight)
        same(there, out + values if add else values)


def check_codec(codec, index, numels):
    p = codec._params
    for numel in numels:
        layout = codec.layout(numel)
        fill = (
            (lambda u, wire, layout=layout: codec._fill(u, wire, layout, None)) if p.rule == FILLED else None
        )
        check(p, layout, numel, index, fill)


FORMATS = (
    "int8", "int4", "int2", "int16", "float8_e4m3fn", "float8_e5m2", "float6_e2m3fn", "float4_e2m1fn", "nf4",
    "dynamic_tree", "uniform8s", "posit8_1", "sign", "fixed2.6", "bfloat16", "posit16_1",
)  # fmt: skip
BLOCKS = (16, 32, 64, 128, 256, 512, None)
BY_FORMAT = [(f, BLOCKS[(3 * i + j) % 7], NEAR[j]) for i, f in enumerate(FORMATS) for j in range(2)]
#: Formats whose programs are those of others but for a number, or occur below: the rounding tried on a GPU
ALIKE = {
    "int8": "stochastic", "int4": "nearest", "float8_e5m2": "nearest", "float4_e2m1fn": "stochastic",
    "nf4": "nearest", "dynamic_tree": "nearest", "uniform8s": "stochastic", "bfloat16": "stochastic",
    "posit16_1": "nearest",
}  # fmt: skip


@pytest.mark.parametrize(
    ("format", "block", "rounding"),
    [case for case in BY_FORMAT if not HAS_GPU or ALIKE.get(case[0], case[2]) == case[2]],
)
def test_formats_of_every_family(format, block, rounding):
    index = BY_FORMAT.index((format, block, rounding))
    check_codec(Block(format, block, rounding), index, sizes(index))


LENGTHS = (16, 32, 64, 128, 256, 512, 2048, 4096, 8192, 16384, None)
BY_BLOCK = [
    (format, block, rounding)
    for i, block in enumerate(LENGTHS if HAS_GPU else (16, 128, 256, 2048, None))
    for j, (format, rounding) in enumerate((("int8", "nearest"), ("int4", "stochastic")))
    if not HAS_GPU or block in (16, 8192, None) or i % 2 == j
]


@pytest.mark.parametrize(("format", "block", "rounding"), BY_BLOCK)
def test_blocks_from_16_to_all_of_a_row(format, block, rounding):
    index = 1 + BY_BLOCK.index((format, block, rounding))
    check_codec(Block(format, block, rounding), index, (*SIZES, 20000) if HAS_GPU else (2064,))


OTHERS = [
    Block("float4_e2m1fn", 32, scaling=Scaling("floor", store="e8m0")),
    Block("float8_e4m3fn", 2048, scaling=Scaling("pow2", store="e8m0")),
    Block("int8", 16, "stochastic", scaling=Scaling("pow2")),
    Block("int8", 64, scaling=Scaling("pow2", store="bfloat16")),
    Block("int4", 1024, "stochastic", scaling=Scaling("absmax", store="bfloat16")),
    Block("float4_e2m1fn", 16, scaling=Scaling("absmax", store="e4m3")),
    Block("int8", None, scaling=Scaling("fixed", -3.0)),
    Block("float8_e5m2", 128, "stochastic", scaling=Scaling("l2")),
    Block("int8", 64, "away"),
    Block("int4", 32, "zero"),
    Block("int8", 32, "up"),
    Block("float8_e4m3fn", 64, "down"),
    Block("float8_e4m3fnuz", 64),
    Block(Float(5, 2, subnormals=False), 64),
    Block(Float(6, 5), 64, "stochastic"),  # 12 bits: a byte and a half
]


@pytest.mark.parametrize("index", range(len(OTHERS)))
def test_rules_stores_and_roundings(index):
    check_codec(OTHERS[index], index, SIZES if HAS_GPU else (1000,))


BETWEEN = [
    (bits, block, mode)
    for i, (bits, block) in enumerate([(8, 64), (4, 128), (3, 16), (1, 256)])
    for j, mode in enumerate((NEAREST, STOCHASTIC))
    if not HAS_GPU or bits == 3 or i % 2 == j
]


@pytest.mark.parametrize(("bits", "block", "mode"), BETWEEN)
def test_scales_between_minimum_and_maximum(bits, block, mode):
    p = BlockParams(GridParams(bits, 0, 0, 2**bits - 1), mode, block, MINMAX, 2.0**bits - 1.0)
    for numel in SIZES if HAS_GPU else (65, 1000):
        codes, blocks = packed_nbytes(numel, bits), p.blocks(numel)
        layout = WireLayout(numel, codes + 8 * blocks + 4, codes, codes + 4 * blocks, 0x80000007)
        check(p, layout, numel, 2 + BETWEEN.index((bits, block, mode)))


INPUTS = [
    (codec, dtype)
    for i, codec in enumerate(
        (Block("int8", 256), Block("int4", 64, "stochastic"), Block("float8_e4m3fn", 128))
    )
    for j, dtype in enumerate((torch.float32, torch.bfloat16, torch.float16))
    if not HAS_GPU or i == 0 or i == j
]


@pytest.mark.parametrize(("codec", "dtype"), INPUTS, ids=str)
def test_inputs_of_16_bits_and_unaligned_ones(codec, dtype):
    for numel in (1000, 1024, 2064) if HAS_GPU else (1100,):
        encoded(codec._params, numbers(numel).to(dtype), codec.layout(numel))
        row = numbers(numel).to(dtype)[1:2]
        encoded(codec._params, row, codec.layout(numel), numbers(numel, 3)[1:2], aligned=False)


REDUCED = [
    Block("int8", 256),
    Block("int4", 128, "stochastic"),
    Block("float8_e4m3fn", 32, scaling=Scaling("pow2", store="e8m0")),
    Block("nf4", 64),
    Block("int8", 16384),
]


@pytest.mark.parametrize(
    ("codec", "count"),
    [
        (codec, n)
        for codec in REDUCED
        for n in (1, 3, 8, 9)
        if not HAS_GPU or codec == REDUCED[0] or n in (3, 9)
    ],
    ids=str,
)
def test_reduce_adds_in_order_and_encodes(codec, count):
    p = codec._params
    key = KEY if codec.needs_rng else None
    for numel in SIZES if HAS_GPU else (1100,):
        layout = codec.layout(numel)
        wires = torch.empty((count, 3, layout.nbytes), dtype=torch.uint8)
        for k in range(count):
            block_reference.encode(p, numbers(numel, k), wires[k], layout, key)
        buffer, inside = blank(3, layout.nbytes, 3 if count == 9 else 0)
        there = move(buffer)
        block_reference.reduce(p, wires, buffer[inside].view(3, -1), layout, 1 / 3, key)
        block_cuda.reduce(p, wires.to(DEVICE), there[inside].view(3, -1), layout, 1 / 3, key)
        assert torch.equal(there.cpu(), buffer)


@pytest.mark.parametrize("name", ["float8_e4m3fn", "float8_e5m2", "float8_e4m3fnuz", "int8", "dynamic_tree"])
def test_every_code_decodes_alike(name):
    codec = Block(name, 16)
    layout = codec.layout(256)
    wire = torch.empty((1, layout.nbytes), dtype=torch.uint8)
    block_reference.encode(codec._params, torch.ones(1, 256), wire, layout)
    wire[0, :256] = torch.arange(256).to(torch.uint8)
    out = torch.empty((1, 256), device=DEVICE)
    block_cuda.decode(codec._params, wire.to(DEVICE), out, layout, 1.0, add=False)
    same(out, block_reference.decode(codec._params, wire, layout))


@pytest.mark.parametrize("add", [False, True])
def test_a_row_with_another_tag_is_nan(add):
    codec, other = Block("int8", 64), OneBit()
    x = torch.randn(2, 300)
    _, wire = encoded(codec._params, x, codec.layout(300))
    wire[1, -1] ^= 1
    out = torch.zeros((2, 300), device=DEVICE)
    block_cuda.decode(codec._params, wire, out, codec.layout(300), 1.0, add=add)
    assert not out[0].isnan().any()
    assert out[1].isnan().all()
    reduced = torch.empty((2, wire.shape[1]), dtype=torch.uint8, device=DEVICE)
    block_cuda.reduce(codec._params, wire[None], reduced, codec.layout(300), 1.0, None)
    again = block_reference.decode(codec._params, reduced.cpu(), codec.layout(300))
    assert not again[0].isnan().any()
    assert again[1].isnan().all()
    layout = other.layout(300)
    wire = torch.empty((2, layout.nbytes), dtype=torch.uint8, device=DEVICE)
    block_cuda.onebit_encode(x.to(DEVICE), wire, layout, "zero", None)
    wire[0, -4] ^= 8
    out = torch.zeros((2, 300), device=DEVICE)
    block_cuda.onebit_decode(wire, out, layout, 1.0, add=add)
    assert out[0].isnan().all()
    assert not out[1].isnan().any()


THRESHOLDS = ["zero", "sign", "mean"]
SIGN_BLOCKS = [64, 128, 2048, 8192, 16384] if HAS_GPU else [64, 128, 2048]


@pytest.mark.parametrize("threshold", THRESHOLDS)
@pytest.mark.parametrize("block", SIGN_BLOCKS)
def test_one_bit(block, threshold):
    codec = OneBit(block, threshold)
    for index, numel in enumerate((*SIZES, 20000) if HAS_GPU else (65, 2064)):
        layout = codec.layout(numel)
        x, residual = numbers(numel), numbers(numel, 1).roll(9, 1)
        x[2, :64] = torch.finfo(torch.float32).max
        x[1, 960:1024] = 2.0**-130
        for rows in range(3) if by_rows(SIGN_BLOCKS.index(block), numel) else (slice(3),):
            one, left = x[rows].view(-1, numel), residual[rows].view(-1, numel)
            check_onebit(layout, threshold, one, left, index % 4)
            if not HAS_GPU or numel % 16 == 0:
                check_onebit(layout, threshold, one.bfloat16(), None, index % 4)


def check_onebit(layout, threshold, x, residual, shift):
    count = len(x)
    buffer, inside = blank(count, layout.nbytes, shift)
    there = move(buffer)
    expected, wire = buffer[inside].view(count, -1), there[inside].view(count, -1)
    left = None if residual is None else residual.clone()
    held = None if residual is None else move(residual)
    onebit_reference.encode(x, expected, layout, threshold, left)
    block_cuda.onebit_encode(x.to(DEVICE), wire, layout, threshold, held)
    assert torch.equal(there.cpu(), buffer)
    if residual is not None:
        same(held, left)
    for add, weight in ways_back(SIGN_BLOCKS.index(layout.block) + THRESHOLDS.index(threshold)):
        out, result = torch.ones(x.shape), torch.ones(x.shape, device=DEVICE)
        values = onebit_reference.decode(expected, layout, weight)
        block_cuda.onebit_decode(wire, result, layout, weight, add=add)
        same(result, out + values if add else values)


@pytest.mark.parametrize("block", [16, 512, 4096, 16384, 30000])
def test_largest_magnitudes(block):
    x = numbers(30000 if block > 4096 else 5000)
    padded = torch.nn.functional.pad(x, (0, -x.shape[1] % block)).view(3, -1, block)
    expected = (padded.view(torch.int32) & 0x7FFFFFFF).amax(-1)
    assert torch.equal(block_cuda.magnitudes(x.to(DEVICE), block).cpu(), expected)
    assert block_cuda.magnitudes(x[:, :0].to(DEVICE), 1).shape == (3, 0)


@triton.jit(do_not_specialize=["row", "numel", "k0", "k1", "k2", "k3"])
def words_kernel(u, out, row, numel, k0, k1, k2, k3, C: tl.constexpr, L: tl.constexpr):  # noqa: N803
    at = tile_triton._offsets(L)
    key = (row.to(tl.int64), k0, k1, k2, k3)
    words = tile_triton._words(tl.load(u + at), row.to(tl.int64) * 0 + 1024, numel.to(tl.int64), key, C, L)
    tl.store(out + at, words.to(tl.int32, bitcast=True))


@pytest.mark.parametrize("width", [8, 16, 32])
@pytest.mark.parametrize("row", [0, 5, 1 << 34, -3 * pow(33, -1, 1 << 25) % (1 << 25)])
def test_words_are_those_of_the_stream(row, width):
    """Also where the lower half of a call's number overflows in the middle of the tile."""
    numel = 33 * 512
    u, out = torch.randn(1024, device=DEVICE), torch.empty(1024, dtype=torch.int32, device=DEVICE)
    signed = [word - (word >> 31 << 32) for word in KEY]
    constants = {"C": (0, (), STOCHASTIC, 0, 0, False, 0, 8, False), "L": (64 // width, width, 4, 1024, 0, 1)}
    words_kernel[(1,)](u, out, row, numel, *signed, **constants, num_warps=1)
    first = row * (-(-numel // 512)) * 128 + 256
    words = reference.philox(torch.arange(first, first + 256), KEY)
    expected = torch.stack([word.view(2, 128) for word in words], dim=1).flatten()
    assert torch.equal(out.cpu(), expected.to(torch.int32))


@pytest.mark.parametrize("codec", [Block("int8", 256, "stochastic"), Block("int4", 128)], ids=str)
def test_more_elements_than_32_bits_count(codec, monkeypatch):
    """In the interpreter with fewer."""
    numel = (1 << 32 if HAS_GPU else 1 << 12) + 1536
    p, layout = codec._params, codec.layout(numel)
    x = torch.zeros((1, numel), dtype=torch.bfloat16, device=DEVICE)
    x[:, -2048:] = torch.randn(2048, device=DEVICE).to(torch.bfloat16)
    wire = torch.empty((1, layout.nbytes), dtype=torch.uint8, device=DEVICE)
    key = KEY if codec.needs_rng else None
    block_cuda.encode(p, x, wire, layout, key, None)
    start = numel - 2048
    tail = codec.layout(2048)
    expected = torch.empty((1, tail.nbytes), dtype=torch.uint8)
    if key:
        words = reference.philox(torch.arange(start // 4, start // 4 + 512), key)
        words = torch.stack([word.view(4, 128) for word in words], dim=1).flatten()
        late = words.to(torch.int32).view(torch.uint32)
        monkeypatch.setattr(block_reference, "_row_words", lambda *_: late)
    block_reference.encode(p, x[:, start:].float().cpu(), expected, tail, key)
    nbytes = tail.scales_at
    assert torch.equal(wire[:, layout.scales_at - nbytes : layout.scales_at].cpu(), expected[:, :nbytes])
    scales = 2048 // codec.block * 4
    assert torch.equal(wire[:, -4 - scales : -4].cpu(), expected[:, nbytes : nbytes + scales])
    out = torch.empty((1, numel), device=DEVICE)
    block_cuda.decode(p, wire, out, layout, 1.0, add=False)
    same(out[:, start:], block_reference.decode(p, expected, tail))
    assert not out[:, : min(start, 1 << 20)].any()


@pytest.mark.parametrize("rows", [5, pytest.param(70000, marks=needs_gpu)])
def test_more_rows_than_a_grid_dimension(rows, monkeypatch):
    monkeypatch.setattr(block_cuda, "GRID_ROWS", min(rows // 2, block_cuda.GRID_ROWS))
    codec = Block("int8", 16, "stochastic")
    encoded(codec._params, torch.randn(rows, 20), codec.layout(20))


@needs_gpu
@pytest.mark.parametrize("spec", [Block("int8", 256), Block("nf4", 64, "stochastic"), OneBit()], ids=str)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_public_calls_agree_with_the_cpu(spec, dtype):
    rng = Stream(seed=1, step=0, tensor="x", rank=0) if spec.needs_rng else None
    x = torch.randn(3, 5, 1001).to(dtype)
    wire = spec.encode(x, rng)
    there = spec.encode(x.cuda(), rng)
    assert torch.equal(there.cpu(), wire)
    assert torch.equal(spec.decode(there, 1001).cpu(), spec.decode(wire, 1001))


VARIANTS = [
    selftest.Variant(DEVICE, torch.float32, rows_aligned=True, aligned=True, residual_aligned=None),
    selftest.Variant(DEVICE, torch.float32, rows_aligned=False, aligned=False, residual_aligned=True),
]


@pytest.mark.parametrize("variant", VARIANTS, ids=["plain", "unaligned with residual"])
def test_the_trial_tells_a_sound_program_from_one_that_mixes_up_scales(variant, monkeypatch):
    p = Block("int8", 256)._params
    assert selftest._try_encode(p, variant)
    right = block_cuda._encode

    def wrong(p, x, wire, layout, key, residual):
        right(p, x, wire, layout, key, residual)
        scales = wire[:, layout.scales_at : layout.scales_at + 8].clone()
        wire[:, layout.scales_at : layout.scales_at + 8] = scales.roll(4, 1)  # two blocks trade scales

    monkeypatch.setattr(block_cuda, "_encode", wrong)
    assert not selftest._try_encode(p, variant)
