"""Matrix products on the GPU equal those of the CPU bit for bit: formats, orders, multiplications, batches.

On a machine with a GPU they run there. Without one, Triton's interpreter runs a few small cases of the same
programs on the CPU; the parts that need the real thing are skipped. On a GPU it is compiling that takes
long: formats, orders and multiplications meet in pairs there, not all with all.
"""

# ruff: noqa: E402 (the environment must be set before Triton is imported)

import os
import subprocess
import sys

import pytest
import torch

HAS_GPU = torch.cuda.is_available()
if not HAS_GPU:
    os.environ["TRITON_INTERPRET"] = "1"  # read when Triton is first imported
pytest.importorskip("triton", reason="Triton is not installed")

from thinwire import Rounding, Stream, formats, simulate
from thinwire.kernels import gemm_cpu, gemm_cuda, gemm_exact, gemm_general, gemm_quire, gemm_reference
from thinwire.kernels.gemm_params import CHUNKED, KAHAN, PAIRWISE, SEQUENTIAL, GemmParams, quick
from thinwire.kernels.params import STOCHASTIC
from thinwire.simulate import Arithmetic

DEVICE = torch.device("cuda" if HAS_GPU else "cpu")
NAN, INF = float("nan"), float("inf")
ORDERS = {
    "sequential": (SEQUENTIAL, 0),
    "chunked": (CHUNKED, 5),
    "pairwise": (PAIRWISE, 0),
    "kahan": (KAHAN, 0),
}
PAIRS = [
    ("e5m2", "e5m2"),
    ("float8_e4m3fn", "bfloat16"),
    ("float8_e4m3fnuz", "e5m10"),
    ("bfloat16", "bfloat16"),
    ("int8", "fixed4.6"),
    (None, "e4m3"),
    ("tf32", None),
    ("posit8_2", "posit8_2"),
    ("nf4", "posit16_1"),
    (None, None),
]
OFFSETS = (None, 0, 1 << 19)
CASES = [
    (pair, order, OFFSETS[(i + j) % 3]) for i, pair in enumerate(PAIRS) for j, order in enumerate(ORDERS)
]
ODD = (
    "sign",
    "float8_e8m0fnu",
    "linear_legacy",
)  # zero is no number of theirs, or rounding twice is not once
if not HAS_GPU:  # the interpreter is slow: every way and order once
    CASES = [
        (("e5m2", "bfloat16"), "sequential", None),
        (("float8_e4m3fnuz", None), "chunked", 1 << 19),
        ((None, "fixed4.6"), "kahan", None),
        (("bfloat16", "e4m3"), "pairwise", None),
        (("posit8_2", "posit16_1"), "sequential", None),
        (("nf4", None), "pairwise", None),
    ]
SHAPES = [(1, 1, 1), (3, 16, 5), (33, 37, 70), (64, 131, 128), (2, 300, 65)] if HAS_GPU else [(3, 35, 5)]
needs_gpu = pytest.mark.skipif(not HAS_GPU, reason="needs a CUDA device")


@pytest.fixture(autouse=True)
def _no_device_switch(monkeypatch):
    if not HAS_GPU:
        monkeypatch.setattr(torch.cuda, "current_device", lambda: None)
        monkeypatch.setattr(gemm_cuda, "_processors", lambda _device: 1)


def operands(rows, steps, columns, batch=2, seed=0):
    """Numbers of many sizes; zeros of both signs, subnormals, overflow, infinities and NaN here and there."""
    random = torch.Generator().manual_seed(seed)
    pool = torch.tensor([0.0, -0.0, 1.0, 1e-40, -1e-45, 448.0, 464.0, 61440.0, -65520.0, 3e38, 0.3, INF, NAN])

    def one(*shape):
        sizes = 2.0 ** torch.randint(-12, 4, shape, generator=random)
        x = torch.randn(shape, generator=random) * sizes
        chosen = pool[torch.randint(len(pool), shape, generator=random)]
        common = torch.rand(shape, generator=random)
        return torch.where(common < 1 / steps, chosen, x)

    return one(batch, rows, steps), one(batch, steps, columns)


def prepared(name, mode=0):
    return None if name is None else formats.get(name)._prepared(mode)


def assert_same(actual, wanted):
    assert torch.equal(actual.cpu().view(torch.int32), wanted.view(torch.int32))


def assert_definition(p, a, b, key=None):
    shape = a.shape[0], a.shape[1], b.shape[2]
    wanted, product = torch.empty(shape), torch.empty(shape, device=DEVICE)
    gemm_reference.gemm(p, a, b, wanted, key)
    gemm_cuda.gemm(p, a.to(DEVICE), b.to(DEVICE), product, key)
    assert_same(product, wanted)


def shapes(all_of_them, long=True):
    """Or fewer, as sizes of 1, multiples of 16 and steps that programs share are compiled for anew."""
    if all_of_them or not HAS_GPU:
        return SHAPES
    return SHAPES[1:3] + SHAPES[4:] if long else SHAPES[1:3]


@pytest.mark.parametrize(("pair", "order", "offset"), CASES, ids=str)
def test_programs_equal_the_definition_bit_for_bit(pair, order, offset):
    p = GemmParams(prepared(pair[0]), prepared(pair[1]), 0, *ORDERS[order], offset)
    assert p.quick is not None
    for shape in shapes(pair == PAIRS[0], order != "chunked"):
        assert_definition(p, *operands(*shape))


QUICK = [each for each in formats.FORMATS.values() if quick(each._prepared(0), 0)]


@pytest.mark.parametrize(
    "format", QUICK if HAS_GPU else [formats.get(name) for name in ODD], ids=lambda each: each.name
)
def test_quick_rounding_is_the_formats_own(format, probes):
    x = probes(format)[None] if HAS_GPU else probes(format)[None, ::997]
    p = GemmParams(None, format._prepared(0), 0, PAIRWISE)
    rounded = torch.empty(1, *x.shape, device=DEVICE)
    gemm_cuda.gemm(p, torch.ones(1, 1, 1, device=DEVICE), x[None].to(DEVICE), rounded)
    assert_same(rounded[0], format.round(x))


@pytest.mark.parametrize("name", [*ODD, "dynamic_tree_legacy"] if HAS_GPU else ODD)
def test_odd_ones_pass_up_as_they_are(name):
    """Pairwise sums of all lengths, in formats where adding a sum of nothing would show."""
    for steps in range(1, 40) if HAS_GPU else (1, 3, 21):
        p = GemmParams(None, prepared(name), 0, PAIRWISE)
        assert_definition(p, *operands(2, steps, 5, seed=steps))


RANDOM = [
    (("e4m3", "bfloat16"), None),  # floats
    (("float8_e4m3fnuz", "float8_e4m3fnuz"), 1 << 19),  # without -0
    (("e3m0", "tf32"), None),  # the general way
    (("int8", "fixed4.6"), None),
    (("posit8_1", "nf4"), 0),
    (("posit16_1", None), None),
    ((None, "sign"), None),
]


RANDOM_ORDERS = [
    (pair, offset, order)
    for i, (pair, offset) in enumerate(RANDOM if HAS_GPU else RANDOM[:2])
    for j, order in enumerate(ORDERS)
    if not HAS_GPU or (i + j) % 2 == 0
]


@pytest.mark.parametrize(("pair", "offset", "order"), RANDOM_ORDERS, ids=str)
def test_random_roundings_draw_the_words_of_the_definition(pair, offset, order):
    p = GemmParams(
        *(name and prepared(name, STOCHASTIC) for name in pair), STOCHASTIC, *ORDERS[order], offset
    )
    assert p.quick is None
    key = Stream(seed=9, step=4).key
    for shape in [(1, 1, 1), (3, 16, 5), (33, 37, 70)] if HAS_GPU else [(2, 5, 3)]:
        assert_definition(p, *operands(*shape), key)


@pytest.mark.parametrize("numel", [511, 513, 2000] if HAS_GPU else [513])
def test_random_words_belong_to_places_in_memory(numel):
    """More results than share a call of the generator, in rows of any length and in batches."""
    key = Stream(seed=1).key
    p = GemmParams(prepared("e4m3", STOCHASTIC), prepared("e5m2", STOCHASTIC), STOCHASTIC, SEQUENTIAL)
    for batch, rows in ((1, 1), (3, 1), (1, 3)) if HAS_GPU else ((1, 1),):
        assert_definition(p, *operands(rows, 3, numel, batch), key)


@pytest.mark.parametrize("chunk", [1, 3, 8, 20])
def test_chunks_rounded_at_random_side_by_side(chunk, monkeypatch):
    monkeypatch.setattr(gemm_cuda, "_processors", lambda _device: 8)
    p = GemmParams(None, prepared("e4m3", STOCHASTIC), STOCHASTIC, CHUNKED, chunk)
    assert_definition(p, *operands(2, 8, 3), Stream(seed=2).key)


def test_pairs_rounded_at_random_take_turns_where_room_is_short(monkeypatch):
    monkeypatch.setattr(gemm_general, "ROOM", 1)
    p = GemmParams(None, prepared("e4m3", STOCHASTIC), STOCHASTIC, PAIRWISE)
    assert_definition(p, *operands(1, 5, 600), Stream(seed=2).key)


COMPILED = """
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
from thinwire.kernels.gemm_general_triton import NONE, steps_kernel

constants = {"PRODUCT": (NONE, 0), "SUM": (NONE, 0), "MODE": 0, "MOGAMI": False, "KAHAN": True}
constants |= {"CHUNKED": False, "PARTS": False}
types = dict.fromkeys(steps_kernel.arg_names, "i32") | dict.fromkeys(constants, "constexpr")
types |= dict.fromkeys("abc", "*fp32") | {way + number: "*i32" for way in "ps" for number in "01234"}
program = triton.compile(ASTSource(steps_kernel, types, constants), target=GPUTarget("cuda", 90, 32))
print(program.asm["ttir"])
"""


@pytest.mark.skipif(HAS_GPU, reason="a GPU shows it in its results")
def test_kahans_loop_carries_what_it_changes(tmp_path):
    """The compiler's reading of a step's four roundings, which the interpreter does not share.

    A result, a term and a sum go from one to the next, each as four tensors; what is not carried does not
    change.
    """
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    environment["TRITON_CACHE_DIR"] = str(tmp_path)
    command = [sys.executable, "-W", "ignore", "-c", COMPILED]
    run = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert run.returncode == 0, run.stderr
    loops = [line for line in run.stdout.splitlines() if "scf.for" in line]
    assert len(loops) == 3  # chunks, steps, roundings
    assert loops[-1].split("->")[1].count("tensor<128xf32>") == 12


def every_mode():
    """Formats and modes without a quick way."""
    for format in formats.FORMATS.values():
        for mode, name in enumerate(Rounding):
            if name in format.roundings and not quick(format._prepared(mode), mode):
                yield pytest.param(format, mode, id=f"{format.name}-{name}")


@needs_gpu
@pytest.mark.parametrize(("format", "mode"), list(every_mode()))
def test_general_rounding_is_the_formats_own(format, mode, probes):
    key = Stream(seed=3).key if mode == STOCHASTIC else None
    p = GemmParams(format._prepared(mode), None, mode, PAIRWISE)
    assert_definition(p, torch.ones(1, 1, 1), probes(format)[None, None], key)


#: Every order with every format and every rounding, every format with every rounding
PUBLIC = [
    (order, name, ("up", "stochastic", "nearest")[(i + j) % 3])
    for i, order in enumerate(("sequential", "chunked/7", "pairwise", "kahan", "fp32", "exact"))
    for j, name in enumerate(("e4m3", "posit8_1", "e3m0", "nf4"))
]


@needs_gpu
@pytest.mark.parametrize(("order", "name", "rounding"), PUBLIC)
def test_public_calls_agree_with_the_cpu(order, name, rounding):
    total = None if order == "fp32" else name
    how = Arithmetic(None if order == "exact" else name, total, order, rounding=rounding)
    rng = Stream(seed=4, step=1) if rounding == "stochastic" else None
    a, b = operands(5, 40, 9, batch=3)
    there, other = a.to(DEVICE), b.to(DEVICE)
    assert_same(simulate.matmul(there, other, how, rng=rng), simulate.matmul(a, b, how, rng=rng))
    assert_same(simulate.matmul(there, other[1], how, rng=rng), simulate.matmul(a, b[1], how, rng=rng))


@needs_gpu
def test_exact_sums_agree_with_the_cpu():
    patterns = torch.randint(-(1 << 31), 1 << 31, (2, 20, 20)).to(torch.int32)
    a, b = patterns.view(torch.float32)
    for name in (None, "bfloat16", "posit16_1"):
        how = Arithmetic(sum=name, order="exact")
        for x, y in ((a, b), (a.nan_to_num(1.0, 2.0, 3.0), b.nan_to_num(1.0, 2.0, 3.0))):
            assert_same(simulate.matmul(x.to(DEVICE), y.to(DEVICE), how), simulate.matmul(x, y, how))


#: Bits of a product, how many times the bits that a sum grows by are to be taken off, levels
WINDOWS = [(20, 0, 1), (53, 1, 1), (54, 1, 2), (105, 2, 2), (106, 2, 3), (157, 3, 3), (158, 3, None)]


def spread(shape, lowest, width, random):
    """Numbers with bits from 2**lowest to below 2**(lowest + width), of all sizes; both ends occur."""
    length = torch.randint(1, min(width, 24) + 1, shape, generator=random)
    size = torch.randint(1 << 24, shape, generator=random) & ((1 << length) - 1)
    place = (torch.rand(shape, generator=random) * (width - length + 1)).long() + lowest
    x = size * 2.0 ** place.double() * (torch.randint(2, shape, generator=random) * 2 - 1)
    x[0, 0, 0], x[0, -1, -1] = 2.0**lowest, 2.0 ** (lowest + width) - 2.0 ** (lowest + max(width - 24, 0))
    return x.float()


@pytest.mark.parametrize(("width", "less", "levels"), WINDOWS)
@pytest.mark.parametrize("lowest", [-60, -149])
def test_exact_sums_equal_the_plain_method(width, less, levels, lowest):
    """Sums that just fit a window and that just do not; sums of zero, subnormal sums, sums that overflow."""
    random = torch.Generator().manual_seed(width)
    for rows, steps, columns in shapes(width == 105) if HAS_GPU else [(3, 9, 5)]:
        bits = width - less * (steps - 1).bit_length()
        a = spread((2, rows, steps), lowest, bits // 2, random)
        b = spread((2, steps, columns), -60, bits - bits // 2, random)
        a[1, 0], b[1, :, 0] = a[1, 0].abs().max(), b[1, :, 0].abs().max()
        a[1, 0, 1::2] *= -1
        b[1, 1:, -1], b[1, 0, -1] = 0.0, 2.0**-60
        window = gemm_quire.window(gemm_cpu._extent(a), gemm_cpu._extent(b), steps)
        assert lowest < -60 or steps == 1 or (window and window.levels) == levels
        for odd in (False, True):
            wanted, product = torch.empty(2, rows, columns), torch.empty(2, rows, columns, device=DEVICE)
            gemm_exact.gemm(a, b, wanted, odd=odd)
            gemm_cuda.exact(a.to(DEVICE), b.to(DEVICE), product, odd=odd)
            assert_same(product, wanted)


def share(monkeypatch, steps):
    """Programs share the steps of a tile, so many each at least, however few there are."""
    monkeypatch.setattr(gemm_cuda, "_processors", lambda _device: 64)
    monkeypatch.setattr(gemm_cuda, "LONG", 2)
    monkeypatch.setattr(gemm_cuda, "SHARE", steps)


def assert_exact_parts(a, b):
    """To nearest and to odd, as the plain method has it. Returns the number of levels."""
    shape = a.shape[0], a.shape[1], b.shape[2]
    for odd in (False, True):
        wanted, product = torch.empty(shape), torch.empty(shape, device=DEVICE)
        gemm_exact.gemm(a, b, wanted, odd=odd)
        gemm_cuda.exact(a.to(DEVICE), b.to(DEVICE), product, odd=odd)
        assert_same(product, wanted)
    window = gemm_quire.window(gemm_cpu._extent(a), gemm_cpu._extent(b), a.shape[-1])
    return window and window.levels


def test_steps_are_shared_where_tiles_are_few():
    assert gemm_cuda.parts(1, 50176, 132) == 4 * 132
    assert gemm_cuda.parts(5, 6400, 132) == 100
    assert gemm_cuda.parts(100, 6400, 132) == 5
    assert gemm_cuda.parts(52, 64, 132) == 1
    assert gemm_cuda.parts(132, 50176, 132) == 1
    assert gemm_cuda.parts(131, 1 << 20, 132) == 4
    assert all(gemm_cuda.parts(tiles, 256, 1) == 1 for tiles in (1, 2, 100))


@pytest.mark.parametrize(
    ("width", "less", "levels"), [case for case in WINDOWS if case[2] is not None and case[0] > 20]
)
@pytest.mark.parametrize("each", [1, 9])
def test_exact_sums_in_parts_use_the_window_up_to_its_ends(width, less, levels, each, monkeypatch):
    """The greatest sums there are, sums that cancel across parts, a last part that is shorter."""
    share(monkeypatch, each)
    random = torch.Generator().manual_seed(width)
    for rows, steps, columns in [(6, 37, 25), (40, 101, 70)] if HAS_GPU else [(3, 37, 5)]:
        bits = width - less * (steps - 1).bit_length()
        a = spread((2, rows, steps), -60, bits // 2, random)
        b = spread((2, steps, columns), -60, bits - bits // 2, random)
        a[1, 0], b[1, :, 0] = a.abs().max(), b.abs().max()
        a[1, 1] = a[1, 0]
        a[1, 1, steps // 2 :] *= -1
        a[1, 2, : steps // 2], b[1, : steps // 2] = -a[1, 2, -(steps // 2) :], b[1, -(steps // 2) :]
        assert assert_exact_parts(a, b) == levels


@pytest.mark.parametrize("name", ["posit8_2", "e5m2", "bfloat16", "fixed2.14"])
def test_exact_sums_of_formats_in_parts(name, monkeypatch):
    share(monkeypatch, 4)
    torch.manual_seed(2)
    format = formats.get(name)
    a, b = format.round(torch.randn(1, 6, 53)), format.round(torch.randn(1, 53, 9))
    a[0, 0], b[0, 1:, 0], b[0, 0, 0] = a[0, 0, 0], -1.0 / 64, 52.0 / 64
    assert assert_exact_parts(a, b) is not None


#: Formats, length of chunks, multiplication
CHUNKS = [
    (("e5m2", "bfloat16"), 1, None),
    ((None, "fixed4.6"), 3, None),
    (("float8_e4m3fnuz", None), 8, 1 << 19),
    (("posit8_2", "posit16_1"), 18, 0),
    (("bfloat16", "e4m3"), 36, None),
    (("tf32", "e5m10"), 37, None),
]


@pytest.mark.parametrize(("pair", "chunk", "offset"), CHUNKS, ids=str)
def test_chunks_side_by_side_equal_the_definition(pair, chunk, offset, monkeypatch):
    p = GemmParams(prepared(pair[0]), prepared(pair[1]), 0, CHUNKED, chunk, offset)
    a, b = operands(3, 37, 5, seed=chunk)
    wanted = torch.empty(2, 3, 5)
    gemm_reference.gemm(p, a, b, wanted)
    for each, sums in ((12, 1 << 26), (1, 1)) if chunk == 3 else ((9, 1 << 26),):  # or: no room for sums
        share(monkeypatch, each)
        monkeypatch.setattr(gemm_cuda, "SUMS", sums)
        product = torch.empty(2, 3, 5, device=DEVICE)
        gemm_cuda.gemm(p, a.to(DEVICE), b.to(DEVICE), product)
        assert_same(product, wanted)


@needs_gpu
@pytest.mark.parametrize("shape", [(6, 50176, 25), (16, 6400, 150), (120, 64, 400), (1, 50176, 6)], ids=str)
def test_gradients_of_weights(shape):
    """Small results, long sums."""
    torch.manual_seed(3)
    rows, steps, columns = shape
    for name in ("fixed2.14", "e5m2", "bfloat16"):
        format = formats.get(name)
        a, b = format.round(torch.randn(steps, rows)).t(), format.round(torch.randn(steps, columns))
        there, other = a.to(DEVICE), b.to(DEVICE)
        for how in (
            Arithmetic(sum="posit16_1", order="exact"),
            Arithmetic("e5m2", "e5m10", "chunked/64"),
            Arithmetic(None, "posit8_2", "chunked/1000", "mogami/0.0625"),
        ):
            assert_same(simulate.matmul(there, other, how), simulate.matmul(a, b, how))


@pytest.mark.parametrize("few", [0, 32])
def test_extents_are_those_of_the_cpu(few, monkeypatch):
    monkeypatch.setattr(gemm_cuda, "FEW_SCANS", few)
    a, b = operands(7, 300, 5)
    for x, y in ((a, b), (a.nan_to_num(1.0, 2.0, 3.0), torch.zeros(1)), (torch.full((1,), 1e-45), -b * 0.0)):
        extents = gemm_cuda._extents(x.to(DEVICE), y.to(DEVICE))
        assert extents == [gemm_cpu._extent(x), gemm_cpu._extent(y)]
    assert gemm_cpu._extent(torch.zeros(3)) == gemm_quire.Extent(gemm_quire.NO_FIELD, 1)
    assert gemm_cpu._extent(torch.tensor([1.0, 0.375, 1e-45])) == gemm_quire.Extent(1, 127)
    assert gemm_cpu._extent(torch.tensor([0.375, INF])) == gemm_quire.Extent(147, 255)


@needs_gpu
@pytest.mark.parametrize("name", ["posit8_2", "e5m2", "float8_e4m3fn", "fixed2.14", "bfloat16", None])
def test_exact_sums_of_formats(name):
    torch.manual_seed(1)
    a, b = torch.randn(4, 70, 333), torch.randn(4, 90, 333)
    if name is not None:
        a, b = formats.get(name).round(a), formats.get(name).round(b)
    how = Arithmetic(sum="posit8_2", order="exact")
    strided = a[0].t().contiguous().t(), b[0].t().contiguous()
    for x, y in ((a, b.transpose(1, 2)), (a[0], b[0].t()), strided):
        assert_same(simulate.matmul(x.to(DEVICE), y.to(DEVICE), how), simulate.matmul(x, y, how))


@needs_gpu
def test_views_and_slices():
    how = Arithmetic("e5m2", "e5m10")
    a, b = torch.randn(50, 41), torch.randn(60, 41)
    there, other = a.to(DEVICE), b.to(DEVICE)
    wanted = simulate.matmul(a[1:, 3:], b.t()[3:, 1:], how)
    assert_same(simulate.matmul(there[1:, 3:], other.t()[3:, 1:], how), wanted)
    out = torch.empty(59, 49, device=DEVICE).t()
    assert simulate.matmul(there[1:, 3:], other.t()[3:, 1:], how, out=out) is out
    assert_same(out.contiguous(), wanted)
    assert simulate.matmul(there[:, :0], other.t()[:0], how).abs().sum().item() == 0


@needs_gpu
@pytest.mark.parametrize("batch", [1, 5])
def test_pairwise_sums_take_turns_where_room_is_short(batch, monkeypatch):
    how = Arithmetic("e4m3", "e5m10", "pairwise")
    a, b = operands(100, 300, 70, batch)
    wanted = simulate.matmul(a, b, how)
    for room in (1, 1 << 15, 1 << 17):
        monkeypatch.setattr(gemm_cuda, "ROOM", room)
        assert_same(simulate.matmul(a.to(DEVICE), b.to(DEVICE), how), wanted)


@needs_gpu
@pytest.mark.parametrize("order", ["sequential", "pairwise", "exact"])
def test_more_matrices_than_a_launch_takes(order):
    how = Arithmetic(None if order == "exact" else "e4m3", "e5m10", order)
    a, b = operands(1, 3, 2, 70000)
    if order == "exact":  # what fits a window
        a, b = (formats.get("e4m3").round(x).nan_to_num(1.0, 2.0, -2.0) for x in (a, b))
    assert_same(simulate.matmul(a.to(DEVICE), b.to(DEVICE), how), simulate.matmul(a, b, how))


@needs_gpu
@pytest.mark.parametrize("order", ["sequential", "pairwise", "kahan"])
def test_larger_products(order):
    """Many programs, more than one wave, sizes that no tile divides."""
    how = Arithmetic("e4m3", "e5m10", order)
    a, b = operands(1025, 515, 1030, 1)
    assert_same(simulate.matmul(a[0].to(DEVICE), b[0].to(DEVICE), how), simulate.matmul(a[0], b[0], how))
