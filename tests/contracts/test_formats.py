"""What holds for every format in the registry; a new entry is covered on arrival."""

import copy
import itertools
import math
import pickle

import numpy as np
import pytest
import torch

from thinwire import InputError, Rounding, Stream
from thinwire.formats import E8M0, FORMATS, Fixed, Float, Int, Posit, Table, accuracy, codebook, get
from thinwire.formats.base import MODES
from thinwire.kernels import reference

STREAM = Stream(seed=5, step=2, tensor="weights", rank=1)
MORE = [
    Float(4, 3, specials="fn", saturate=True),
    Float(5, 2, saturate=True),
    Float(4, 3, specials="none", bias=9),
    Float(5, 2, subnormals=False),
    Float(3, 0, subnormals=False),
    Float(8, 7, subnormals=False, saturate=True),
    Float(1, 3, specials="none", bias=-120),
    Float(6, 1, specials="fnuz"),
    Float(1, 3),
    Posit(5, 1, underflow=True),
    Posit(2, 0),
    Posit(16, 3),
    Table(tuple(np.geomspace(1e-30, 1e30, 700)), label="700 values"),
    Table((1.0, 1.0000001, 1.0000002, 5.0), label="neighbouring floats"),
    Table((-3e38, -1e-45, 1e-45, 3e38), label="the ends of float32"),
    Table((-3.0, -2.0, -0.5), label="negative numbers only"),
    Table((-1.0, -0.0, 1.0), label="a negative zero"),
    Table(
        [-(m * 2.0**e) for e in range(127, -127, -1) for m in (1.5, 1)] + [0.0, 1.0], label="crowded cells"
    ),
]
ALL = {**FORMATS, **{each.name: each for each in MORE}}


LISTED = [each for each in ALL.values() if each.bits <= 16]
MODES_OF = [(each, str(mode)) for each in ALL.values() for mode in each.roundings]
every_mode = pytest.mark.parametrize(
    ("format", "mode"), MODES_OF, ids=lambda part: getattr(part, "name", part)
)


@pytest.fixture(params=ALL, ids=str)
def format(request):
    return ALL[request.param]


def bits(x):
    return x.contiguous().view(torch.int32)


def rng(mode):
    return STREAM if mode == "stochastic" else None


@pytest.mark.parametrize("name", FORMATS)
def test_registry_names_are_found(name):
    assert get(name) is FORMATS[name]
    assert FORMATS[name].name == name


@every_mode
def test_cpu_kernels_equal_the_reference_bit_for_bit(format, mode, probes):
    x = probes(format)
    number, words = MODES[Rounding(mode)], STREAM.words(x.numel()) if mode == "stochastic" else None
    params = format._prepared(number)
    codes = reference.to_codes(params, x, number, words)
    values = reference.from_codes(params, codes)
    assert torch.equal(format.to_codes(x, mode, rng(mode)), codes)
    assert torch.equal(bits(format.from_codes(codes)), bits(values))
    assert torch.equal(bits(format.round(x, mode, rng(mode))), bits(values))


def test_pickles_and_copies_are_equal_and_light(format):
    format.round(torch.ones(1))
    again = pickle.loads(pickle.dumps(format))
    assert again == format == copy.deepcopy(format)
    assert hash(again) == hash(format)
    assert again.name == format.name
    assert torch.equal(again.to_codes(torch.ones(3)), format.to_codes(torch.ones(3)))


def test_codes_fit_and_every_code_decodes(format):
    if format.bits > 16:
        codes = torch.randint(0, 1 << format.bits, (70_000,)).to(torch.uint32)
    else:
        codes = torch.arange(1 << format.bits).to(reference.code_dtype(format.bits))
    values = format.from_codes(codes)
    assert torch.equal(bits(values), bits(reference.from_codes(format._prepared(0), codes)))
    again = format.to_codes(values)
    assert int(again.long().max()) < 1 << format.bits
    listed = values.isfinite() & (values >= format.min)
    if Rounding.UP in format.roundings:  # a legacy search does not even keep its own values
        assert torch.equal(format.from_codes(again)[listed], values[listed])


def test_bits_above_the_format_are_ignored(format):
    dtype = reference.code_dtype(format.bits)
    every = torch.randint(0, 1 << 31, (4000,)).to(dtype)
    kept = (every.long() & ((1 << format.bits) - 1)).to(dtype)
    assert torch.equal(bits(format.from_codes(every)), bits(format.from_codes(kept)))


@pytest.mark.parametrize("format", LISTED, ids=lambda format: format.name)
def test_values_are_sorted_and_limits_are_among_them(format):
    values = format.values()
    assert (values.diff() > 0).all()
    assert values.isfinite().all()
    assert (values[0].item(), values[-1].item()) == (format.min, format.max)
    assert values[values > 0][:1].tolist() in ([format.min_subnormal], [])
    assert format.min_normal in values.abs().tolist()
    table = format.from_codes(torch.arange(1 << format.bits).to(reference.code_dtype(format.bits)))
    assert format.has_inf == bool(table.isinf().any())
    if format.has_nan:
        assert table.isnan().any()
        assert format.round(torch.tensor([np.nan])).isnan().all()


@every_mode
def test_rounding_is_monotone_idempotent_and_goes_the_right_way(format, mode, probes):
    x = probes(format)
    x = x[x.isfinite()].sort().values
    y = format.round(x, mode, rng(mode))
    inside = (x >= format.min) & (x <= format.max)
    x, y = x[inside], y[inside]
    if mode != "stochastic":
        assert (y.diff() >= 0).all()
    keeps_from_zero = getattr(format, "underflow", True) is False  # posits: what is not zero stays so
    small = keeps_from_zero & (x.abs() < format.min_subnormal)
    if mode == "up":
        assert ((y >= x) | small).all()
    if mode == "down":
        assert ((y <= x) | small).all()
    if mode == "zero" and (format.round(torch.zeros(1)) == 0).all():
        assert ((y.abs() <= x.abs()) | small).all()
    if len(format.roundings) > 1:
        assert torch.equal(format.round(y, mode, rng(mode)), y)


def test_negative_zero_nan_and_infinity_follow_the_stated_rules(format):
    result = format.round(torch.tensor([-0.0, torch.nan, torch.inf, -torch.inf]))
    zero, nan, high, low = result.tolist()
    if format.name != "float8_e8m0fnu" and 0 in format.round(torch.zeros(1)).tolist():
        assert zero == 0
        assert bool(np.signbit(zero)) == ("-0 is kept" in format.rules)
    assert np.isnan(nan) == format.has_nan
    if "infinities saturate" in format.rules:
        assert (high, low) == (format.max, format.min)
    else:
        assert not np.isfinite(high)
        assert not np.isfinite(low)


def test_shapes_strides_and_dtypes_do_not_matter(format):
    x = torch.randn(6, 10, 4) * min(format.max, 100)
    flat = format.to_codes(x.flatten())
    assert torch.equal(format.to_codes(x), flat.view(6, 10, 4))
    assert torch.equal(format.to_codes(x.permute(2, 0, 1)), flat.view(6, 10, 4).permute(2, 0, 1))
    assert torch.equal(bits(format.round(x[::2, 1:])), bits(format.round(x)[::2, 1:]))
    assert format.to_codes(torch.tensor(1.5)).shape == ()
    assert format.to_codes(torch.empty(0, 3)).shape == (0, 3)
    for dtype in (torch.bfloat16, torch.float16):
        assert torch.equal(format.to_codes(x.to(dtype)), format.to_codes(x.to(dtype).float()))
        assert torch.equal(bits(format.round(x.to(dtype))), bits(format.round(x.to(dtype).float())))


def test_input_is_left_alone_and_out_is_filled(format):
    x = torch.randn(100)
    kept = x.clone()
    codes = format.to_codes(x)
    assert torch.equal(x, kept)
    out = torch.empty_like(codes)
    assert format.to_codes(x, out=out) is out
    assert torch.equal(out, codes)
    strided = torch.empty(200)[::2]
    assert format.round(x, out=strided) is strided
    assert torch.equal(bits(strided), bits(format.round(x)))
    expected = format.round(x)
    assert torch.equal(bits(format.round(x, out=x)), bits(expected))
    with pytest.raises(InputError, match="no_grad"):
        format.round(x, out=torch.zeros(100, requires_grad=True))
    version = out._version
    format.to_codes(x, out=out)
    assert out._version > version
    array = np.arange(101, dtype=np.float32)
    expected = format.round(torch.from_numpy(array[:-1].copy()))
    shifted = format.round(torch.from_numpy(array[:-1]), out=torch.from_numpy(array[1:]))
    assert torch.equal(bits(shifted), bits(expected))
    overlapping = torch.arange(101.0)
    expected = format.round(overlapping[:-1])
    assert torch.equal(bits(format.round(overlapping[:-1], out=overlapping[1:])), bits(expected))


def test_meta_device_gives_shapes_without_storage(format):
    x = torch.empty(3, 5, device="meta")
    codes = format.to_codes(x)
    assert (codes.device.type, codes.shape, codes.dtype) == (
        "meta",
        x.shape,
        reference.code_dtype(format.bits),
    )
    assert format.from_codes(codes).device.type == "meta"
    assert format.round(x).dtype == torch.float32


@pytest.mark.parametrize(
    ("format", "mode"),
    [each for each in MODES_OF if each[1] in ("nearest", "stochastic")],
    ids=lambda part: getattr(part, "name", part),
)
def test_results_do_not_depend_on_threads(format, mode):
    x = torch.randn((1 << 20) + 77)
    before = torch.get_num_threads()
    results = []
    for threads in (1, 2):
        torch.set_num_threads(threads)
        results.append(format.to_codes(x, mode, rng(mode)))
    torch.set_num_threads(before)
    assert torch.equal(*results)


@pytest.mark.parametrize("name", ["float8_e4m3fn", "int8", "dynamic_tree", "posit16_1"])
def test_a_stream_gives_the_words_it_says(name):
    format = get(name)
    x = torch.randn(1000)
    for numel in (1, 127, 512, 513, 1000):
        part = x[:numel]
        assert torch.equal(
            format.to_codes(part, "stochastic", STREAM),
            format.to_codes(part, "stochastic", STREAM.words(numel)),
        )


def test_different_streams_round_differently():
    x = torch.full((4096,), 1.06)
    format = get("float8_e4m3fn")
    streams = [Stream(1), Stream(2), Stream(1, step=1), Stream(1, tensor=1), Stream(1, rank=1)]
    streams.append(Stream(1, tensor="a"))
    codes = [format.to_codes(x, "stochastic", stream) for stream in streams]
    for one, other in itertools.combinations(codes, 2):
        assert 0.2 < (one != other).float().mean() < 0.8


@pytest.mark.parametrize(
    ("format", "mode"),
    [each for each in MODES_OF if not isinstance(each[0], Float | Fixed | Int)],
    ids=lambda part: getattr(part, "name", part),
)
def test_step_tables_find_every_segment(format, mode):
    """The one-addition look-up against a search, at every start and its neighbours."""
    params = format._prepared(MODES[Rounding(mode)])
    starts = params.starts.astype(np.int64)
    patterns = (
        np.concatenate([starts, starts + 1, starts - 1, [2**32 - 1]]).clip(0, 2**32 - 1).astype(np.uint32)
    )
    expected = np.searchsorted(params.starts, patterns, side="right") - 1
    shifts = {params.cell_shift, min(params.cell_shift, 16)} - {0}
    assert shifts or format.name == "neighbouring floats"  # which lie in one cell, and are searched for
    for shift in shifts:
        cells = params.cells(shift)
        segments = (cells[patterns >> np.uint32(shift)] + patterns) >> np.uint32(shift)
        assert np.array_equal(segments, expected)


def test_codes_that_are_not_used_are_nan():
    table = codebook.decode_table(3, np.array([-1.0, 0.5, 2.0]), np.array([1, 4, 6]), nan_code=4)
    assert table.dtype == np.float32
    assert np.array_equal(
        table, np.float32([np.nan, -1, np.nan, np.nan, np.nan, np.nan, 2, np.nan]), equal_nan=True
    )
    assert codebook.decode_table(1, np.array([3.0]), np.array([1]))[1] == 3


@pytest.mark.parametrize("specials", ["ieee", "fn", "fnuz", "none"])
@pytest.mark.parametrize("exp", [1, 2, 3])
@pytest.mark.parametrize("man", [1, 2, 3])
def test_the_top_exponent_is_that_of_the_largest_value(exp, man, specials):
    """Subnormals count as those of the smallest normal value."""
    found = Float(exp, man, specials)
    assert found._top_exponent == max(math.floor(math.log2(found.max)), 1 - found._bias)


def test_formats_without_a_sign_measure_numbers_from_zero_on():
    samples = {"from zero": torch.tensor([0.0, 1.0]), "below": torch.tensor([-1.0, 1.0])}
    chosen = [E8M0(), get("int8")]
    found = [(row["format"], row["data"]) for row in accuracy.error_table(chosen, samples)]
    assert found == [(chosen[0].name, "from zero"), ("int8", "from zero"), ("int8", "below")]


def test_only_formats_without_a_range_of_their_own_take_a_scale():
    """Floats of 8 bits or less, integers and most tables do; what is in the unit of the data does not."""
    scaled = {name for name, each in FORMATS.items() if each.takes_scale}
    own = {"float16", "bfloat16", "tf32", "e6m9", "fixed8.8", "fixed2.14", "fixed2.6"}
    own |= {name for name in FORMATS if name.startswith(("posit", "static_tree", "mantissa"))}
    assert scaled == FORMATS.keys() - own
