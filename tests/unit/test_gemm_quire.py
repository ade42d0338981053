"""Exact matrix products in a window of float64 numbers: the bits of the plain method, whatever goes in."""

import math
from fractions import Fraction

import pytest
import torch

from thinwire import formats
from thinwire.kernels import gemm_cpu, gemm_exact, gemm_quire, gemm_quire_numba

NAN, INF = math.nan, math.inf
NAMES = [
    "posit8_0", "posit8_1", "posit8_2", "posit16_1", "e5m2", "e4m3", "e6m9", "fixed2.14", "int8", "bfloat16",
    None,
]  # fmt: skip


def extent(x):
    return gemm_quire.Extent(*gemm_quire_numba.extent(x.contiguous().view(-1).numpy()))


def assert_same(a, b):
    """To nearest and to odd, as the plain method has it. Returns the number of levels, None if none."""
    for odd in (False, True):
        wanted, product = (torch.empty(a.shape[0], a.shape[1], b.shape[2]) for _ in range(2))
        gemm_exact.gemm(a, b, wanted, odd=odd)
        gemm_cpu.exact(a, b, product, odd=odd)
        assert torch.equal(product.view(torch.int32), wanted.view(torch.int32))
    window = gemm_quire.window(extent(a), extent(b), a.shape[-1])
    return window and window.levels


def spread(shape, lowest, width, random):
    """Numbers with bits from 2**lowest to below 2**(lowest + width), of all sizes; both ends occur."""
    length = torch.randint(1, min(width, 24) + 1, shape, generator=random)
    size = torch.randint(1 << 24, shape, generator=random) & ((1 << length) - 1)
    place = (torch.rand(shape, generator=random) * (width - length + 1)).long() + lowest
    x = size * 2.0 ** place.double() * (torch.randint(2, shape, generator=random) * 2 - 1)
    x[0, 0, 0], x[0, -1, -1] = 2.0**lowest, greatest(lowest, width)
    assert torch.equal(x.float().double(), x)
    return x.float()


def greatest(lowest, width):
    return 2.0 ** (lowest + width) - 2.0 ** (lowest + max(width - 24, 0))


@pytest.mark.parametrize("name", NAMES)
def test_formats_and_lengths(name):
    random = torch.Generator().manual_seed(3)
    for steps in (1, 2, 31, 32, 33, 400, 2000):
        a, b = (30 * torch.randn(2, *shape, generator=random) for shape in ((5, steps), (steps, 9)))
        if name is not None:
            a, b = formats.get(name).round(a), formats.get(name).round(b)
        levels = assert_same(a, b)
        assert levels is not None or name is None


@pytest.mark.parametrize("name", ["posit8_2", "posit16_1", "e5m2", "float8_e4m3fn"])
def test_every_number_of_a_format_fits(name):
    values = formats.get(name).values()
    values = values[values.isfinite()]
    random = torch.Generator().manual_seed(1)
    a, b = (values[torch.randint(len(values), (1, 7, 500), generator=random)] for _ in range(2))
    assert assert_same(a, b.transpose(1, 2)) is not None


@pytest.mark.parametrize("steps", [1, 2, 5, 32, 100, 513])
@pytest.mark.parametrize("levels", [1, 2, 3])
def test_the_window_is_used_up_to_its_ends(levels, steps):
    """Just inside and just outside, at several places of float32's range; the greatest sums there are."""
    random = torch.Generator().manual_seed(steps)
    held = (0, 53, 105, 157)[levels] - levels * (steps - 1).bit_length()
    places = ((held, -110), (held + 1, -110), (held, -298), (held, 256 - held), (held, -149))
    for width, lowest in places:
        left = width // 2
        low = min(max(lowest - lowest // 2, -149), 128 - left)
        a = spread((1, 6, steps), low, left, random)
        b = spread((1, steps, 8), lowest - low, width - left, random)
        a[0, 2], b[0, :, 2] = greatest(low, left), greatest(lowest - low, width - left)
        a[0, 3] = a[0, 2]
        a[0, 3, 1::2] *= -1  # cancels
        expected = levels if width == held else {1: 2, 2: 3, 3: None}[levels]
        assert (
            assert_same(a, b) == expected or lowest == -298
        )  # subnormal numbers count as the smallest normal


def test_zeros_cancellation_and_ends_of_the_range():
    top, tiny = 3.4028234663852886e38, 2.0**-149
    rows = [
        ([0.0, -0.0, 0.0], [1.0, 1.0, -1.0]),
        ([1.0, -1.0, 0.0], [0.3, 0.3, 5.0]),
        ([tiny, -tiny, -tiny], [1.0, 1.0, 1.0]),
        ([tiny, tiny, tiny], [0.5, 0.25, -0.5]),  # below the smallest: 0 or, to odd, the smallest
        ([-tiny, 0.0, 0.0], [0.5, 0.0, 0.0]),
        ([-tiny, -tiny, 0.0], [0.5, 2.0**-20, 0.0]),
        ([2.0**-126, tiny, 2.0**-140], [0.5, 0.5, 1.0]),
        ([top, top, 0.0], [1.0, 1.0, 0.0]),
        ([top, 2.0**103, 0.0], [1.0, 1.0, 0.0]),  # a tie with what would be the next
        ([top, 2.0**103, -(2.0**80)], [1.0, 1.0, 1.0]),
        ([-top, -top, top], [1.0, 1.0, 1.0]),
        ([1.0, 2.0**-24, 2.0**-48], [1.0, 1.0, 1.0]),
        ([1.0, 2.0**-24, 2.0**-48], [1.0, 1.0, -1.0]),
        ([INF, 1.0, 0.0], [1.0, -1.0, 1.0]),
        ([NAN, 1.0, 0.0], [1.0, -1.0, 1.0]),
        ([INF, -INF, 0.0], [1.0, 1.0, 1.0]),
    ]
    for x, y in rows:
        a, b = torch.tensor(x)[None, None], torch.tensor(y)[None, :, None]
        assert_same(a, b)
    zeros = torch.zeros(1, 3, 4)
    assert assert_same(zeros, -zeros.transpose(1, 2)) == 1
    assert assert_same(zeros, torch.full((1, 4, 3), -1e38)) == 1


def test_transposed_operands_batches_and_threads(monkeypatch):
    format = formats.get("posit8_2")
    a, b = format.round(torch.randn(3, 33, 20)), format.round(torch.randn(3, 300, 33))
    assert_same(a.transpose(1, 2), b.transpose(1, 2))
    before = torch.get_num_threads()
    monkeypatch.setattr(gemm_cpu, "THREAD_STEPS", 1)
    try:
        torch.set_num_threads(3)
        assert_same(a.transpose(1, 2), b.transpose(1, 2))
        assert_same(a.transpose(1, 2)[:1, :3], b.transpose(1, 2)[:1])
    finally:
        torch.set_num_threads(before)


@pytest.mark.parametrize("levels", [1, 2, 3])
def test_threads_share_the_steps_of_small_results(levels, monkeypatch):
    """The greatest sums there are, sums that cancel across parts, a last part that is shorter."""
    monkeypatch.setattr(gemm_cpu, "THREAD_STEPS", 1)
    monkeypatch.setattr(gemm_cpu, "LONG", 5)
    random = torch.Generator().manual_seed(levels)
    before = torch.get_num_threads()
    try:
        torch.set_num_threads(3)
        for steps in (10, 47, 1001):
            width = (0, 53, 105, 157)[levels] - levels * (steps - 1).bit_length()
            a, b = (
                spread((5, 3, steps), -60, width // 2, random),
                spread((5, steps, 25), -60, -(-width // 2), random),
            )
            a[1, 0], b[1, :, 0] = a.abs().max(), b.abs().max()
            a[1, 1] = a[1, 0]
            a[1, 1, steps // 2 :] *= -1
            assert len(gemm_cpu._parts(torch.empty(5, 3, 25), steps)) == min(3, steps // 5)
            assert assert_same(a, b) == levels
        for rows in (12, 100):
            assert len(gemm_cpu._parts(torch.empty(1, rows, 25), 1001)) == 1
    finally:
        torch.set_num_threads(before)


@pytest.mark.parametrize("width", [20, 50, 70])
def test_sums_equal_those_of_fractions(width):
    """Every level, against exact arithmetic; to odd is checked by the neighbours of the sum."""
    random = torch.Generator().manual_seed(width)
    for lowest in (-40, -149):
        a, b = spread((1, 4, 9), lowest, width, random), spread((1, 9, 5), -20, width, random)
        near, odd = torch.empty(1, 4, 5), torch.empty(1, 4, 5)
        gemm_cpu.exact(a, b, near, odd=False)
        gemm_cpu.exact(a, b, odd, odd=True)
        for i in range(4):
            for j in range(5):
                pairs = zip(a[0, i].tolist(), b[0, :, j].tolist(), strict=True)
                check(sum(Fraction(x) * Fraction(y) for x, y in pairs), near[0, i, j], odd[0, i, j])


def check(exact, near, odd):
    distances = [abs(Fraction(torch.nextafter(near, torch.tensor(to)).item()) - exact) for to in (-INF, INF)]
    distance = abs(Fraction(near.item()) - exact)
    even = near.view(torch.int32).item() % 2 == 0
    assert distance < min(distances) or (distance == min(distances) and even)
    if Fraction(odd.item()) == exact:
        return
    assert odd.view(torch.int32).item() % 2 == 1
    below, above = (Fraction(torch.nextafter(odd, torch.tensor(to)).item()) for to in (-INF, INF))
    assert below < exact < above


@pytest.mark.parametrize("name", ["posit8_2", "posit16_2", "fixed4.12", "float8_e4m3fn", "e2m1", "int8"])
def test_an_extent_is_where_bits_lie(name):
    numbers = formats.get(name).values()
    extent = gemm_quire.extent_of(numbers)
    sizes = [Fraction(float(each)) for each in numbers if each]
    assert all(each % Fraction(2) ** (extent.lowest - 150) == 0 for each in sizes)
    assert any(each % Fraction(2) ** (extent.lowest - 149) for each in sizes)
    assert max(map(abs, sizes)) < Fraction(2) ** (extent.highest - 126)
    assert max(map(abs, sizes)) >= Fraction(2) ** (extent.highest - 127)


def test_without_numbers_but_zero_the_lowest_bit_is_above_all():
    assert gemm_quire.extent_of(torch.zeros(3)) == gemm_quire.Extent(gemm_quire.NO_FIELD, 1)
