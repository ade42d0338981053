"""What holds for every codec in the registry; a new entry is covered on arrival."""

import copy
import dataclasses
import functools
import itertools
import math
import pickle
import re
import sys
from fractions import Fraction

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from thinwire import Stream, codecs, formats
from thinwire.codecs import (
    CODECS,
    Block,
    Cast,
    DctTopK,
    MaxMin,
    MSTopK,
    OneBit,
    OneBitColumn,
    RandomK,
    Threshold,
    TopK,
)  # fmt: skip
from thinwire.codecs.base import write_tags
from thinwire.errors import CodecError, InputError, WireError
from thinwire.formats import Posit
from thinwire.kernels import block_cpu, block_reference, onebit_reference
from thinwire.kernels.params import FILLED, Segments
from thinwire.scaling import Scaling

STREAM = Stream(seed=5, step=2, tensor="weights", rank=1)
FUZZED = 200
LARGEST = float(np.finfo(np.float32).max)
UNIT = 2.0**-24  # half a unit in the last place of float32, relative
LAST = 2.0**-149  # the smallest float32

every_codec = pytest.mark.parametrize("codec", CODECS.values(), ids=list(CODECS))
TAGGED = {name: codec for name, codec in CODECS.items() if codec.tagged}
SHARING = {name: codec for name, codec in CODECS.items() if codec.agreement(1)}
every_sharing = pytest.mark.parametrize("codec", SHARING.values(), ids=list(SHARING))
EDGES = [0, 1, 2, 3, 31, 33, 63, 64, 65, 127, 128, 129, 255, 257, 511, 513, 1023, 1025, 4097]
numbers = st.lists(st.floats(-(2.0**110), 2.0**110, width=32), min_size=1, max_size=200)
numels = st.sampled_from(EDGES) | st.integers(0, 700)
shapes = st.tuples(st.lists(st.integers(0, 3), max_size=2), numels).map(lambda each: (*each[0], each[1]))


def drawn(max_examples):
    return settings(max_examples=max_examples, deadline=None, derandomize=True)


def gauss(*shape, seed=0):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def stream(codec, **changes):
    return dataclasses.replace(STREAM, **changes) if codec.needs_rng else None


def encoded(codec, x, **options):
    return codec.encode(x, stream(codec), **options)


def round_trip(codec, x):
    return codec.decode(encoded(codec, x), x.shape[-1])


def bits(x):
    return x.contiguous().view(torch.int32)


def same(x, y):
    """Equal to the bit; a NaN equals any other."""
    nan = x.isnan()
    return torch.equal(nan, y.isnan()) and torch.equal(bits(x)[~nan], bits(y)[~nan])


# Bytes


@every_codec
@drawn(12)
@given(shape=shapes)
def test_declared_bytes_are_sent_bytes(codec, shape):
    x, numel = gauss(*shape), shape[-1]
    wire = encoded(codec, x)
    assert wire.dtype == torch.uint8
    assert wire.shape == (*shape[:-1], codec.nbytes(numel))
    assert codec.decode(wire, numel).shape == x.shape
    on_meta = encoded(codec, x.to("meta"))
    assert (on_meta.device.type, on_meta.shape, on_meta.dtype) == ("meta", wire.shape, torch.uint8)
    decoded = codec.decode(on_meta, numel)
    assert (decoded.device.type, decoded.shape, decoded.dtype) == ("meta", x.shape, torch.float32)


@every_codec
@drawn(12)
@given(numel=numels)
def test_sections_add_up_to_the_wire_with_little_padding(codec, numel):
    sections = codec.sections(numel)
    assert sum(each.nbytes for each in sections) == codec.nbytes(numel)
    assert len({each.name for each in sections}) == len(sections)
    for each in sections:
        assert each.nbytes % 4 == 0
        padding = each.nbytes - each.bits * each.count / 8
        assert 0 <= padding < 4 + 8 * each.bits  # codes under a byte go in groups of 64
    if numel:
        assert codec.bits_per_element(numel) == 8 * codec.nbytes(numel) / numel


@every_codec
def test_the_docstring_draws_the_wire_section_by_section(codec):
    places = (type(codec).__doc__, sys.modules[type(codec).__module__].__doc__)
    line = next(re.search(r"Wire: (\[.*\])", doc) for doc in places if doc and "Wire:" in doc).group(1)
    drawn = re.findall(r"\[(\w+)", line)
    names = [each.name for each in codec.sections(1000)]
    assert [name for name in drawn if name in names] == names
    optional = set(drawn) - set(names)
    assert all(re.search(rf"\[{name}:[^\]]*(with|unless)", line) for name in optional)


@every_codec
def test_negative_sizes_are_refused(codec):
    for call in (codec.sections, codec.nbytes):
        with pytest.raises(InputError, match="-1 elements"):
            call(-1)


# A codec is data


@every_codec
def test_the_spec_leads_back_to_the_codec(codec):
    assert CODECS[codec.spec] is codec  # keys are canonical
    assert codecs.get(codec.spec) == codec
    assert codecs.get(codec) is codec
    for feedback in ("", "float32", "bfloat16", "int8"):
        other = codec.with_feedback(feedback)
        assert codecs.get(other.spec) == other
        assert other.name == codec.name
        assert (other == codec) == (feedback == codec.feedback)


@every_codec
def test_codecs_are_frozen_hashable_and_light_to_pickle(codec):
    x = gauss(100)
    wire = encoded(codec, x)  # fills whatever is cached
    with pytest.raises(dataclasses.FrozenInstanceError):
        codec.feedback = "float32"
    packed = pickle.dumps(codec)
    assert len(packed) < 20_000
    for again in (pickle.loads(packed), copy.deepcopy(codec)):
        assert again == codec
        assert hash(again) == hash(codec)
        assert torch.equal(encoded(again, x), wire)
    assert len({codec, pickle.loads(packed)}) == 1


def test_no_two_entries_are_the_same_codec():
    assert len(set(CODECS.values())) == len(CODECS)
    assert len({codec.tag(1000) for codec in CODECS.values()}) == len(
        {codec.name for codec in CODECS.values()}
    )


# Batches


@every_codec
@drawn(8)
@given(rows=st.integers(1, 4), numel=numels, seed=st.integers(0, 99))
def test_a_batch_is_a_loop_over_its_rows(codec, rows, numel, seed):
    x = gauss(rows, numel, seed=seed)
    wire = encoded(codec, x)
    decoded = codec.decode(wire, numel)
    for i in range(rows):
        assert same(codec.decode(wire[i], numel), decoded[i])
        if not codec.needs_rng or i == 0:
            assert torch.equal(encoded(codec, x[i]), wire[i])
    assert torch.equal(encoded(codec, x.view(1, rows, 1, numel)).flatten(), wire.flatten())


@every_codec
def test_the_same_stream_gives_the_same_bytes_and_another_does_not(codec):
    x = gauss(2000)
    wire = encoded(codec, x)
    assert torch.equal(encoded(codec, x), wire)
    if codec.needs_rng:
        for change in ({"rank": 2}, {"step": 3}, {"seed": 6}, {"tensor": "bias"}):
            assert not torch.equal(codec.encode(x, stream(codec, **change)), wire)
        rows = codec.encode(x.expand(3, -1), stream(codec))
        assert len({tuple(row.tolist()) for row in rows}) == 3


@every_codec
def test_empty_batches_and_empty_vectors_pass_through(codec):
    for shape in ((0,), (3, 0), (0, 5), (2, 0, 7)):
        x, residual = torch.empty(shape), torch.empty(shape)
        wire = encoded(codec, x, residual=residual)
        assert wire.shape == (*shape[:-1], codec.nbytes(shape[-1]))
        assert codec.decode(wire, shape[-1]).shape == shape
        assert codec.decode_add(wire, torch.empty(shape)).shape == shape
        again = codec.reduce_encode(torch.stack((wire, wire)), shape[-1], stream(codec))
        assert torch.equal(again, wire)


# Values: what arrives, and how far off it may be


def bound(codec, x):
    """How far each element of a vector may be off after a round trip: float64, from x alone."""
    exact = x.numpy().astype(np.float64)
    return torch.from_numpy(BOUNDS[type(codec)](codec, exact)) if exact.size else x.double()


def cast_bound(codec, x):
    """Half a unit in the last place, which below the normal numbers stays the same."""
    digits, last = {"fp32": (math.inf, 0.0), "fp16": (11, 2.0**-25), "bf16": (8, 2.0**-134)}[codec.dtype]
    return np.maximum(np.abs(x) * 2.0**-digits, last)


def by_block(function):
    """From a bound for a block to one for a vector."""

    @functools.wraps(function)
    def whole(codec, x):
        size = getattr(codec, "block", None) or getattr(codec, "chunk", None) or x.size
        parts = [function(codec, x[i : i + size], x) for i in range(0, x.size, size)]
        return np.concatenate(parts)

    return whole


@by_block
def block_bound(codec, x, row):
    """Half the gap between the neighbours of x / scale, or all of it if rounding is not to nearest.

    Where the scale does not reach, what sticks out is added. The scale itself is known to `slack`: it is
    rounded when it is stored, in the subnormal numbers to an absolute floor.
    """
    format = codec._format
    values, size = format.values().numpy().astype(np.float64), np.abs(x)
    scale, slack = scale_of(codec, size, row)
    low, high = max(scale - slack, 0.0), min(scale + slack, LARGEST)
    edge = np.where(x < 0, -format.min, format.max)
    beyond = np.maximum(size - low * edge, 0.0)
    outer = x / low if low > 0 else np.sign(x) * LARGEST
    nearest = codec.rounding == "nearest" and not isinstance(format, Posit)
    rounding = high * widest_gap(values, outer) * (0.5 if nearest else 1.0)
    return rounding + beyond + 8 * UNIT * size + LAST


def scale_of(codec, size, row):
    """A block's scale as it should be, in float64, and by how much the stored one may differ."""
    how, limit = codec.scaling, codec._format.max
    if how.margin == "world":
        limit = 2.0 ** math.floor(math.log2(limit))
    if isinstance(codec.format, Posit):
        limit = 1.0  # where posits are finest
    top = size.max()
    digits, last = {"float32": (24, LAST), "bfloat16": (7, 2.0**-133)}.get(how.store, (math.inf, 0.0))
    if how.choose == "fixed":
        return 10.0**how.value, UNIT * 10.0**how.value
    if how.choose in ("pow2", "floor"):
        exponent = math.floor(math.log2(top)) - math.floor(math.log2(limit)) if top else -127
        if how.choose == "pow2" and top:
            exponent = math.frexp(top / limit)[1] - (math.frexp(top / limit)[0] == 0.5)
        return 2.0 ** min(max(exponent, -127), 127), 0.0
    scale = reach_of(how, size) / (limit + 0.5 * (how.choose == "cells"))
    slack = scale * 2.0**-digits + last
    if how.choose in ("l2", "rms", "cells"):  # squares are taken of 15-bit integers
        slack += scale * 2.0**-15 * math.sqrt(size.size)
    if how.store == "e4m3":  # relative to the row's largest, which becomes 448
        factor = np.abs(row).max() / limit / 448
        slack = max(scale * 2.0**-4, factor * 2.0**-10) + 448 * LAST
    return scale, slack


def reach_of(how, size):
    root = math.sqrt(np.square(size / (size.max() or 1.0)).sum()) * size.max()
    if how.choose == "l2":
        return min(root, LARGEST)
    if how.choose in ("rms", "cells"):
        return min(how.value * root / math.sqrt(size.size), size.max())
    if how.choose == "percentile":
        rank = math.ceil(Fraction(repr(how.value)) / 100 * size.size)
        return np.sort(size)[max(rank, 1) - 1] or size.max()
    return size.max()


def widest_gap(values, y):
    """The largest distance between neighbours among the values, from zero out to y or the last value."""
    gaps, ends = np.diff(values), values[1:]
    out = np.where(ends > 0, np.maximum.accumulate(np.where(ends > 0, gaps, 0.0)), 0.0)
    back = np.maximum.accumulate(np.where(values[:-1] < 0, gaps, 0.0)[::-1])[::-1]
    place = np.searchsorted(values, y).clip(1, values.size - 1) - 1
    return np.where(y < 0, back[place], out[place])


@by_block
def maxmin_bound(codec, x, row):
    """Half a step, or all of it at random; the step is rounded, and the top is many steps away."""
    del row
    top = 2**codec.bits - 1
    unit = (x.max() - x.min()) / top
    slop = 8 * UNIT * (np.abs(x).max() + x.max() - x.min()) + 2 * top * LAST
    return np.full_like(x, unit * (1.0 if codec.needs_rng else 0.5) + slop)


@by_block
def onebit_bound(codec, x, row):
    """The mean of a kind lies within its range; a mean and a mean deviation within twice the block's."""
    del row
    size = np.abs(x)
    slop = 4 * UNIT * size.max() + LAST
    if codec.threshold == "mean":
        return np.full_like(x, 2 * (x.max() - x.min()) + slop)
    if codec.threshold == "sign":
        return np.full_like(x, size.max() - size.min() + slop)
    ranges = [np.ptp(kind) if kind.size else 0.0 for kind in (x[x < 0], x[x >= 0])]
    return np.where(x < 0, *ranges) + slop


def topk_bound(codec, x):
    """What is sent has the error of its own codec; what is not is missing."""
    k = math.ceil(Fraction(repr(codec.fraction)) * x.size)
    sent = np.sort(np.argsort(-np.abs(x), kind="stable")[:k])
    missing = np.abs(x)
    missing[sent] = BOUNDS[type(codec.values)](codec.values, x[sent])
    return missing


def mstopk_bound(codec, x):
    """Every element is sent as it is, or missing."""
    assert codec.values == Cast("fp32")
    return np.abs(x)


def threshold_bound(codec, x):
    assert codec.values == Cast("fp32")
    reached = np.abs(x) >= np.float32(codec.threshold)
    fits = reached.sum() <= math.ceil(Fraction(repr(codec.capacity)) * x.size)
    return np.abs(x) * ~(reached & fits)


def randomk_bound(codec, x):
    """An element is missing, or multiplied by the length of its part."""
    assert codec.values == Cast("fp32")
    return np.abs(x) * part_length(codec, x.size)


@by_block
def dct_bound(codec, x, row):
    """Missing coefficients have at most the energy of the whole tile."""
    del row
    assert codec.values == Cast("fp32")
    norm = np.linalg.norm(x / (np.abs(x).max() or 1.0)) * np.abs(x).max()
    return np.full_like(x, norm * (1 + 2.0**-20) + codec.chunk * LAST)


def part_length(codec, numel):
    return math.ceil(numel / math.ceil(Fraction(repr(codec.fraction)) * numel)) if codec.unbiased else 1


BOUNDS = {
    Cast: cast_bound, Block: block_bound, MaxMin: maxmin_bound, OneBit: onebit_bound,
    OneBitColumn: onebit_bound, TopK: topk_bound, MSTopK: mstopk_bound, Threshold: threshold_bound,
    RandomK: randomk_bound, DctTopK: dct_bound,
}  # fmt: skip
KINDS = {
    "gauss": lambda numel: gauss(numel),
    "heavy": lambda numel: gauss(numel) * torch.exp(3 * gauss(numel, seed=1)),
    "sparse": lambda numel: torch.where(gauss(numel, seed=1) > 1, gauss(numel), 0.0),
    "positive": lambda numel: 5 + gauss(numel).abs(),
    "constant": lambda numel: torch.full((numel,), -0.3),
    "wide": lambda numel: gauss(numel) * 10.0 ** (15 * gauss(numel, seed=1)).clamp(-37, 37),
    "huge": lambda numel: torch.where(gauss(numel) < 0, -1e38, 1e38),
    "huge constant": lambda numel: torch.full((numel,), 1e38),
    "one huge": lambda numel: torch.where(torch.arange(numel) == numel // 2, -1e38, gauss(numel)),
    "small": lambda numel: gauss(numel) * 1e-38,
    "subnormal": lambda numel: gauss(numel) * 1e-41,
    "smallest": lambda numel: torch.where(gauss(numel) < 0, -LAST, LAST),
}


def range_of(codec, numel):
    """The largest magnitude for which a finite result is promised."""
    if isinstance(codec, Cast):
        return 65504.0 if codec.dtype == "fp16" else LARGEST
    if isinstance(codec, RandomK):
        return LARGEST / (part_length(codec, numel) + 1)
    if isinstance(codec, DctTopK):
        return LARGEST / codec.chunk  # an inverse transform of rounded coefficients may peak
    return range_of(codec.values, numel) if isinstance(codec, TopK | Threshold) else LARGEST


@every_codec
@pytest.mark.parametrize("kind", KINDS)
def test_every_kind_of_data_arrives_finite_and_within_the_bound(codec, kind):
    for numel in (1, 2, 17, 600, 1111):
        top = range_of(codec, numel)
        x = KINDS[kind](numel).clamp(-top, top)
        decoded = round_trip(codec, x)
        assert bool(decoded.isfinite().all())
        excess = (decoded.double() - x.double()).abs() - bound(codec, x)
        assert float(excess.max()) <= 0, (numel, int(excess.argmax()))


@every_codec
@drawn(10)
@given(
    values=st.lists(st.floats(-(2.0**110), 2.0**110, width=32), min_size=1, max_size=200),
    copies=st.integers(1, 4),
)
def test_any_numbers_arrive_within_the_bound(codec, values, copies):
    x = torch.tensor(values * copies)
    top = range_of(codec, x.numel())
    x = x.clamp(-top, top)
    excess = (round_trip(codec, x).double() - x.double()).abs() - bound(codec, x)
    assert float(excess.max()) <= 0


@every_codec
def test_values_beyond_the_range_are_never_silently_finite(codec):
    if range_of(codec, 600) == LARGEST:
        assert bool(round_trip(codec, torch.full((600,), 1e38)).isfinite().all())
    else:
        assert not bool(round_trip(codec, torch.full((600,), 3e38)).isfinite().all())


@every_codec
def test_zeros_of_either_sign_decode_to_zero(codec):
    for x in (torch.zeros(1), -torch.zeros(300), torch.zeros(2, 65) * gauss(2, 65).sign()):
        assert not round_trip(codec, x).any()


@every_codec
def test_zeros_among_other_numbers_stay_zero_exactly_if_that_is_promised(codec):
    kept = []
    for seed, often in itertools.product(range(3), (0.1, 0.5, 0.997)):
        x = gauss(1500, seed=seed)
        x[torch.rand(1500, generator=torch.Generator().manual_seed(seed)) < often] = 0.0
        x[::2] *= -1.0
        kept.append(not round_trip(codec, x)[x == 0].any())
    assert all(kept) if codec.keeps_zeros else not all(kept)


REACHING = [
    codec
    for codec in CODECS.values()
    if isinstance(codec, MaxMin | OneBit | OneBitColumn)
    or (isinstance(codec, Block) and codec.scaling == Scaling() and not codec.needs_rng)
]


@pytest.mark.parametrize("codec", REACHING, ids=lambda codec: codec.spec)
@pytest.mark.parametrize("value", [1.0, -0.3, 7e-4, 123456.7])
def test_constants_arrive_to_a_few_units_if_the_largest_magnitude_can(codec, value):
    x = torch.full((300,), value)
    assert float((round_trip(codec, x) - x).abs().max()) <= 4 * UNIT * abs(value)


# Not finite


def poisoned(codec, numel, at):
    """The elements that one bad element makes NaN, by what the codec says of itself."""
    said = codec.nonfinite
    size = 1
    if "its block" in said or "its tile" in said:
        size = getattr(codec, "block", 0) or codec.chunk
    elif "its column" in said or "the vector" in said:
        size = numel
    else:
        assert "arrive as they are" in said or "chosen first" in said
    return torch.arange(numel) // size == at // size


@every_codec
@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
def test_what_is_not_finite_never_arrives_finite_and_spoils_no_more_than_is_said(codec, bad):
    numel = 9000 if getattr(codec, "block", None) == 8192 else 1300
    x = gauss(2, numel)
    clean = round_trip(codec, x)
    for at in (0, numel // 2, numel - 1):
        broken = x.clone()
        broken[0, at] = bad
        decoded = round_trip(codec, broken)
        assert same(decoded[1], clean[1])
        if isinstance(codec, RandomK):
            assert not decoded[0][decoded[0] != 0].isfinite().any()
            assert int((decoded[0] != 0).sum()) == math.ceil(codec.fraction * numel)
            continue
        spoilt = poisoned(codec, numel, at)
        assert not bool(decoded[0, at].isfinite())
        assert not bool(decoded[0][spoilt].isfinite().any())
        if isinstance(codec, TopK | Threshold):  # a bad element takes the place of a small one
            rest = decoded[0][~spoilt]
            inner = codec.values
            assert not isinstance(inner, Cast) or bool(((rest == 0) | (rest == clean[0][~spoilt])).all())
        else:
            assert same(decoded[0][~spoilt], clean[0][~spoilt])


@every_codec
def test_a_residual_that_meets_a_bad_element_is_never_silently_wrong(codec):
    x, residual = gauss(500), gauss(500, seed=1)
    x[7] = math.nan
    before = residual.clone()
    decoded = codec.decode(encoded(codec, x, residual=residual), 500)
    kept = decoded.isfinite() & residual.isfinite()
    given = (x + before)[kept].double()
    off = (decoded[kept].double() + residual[kept].double() - given).abs()
    assert bool((off <= UNIT * torch.maximum(decoded[kept].abs(), residual[kept].abs()).double()).all())


@pytest.mark.parametrize("sign", [-1.0, 1.0])
@pytest.mark.parametrize(
    "format", [formats.Uniform(8, signed=True), formats.get("nf4")], ids=lambda each: each.name
)
def test_a_short_scale_of_the_largest_numbers_is_finite(format, sign):
    """Scales that are rounded up to bfloat16, of formats that end at 1: the next one would be infinite."""
    codec = Block(format, 64, scaling=Scaling(store="bfloat16"))
    decoded = round_trip(codec, torch.full((200,), sign * LARGEST))
    assert torch.equal(decoded, torch.full((200,), sign * float(torch.finfo(torch.bfloat16).max)))


@pytest.mark.parametrize("block", [64, 128, 256, 1024, 65536])
@pytest.mark.parametrize("threshold", ["zero", "mean", "sign"])
def test_sums_of_equal_numbers_in_long_one_bit_blocks_do_not_overflow(block, threshold):
    """The largest below a power of two: as integers they have all bits that sums are made of."""
    codec = OneBit(block, threshold)
    for value in (2 - 2.0**-23, -(2 - 2.0**-23)):
        x = torch.full((2 * block + 3,), value)
        assert torch.equal(round_trip(codec, x), x)


# Inputs and outputs of other kinds


@every_codec
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_short_floats_are_encoded_like_float32_of_the_same_value(codec, dtype):
    x, residual = gauss(3, 200).to(dtype), gauss(3, 200, seed=1)
    other = residual.clone()
    assert torch.equal(encoded(codec, x), encoded(codec, x.float()))
    assert torch.equal(encoded(codec, x, residual=residual), encoded(codec, x.float(), residual=other))
    assert torch.equal(residual, other)


@every_codec
def test_strides_of_inputs_do_not_matter(codec):
    x = gauss(6, 400)
    views = [x[::2, 1::3], gauss(70, 5).T, x[0, :1].expand(2, 130), x[:, None, 7:], x[3:, 1:]]
    views.append(torch.view_as_complex(gauss(90, 2)).conj().imag)  # a negated view
    views.append(gauss(2, 90).requires_grad_())
    for view in views:
        wire = encoded(codec, view)
        plain = torch.tensor(view.tolist())
        assert torch.equal(wire, encoded(codec, plain))
        assert not wire.requires_grad
        wide = torch.zeros(*wire.shape[:-1], wire.shape[-1] + 3, dtype=torch.uint8)
        wide[..., 1:-2] = wire  # strided rows that start within a word
        assert same(codec.decode(wide[..., 1:-2], view.shape[-1]), codec.decode(wire, view.shape[-1]))


@every_codec
def test_inputs_are_left_alone(codec):
    x = gauss(2, 200)
    wire = encoded(codec, x)
    kept = x.clone(), wire.clone()
    encoded(codec, x, residual=torch.zeros(2, 200))
    codec.decode(wire, 200)
    codec.decode_add(wire, torch.zeros(2, 200))
    codec.reduce_encode(wire.expand(3, -1, -1), 200, stream(codec))
    assert torch.equal(x, kept[0])
    assert torch.equal(wire, kept[1])


@every_codec
def test_out_is_filled_and_returned(codec):
    x = gauss(2, 200)
    wire = encoded(codec, x)
    nbytes = codec.nbytes(200)
    spare = torch.full((2, 2 * nbytes + 8), 7, dtype=torch.uint8)
    for out in (torch.full_like(wire, 99), spare[:, 1 : 1 + nbytes], spare[:, 3 : 3 + 2 * nbytes : 2]):
        version = out._version
        assert encoded(codec, x, out=out) is out
        assert torch.equal(out, wire)
        assert out._version > version
    assert torch.equal(encoded(codec, x[0], out=spare.view(-1)[1 : 1 + nbytes]), wire[0])  # within a word
    decoded = codec.decode(wire, 200)
    for out in (torch.full((2, 200), 9.0), torch.full((2, 400), 9.0)[:, ::2], torch.full((200, 2), 9.0).T):
        version = out._version
        assert codec.decode(wire, 200, out=out) is out
        assert same(out, decoded)
        assert out._version > version


@every_codec
def test_out_may_share_memory_with_the_input(codec):
    x = gauss(200)
    wire = encoded(codec, x)
    decoded = codec.decode(wire, 200)
    memory = torch.zeros(4 * 200 + wire.numel(), dtype=torch.uint8)
    for begin in (0, 4, 400):
        held, out = memory[:800].view(torch.float32), memory[begin : begin + wire.numel()]
        held.copy_(x)
        assert torch.equal(encoded(codec, held, out=out), wire)
        target, source = memory[-800:].view(torch.float32), memory[begin : begin + wire.numel()]
        source.copy_(wire)
        assert same(codec.decode(source, 200, out=target), decoded)


@every_codec
def test_outs_that_do_not_fit_are_refused(codec):
    x, nbytes = gauss(2, 100), codec.nbytes(100)
    wire = encoded(codec, x)
    fitting = torch.empty(2, nbytes, dtype=torch.uint8)
    for out in (fitting[0], fitting[:, 1:], fitting.to(torch.int8), fitting.to("meta"), fitting.tolist()):
        with pytest.raises(InputError, match="out must be"):
            encoded(codec, x, out=out)
    fitting = torch.empty(2, 100)
    for out in (fitting[0], fitting[:, 1:], fitting.half(), fitting.to("meta"), fitting.tolist()):
        with pytest.raises(InputError, match="out must be"):
            codec.decode(wire, 100, out=out)
    with pytest.raises(InputError, match="no_grad"):
        codec.decode(wire, 100, out=fitting.requires_grad_())


# Sums


def weighted(codec, wire, numel, weight):
    """What `decode_add` documents: the weight goes into the scales. None: not to the bit."""
    if isinstance(codec, Block | MaxMin):
        return block_reference.decode(codec._params, wire, codec.layout(numel), weight)
    if isinstance(codec, OneBit):
        return onebit_reference.decode(wire, codec.layout(numel), weight)
    return None


@every_codec
@pytest.mark.parametrize("numel", [1, 65, 700, 5000])
def test_decode_add_adds_the_weighted_vector_in_place(codec, numel):
    x, before = gauss(2, numel), gauss(2, numel, seed=1)
    wire = encoded(codec, x)
    for weight in (1.0, -1.0, 0.3, 0.0):
        expected = weighted(codec, wire, numel, weight)
        for out in (before.clone(), torch.empty(numel, 2).T.copy_(before)):
            assert codec.decode_add(wire, out, weight) is out
            if expected is not None:
                assert same(out, before + expected)
            plain = before.double() + weight * codec.decode(wire, numel).double()
            assert torch.allclose(out.double(), plain, rtol=1e-6, atol=1e-6)


@every_codec
def test_sums_that_do_not_fit_are_refused(codec):
    wire = encoded(codec, gauss(2, 100))
    for out in (torch.zeros(2, 100).half(), [0.0], torch.zeros(2, 100, dtype=torch.float64)):
        with pytest.raises(InputError, match="float32"):
            codec.decode_add(wire, out)
    for out in (
        torch.zeros(100),
        torch.zeros(3, 100),
        torch.zeros(2, 1, 100),
        torch.zeros(2, 100, device="meta"),
    ):
        with pytest.raises(InputError, match="does not add"):
            codec.decode_add(wire, out)
    for out in (torch.zeros(2, 101), torch.tensor(0.0)):
        with pytest.raises((WireError, InputError)):
            codec.decode_add(wire, out)


@every_codec
@pytest.mark.parametrize("shape", [(1,), (65,), (2, 700), (2, 5000)])
def test_reduce_encode_is_encode_of_the_sum(codec, shape):
    numel = shape[-1]
    wires = torch.stack([encoded(codec, gauss(*shape, seed=seed)) for seed in range(3)])
    for asked, weight in ((None, 1 / 3), (0.7, 0.7)):
        total = torch.zeros(shape)
        for wire in wires:
            codec.decode_add(wire, total, weight)
        expected = encoded(codec, total)
        summed = codec.reduce_encode(wires, numel, stream(codec), weight=asked)
        assert torch.equal(summed, expected)
        out = torch.empty_like(expected)
        assert codec.reduce_encode(wires, numel, stream(codec), weight=asked, out=out) is out
        assert torch.equal(out, expected)
        one, other = torch.full(shape, 0.1), torch.full(shape, 0.1)
        summed = codec.reduce_encode(wires, numel, stream(codec), weight=asked, residual=one)
        assert torch.equal(summed, encoded(codec, total, residual=other))
        assert torch.equal(one, other)
    on_meta = codec.reduce_encode(wires.to("meta"), numel, stream(codec))
    assert on_meta.shape == wires.shape[1:]


@every_codec
def test_reduce_encode_refuses_what_is_no_stack_of_wires(codec):
    wire = encoded(codec, gauss(100))
    for wires in (wire, wire.expand(0, -1)):
        with pytest.raises(InputError, match="stacked"):
            codec.reduce_encode(wires, 100, stream(codec))
    with pytest.raises(CodecError, match="rng"):
        codec.reduce_encode(wire.expand(2, -1), 100, None if codec.needs_rng else STREAM)


# Residuals


@every_codec
@drawn(8)
@given(
    numel=st.sampled_from(EDGES[1:]) | st.integers(1, 700), scale=st.sampled_from([1e-30, 0.01, 1.0, 1e30])
)
def test_residual_plus_sent_is_given(codec, numel, scale):
    top = range_of(codec, numel) / 10
    x, residual = (gauss(2, numel) * scale).clamp(-top, top), gauss(2, numel, seed=1) * min(0.1 * scale, top)
    total = x + residual
    wire = encoded(codec, x, residual=residual)
    assert torch.equal(wire, encoded(codec, total))
    sent = codec.decode(wire, numel)
    off = (sent.double() + residual.double() - total.double()).abs()
    if getattr(codec, "values", codec) == Cast("fp32") and not isinstance(codec, DctTopK | RandomK):
        assert not off.any()
    assert bool((off <= UNIT * torch.maximum(sent.abs(), residual.abs()).double()).all())


@every_codec
def test_strided_residuals_are_updated_in_place(codec):
    x, residual, wide = gauss(2, 100), gauss(2, 100, seed=1), torch.full((2, 200), 7.0)
    wide[:, ::2] = residual
    wire = encoded(codec, x, residual=wide[:, ::2])
    assert torch.equal(wire, encoded(codec, x, residual=residual))
    assert torch.equal(wide[:, ::2], residual)
    assert bool((wide[:, 1::2] == 7).all())


@every_codec
def test_residuals_that_do_not_fit_are_refused(codec):
    x = gauss(2, 100)
    for residual in (
        torch.zeros(2, 99),
        torch.zeros(100),
        torch.zeros(2, 100).half(),
        torch.zeros(2, 100).to("meta"),
    ):
        with pytest.raises(InputError, match="residual must be float32"):
            encoded(codec, x, residual=residual)


# Wires that are none


@every_codec
def test_wires_of_the_wrong_length_are_refused(codec):
    wire = encoded(codec, gauss(100))
    longer = torch.cat((wire, wire))
    wrong = [wire[:-1], wire[:-4], wire[:0], longer[: wire.numel() + 1], longer[: wire.numel() + 4], longer]
    for each in wrong:
        for call in (
            lambda each=each: codec.decode(each, 100),
            lambda each=each: codec.decode_add(each, torch.zeros(100)),
            lambda each=each: codec.reduce_encode(each.expand(2, -1), 100, stream(codec)),
        ):
            with pytest.raises(WireError, match=f"{codec.nbytes(100)} bytes"):
                call()


@every_codec
def test_wires_of_another_codec_or_size_are_refused(codec):
    numel = 256
    for other in CODECS.values():
        if other.name != codec.name and other.nbytes(numel) == codec.nbytes(numel) and codec.tagged:
            with pytest.raises(WireError, match="tag does not match"):
                codec.decode(encoded(other, gauss(numel)), numel)
    wires = encoded(codec, gauss(2, numel))
    if codec.tagged:
        for tag in (codec.tag(numel + 1), codec.with_feedback("").tag(numel - 1), 0, -1):
            broken = wires.clone()
            write_tags(broken[1:], tag)  # of one row only
            with pytest.raises(WireError, match="same codec and size"):
                codec.decode(broken, numel)
            with pytest.raises(WireError, match="same codec and size"):
                codec.reduce_encode(broken, numel, stream(codec))
    else:
        assert isinstance(codec, Cast)


@pytest.mark.parametrize("place", range(3))
@pytest.mark.parametrize("codec", TAGGED.values(), ids=list(TAGGED))
def test_a_wire_of_another_codec_among_several_is_refused_wherever_it_is(codec, place):
    """As schedules add them up: segments, whose wires come from all ranks."""
    numel, count, stride = 256, 3, codec.nbytes(256)
    wires = encoded(codec, gauss(count, numel))
    write_tags(wires[place : place + 1], codec.tag(numel + 1))
    segments = Segments((codec.layout(numel),), (0,), (0,), (0,), (0,), (0,))
    with pytest.raises(WireError, match="same codec and size"):
        codec.decode_segments(wires.view(-1), torch.empty(numel), segments, 1.0, count, stride)
    if codec.reduces_segments:
        with pytest.raises(WireError, match="same codec and size"):
            codec.reduce_segments(wires.view(-1), wires[0].clone(), segments, 1.0, count, stride)


def test_some_wires_of_different_codecs_have_the_same_size():
    """Or the test above would compare nothing."""
    sizes = [codec.nbytes(256) for codec in CODECS.values() if codec.tagged]
    assert len(sizes) - len(set(sizes)) > 10


@every_codec
def test_what_is_no_wire_at_all_is_refused(codec):
    wire = encoded(codec, gauss(100))
    for each in (wire.to(torch.int8), wire.float(), wire.tolist(), torch.tensor(3, dtype=torch.uint8)):
        with pytest.raises(InputError, match="a wire is a uint8 tensor"):
            codec.decode(each, 100)


@every_codec
def test_garbage_in_any_section_is_refused_or_decodes_to_the_right_shape(codec):
    numel, random = 333, np.random.default_rng(8)
    wire = encoded(codec, gauss(numel))
    parts, at = [], 0
    for each in codec.sections(numel):
        parts.append((each.name, at, each.nbytes))
        at += each.nbytes
    for _ in range(FUZZED):
        broken = wire.clone()
        name, start, nbytes = parts[random.integers(len(parts))]
        places = start + random.integers(0, nbytes, random.integers(1, nbytes + 1))
        broken[places] = torch.from_numpy(random.integers(0, 256, places.size).astype(np.uint8))
        if name == "tag" and not torch.equal(broken, wire):
            with pytest.raises(WireError):
                codec.decode(broken, numel)
            continue
        try:
            decoded = codec.decode(broken, numel)
        except WireError:
            continue
        assert (decoded.shape, decoded.dtype) == ((numel,), torch.float32)


# Calls that make no sense


@every_codec
def test_the_stream_is_asked_for_where_it_is_needed_and_only_there(codec):
    x = gauss(10)
    if codec.needs_rng:
        with pytest.raises(CodecError, match=r"rounds at random: pass rng=Stream\(seed"):
            codec.encode(x)
        with pytest.raises(CodecError, match=r"must be a thinwire\.Stream, not int"):
            codec.encode(x, 3)
    else:
        with pytest.raises(CodecError, match="is not random: rng must be None"):
            codec.encode(x, STREAM)
    with pytest.raises(CodecError, match=re.escape(codec.spec)):
        codec.encode(x, None if codec.needs_rng else STREAM)


@every_codec
def test_other_inputs_are_refused_with_advice(codec):
    for x, advice in (
        (torch.zeros(5, dtype=torch.float64), r"float64; x\.float\(\) would round once more"),
        (torch.zeros(5, dtype=torch.int32), "expected float32, bfloat16 or float16, got torch.int32"),
        (torch.zeros(5, dtype=torch.bool), "expected float32"),
        (torch.zeros(5, dtype=torch.complex64), "expected float32"),
        (torch.tensor(1.0), r"single number; use x\.view\(1\)"),
        ([1.0, 2.0], r"use torch\.as_tensor"),
        (torch.zeros(2, 5).to_sparse(), "dense"),
    ):
        with pytest.raises(InputError, match=advice):
            encoded(codec, x)


# Scales that ranks agree on


def scale_bytes(codec, wire, numel):
    codes, scales, *_ = codec.sections(numel)
    return wire[..., codes.nbytes : codes.nbytes + scales.nbytes]


def agreed(codec, ranks, world=None):
    summaries = [codec.summary(x, world or len(ranks)) for x in ranks]
    return functools.reduce(torch.maximum, summaries)


@every_sharing
@pytest.mark.parametrize("shape", [(500,), (3, 130)])
def test_ranks_that_agree_have_the_same_scales_and_saturate_nothing(codec, shape):
    ranks = [gauss(*shape, seed=rank) * 10.0**rank for rank in range(3)]
    shared = agreed(codec, ranks)
    numel = shape[-1]
    assert shared.shape == (*shape[:-1], codec.agreement(numel))
    wires = [codec.encode(x, stream(codec, rank=i), shared=shared) for i, x in enumerate(ranks)]
    scales = [scale_bytes(codec, wire, numel) for wire in wires]
    assert torch.equal(scales[0], scales[1])
    assert torch.equal(scales[0], scales[2])
    alone = [scale_bytes(codec, encoded(codec, x), numel) for x in ranks]
    assert not torch.equal(alone[0], alone[2])
    top = torch.stack(ranks).abs().amax((0, -1), keepdim=True)[0]
    widest = float(np.diff(codec._format.values().numpy().astype(np.float64)).max()) / codec._format.max
    for x, wire in zip(ranks, wires, strict=True):
        off = (codec.decode(wire, numel) - x).abs()
        assert bool((off <= 2 * len(ranks) * widest * top).all())


@every_sharing
def test_a_rank_alone_needs_no_agreement(codec):
    x = gauss(2, 300)
    shared = agreed(codec, [x])
    assert torch.equal(encoded(codec, x), encoded(codec, x, shared=shared))


@every_sharing
@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_one_bad_rank_is_seen_by_all(codec, bad):
    ranks = [gauss(200, seed=rank) for rank in range(3)]
    ranks[1][5] = bad
    shared = agreed(codec, ranks)
    for x in ranks:
        assert bool(codec.decode(encoded(codec, x, shared=shared), 200).isnan().all())


@pytest.mark.parametrize("world", [2, 3, 5, 8, 17, 64])
@pytest.mark.parametrize("spec", [name for name, each in SHARING.items() if each.scaling.margin == "world"])
def test_a_sum_over_all_ranks_at_the_top_does_not_overflow_the_format(spec, world):
    """Every rank has the largest magnitude: all over a binade, in rows of one element."""
    codec = CODECS[spec]
    x = torch.cat((torch.linspace(1, 2, 500), torch.tensor([4.0, 8.0, 16.0, 64.0]) / world)).view(-1, 1)
    wire = encoded(codec, x, shared=agreed(codec, [x], world))
    scale = 2.0 ** (scale_bytes(codec, wire, 1)[:, :1].double() - 127)
    total = world * codec.decode(wire, 1).double() / scale
    if codec.format.man:
        assert float(total.max()) <= codec.format.max
        assert float(total.min()) > codec.format.max / 8  # and no more room than that is left
    else:  # powers of two alone: a rank's share may be rounded up by a third
        assert float(total.max()) <= codec.format.max * 4 / 3


@every_sharing
@pytest.mark.parametrize("world", [4, 16])
def test_the_margin_makes_scales_as_much_larger_as_it_says(codec, world):
    alone, shared = (codec.summary(gauss(300), each) for each in (1, world))
    if codec.scaling.store == "e8m0":  # exponents
        alone, shared = (2.0 ** each.double() for each in (alone, shared))
    else:  # patterns
        alone, shared = (each.view(torch.float32) for each in (alone, shared))
    times = {"": 1, "sqrt": math.sqrt(world), "world": world}[codec.scaling.margin]
    assert torch.equal(shared, alone * times)


@pytest.mark.parametrize("world", [1, 8, 100])
def test_a_margin_for_the_largest_numbers_is_finite(world):
    codec, x = codecs.get("int8/tensor~shared~world"), torch.tensor([3e38, -1e38])
    decoded = codec.decode(encoded(codec, x, shared=agreed(codec, [x], world)), 2)
    assert torch.allclose(decoded, x, rtol=0.02)
    for spec in ("int2~shared~sqrt", "nf4~shared~sqrt", "posit8_1~shared~sqrt", "fp8lm"):
        codec = codecs.get(spec)
        assert codec.decode(encoded(codec, x, shared=agreed(codec, [x], world)), 2).isfinite().all(), spec


@pytest.mark.parametrize(
    "spec", [*SHARING, "int8/256~shared", "e4m3fn/64~floor~e8m0~shared", "int4/tensor~l2~shared"]
)
@pytest.mark.parametrize("sign", [1, -1])
def test_numbers_of_either_sign_may_grow_by_the_reach(spec, sign):
    codec, x, reach = codecs.get(spec), sign * gauss(2, 700).abs(), torch.tensor([0.5, 3.0])
    layout, nothing = codec.layout(700), (0, 0)
    segments = Segments((layout, layout), (0, 700), nothing, nothing, nothing, nothing)
    expected = codec.summary(x + sign * reach.unsqueeze(1), 4)
    assert torch.equal(codec.summaries(x.flatten(), segments, 4, reach), expected.flatten())


@every_sharing
def test_what_is_unscaled_is_of_the_format_and_the_wire_is_left_alone(codec):
    x = gauss(3, 100)
    wire = encoded(codec, x)
    kept = wire.clone()
    numbers = codec.unscaled(wire, 100)
    assert torch.equal(wire, kept)
    assert torch.equal(codec.format.round(numbers), numbers)
    scales = codec.scales(wire, 100).repeat_interleave(codec.block or 100, 1)[:, :100]
    assert torch.equal(numbers * scales, codec.decode(wire, 100))


@every_sharing
def test_summaries_have_a_shape_for_every_batch_and_device(codec):
    for shape in ((7,), (0,), (2, 3, 40), (4, 0), (0, 7)):
        summary = codec.summary(torch.zeros(shape))
        assert summary.shape == (*shape[:-1], codec.agreement(shape[-1]))
        assert summary.dtype in (torch.uint8, torch.int32)
        on_meta = codec.summary(torch.zeros(shape, device="meta"))
        assert (on_meta.shape, on_meta.dtype, on_meta.device.type) == (summary.shape, summary.dtype, "meta")


@every_sharing
def test_shared_scales_that_do_not_fit_are_refused(codec):
    x = gauss(2, 100)
    shared = codec.summary(x)
    wrong = [shared[0], torch.cat((shared, shared), -1), shared.squeeze(-1), shared.tolist()]
    wrong += [shared.to(dtype) for dtype in (torch.float32, torch.int64, torch.int16)]
    for each in wrong:
        with pytest.raises(InputError, match="shared must be"):
            encoded(codec, x, shared=each)
    with pytest.raises(CodecError, match="at least one rank, not 0"):
        codec.summary(x, 0)
    with pytest.raises(InputError, match="float64"):
        codec.summary(x.double())


@pytest.mark.parametrize("codec", [each for each in CODECS.values() if not each.agreement(100)], ids=str)
def test_codecs_without_agreement_say_so(codec):
    with pytest.raises(CodecError, match="needs no agreement"):
        codec.summary(gauss(100))
    with pytest.raises(CodecError, match="takes no shared scale"):
        encoded(codec, gauss(100), shared=torch.zeros(1, dtype=torch.int32))


# Fast paths


@pytest.mark.parametrize(
    "spec", ["int4/128~sr", "e4m3fn/128", "maxmin4/1024", "onebit/64+ef", "topk/0.01+ef"]
)
def test_results_do_not_depend_on_threads(spec):
    codec = CODECS[spec]
    x, residual = gauss((1 << 21) + 77), gauss((1 << 21) + 77, seed=1)
    before = torch.get_num_threads()
    results = []
    try:
        for threads in (1, 2):
            torch.set_num_threads(threads)
            held = residual.clone()
            wire = encoded(codec, x, residual=held)
            results.append(
                (
                    wire,
                    held,
                    codec.decode(wire, x.numel()),
                    codec.reduce_encode(wire[None], x.numel(), stream(codec)),
                )
            )
    finally:
        torch.set_num_threads(before)
    assert all(torch.equal(one, other) for one, other in zip(*results, strict=True))


FORMATS = [
    *(f"int{width}" for width in range(2, 17)), "ternary", "fixed2.6", "fixed8.8", "float4_e2m1fn",
    "float6_e2m3fn", "float6_e3m2fn", "float8_e4m3fn", "float8_e5m2", "float8_e4m3fnuz", "float8_e3m4",
    "e3m0", "e5m4", "e6m9", "float16", "nf4", "dynamic_tree", "linear_legacy", "uniform8s", "bnb_dynamic",
    "normal8", "posit8_1", "posit10_1", "posit16_1",
]  # fmt: skip
LAYOUTS = [
    (16, "nearest", Scaling()),
    (64, "stochastic", Scaling()),
    (128, "up", Scaling()),
    (256, "nearest", Scaling("pow2", store="e8m0")),
    (4096, "nearest", Scaling(store="bfloat16")),
    (8192, "zero", Scaling("floor")),
    (64, "away", Scaling("pow2", store="bfloat16")),
    (None, "nearest", Scaling()),
    (32, "stochastic", Scaling("floor", store="e8m0")),
    (16, "nearest", Scaling(store="e4m3")),
]
GRID_SIZES = (1, 5, 63, 64, 65, 1000, 4097, 9000)


def awkward(numel):
    """Two rows of wide range, with zeros, subnormals, the ends of float32, NaN and infinity."""
    x = gauss(2, numel) * 10.0 ** (3 * gauss(2, numel, seed=1))
    if numel >= 64:
        x[0, :5] = torch.tensor([0.0, -0.0, 1e-40, 1e38, -3e38])
        x[1, 16:32] = torch.where(gauss(16) < 0, -0.0, 0.0)
    if numel >= 1000:
        x[1, 100], x[0, 900] = math.nan, math.inf
        x[1, 512:600] *= 1e-38
        x[1, 640:704] = LAST
    if numel >= 4000:
        x[1, 2048:3072] = torch.where(gauss(1024) < 0, -0.0, 0.0)
    return x


def compare_blocks(codec, numel):
    """Encode (with and without residual), decode, add and reduce: Numba against plain torch."""
    p, layout = codec._params, codec.layout(numel)
    key = STREAM.key if codec.needs_rng else None
    x, residual, before = awkward(numel), gauss(2, numel, seed=2), gauss(2, numel, seed=3)
    wires = [torch.full((2, layout.nbytes), fill, dtype=torch.uint8) for fill in (77, 99)]
    if p.rule == FILLED:
        for wire in wires:
            codec._fill(x, wire, layout, None)
    block_reference.encode(p, x, wires[0], layout, key)
    block_cpu.encode(p, x, wires[1], layout, key, None)
    assert torch.equal(*wires)
    wire = wires[0].clone()
    held = [residual.clone(), residual.clone()]
    block_reference.encode(p, x, wires[0], layout, key, held[0])
    block_cpu.encode(p, x, wires[1], layout, key, held[1])
    assert torch.equal(*wires)
    assert same(*held)
    out = torch.empty(2, numel)
    block_cpu.decode(p, wire, out, layout, 1.0, add=False)
    assert same(out, block_reference.decode(p, wire, layout))
    out = before.clone()
    block_cpu.decode(p, wire, out, layout, 0.3, add=True)
    assert same(out, before + block_reference.decode(p, wire, layout, 0.3))
    if p.rule != FILLED:
        both = torch.stack((wire, wires[0]))
        block_reference.reduce(p, both, wires[0], layout, 0.3, key)
        block_cpu.reduce(p, both, wires[1], layout, 0.3, key)
        assert torch.equal(*wires)


@pytest.mark.parametrize("format", FORMATS)
def test_cpu_blocks_equal_the_reference_bit_for_bit(format):
    for block, rounding, scaling in LAYOUTS:
        if rounding in formats.get(format).roundings:
            codec = Block(format, block, rounding, scaling, label="x")
            for numel in GRID_SIZES:
                compare_blocks(codec, numel)


@pytest.mark.parametrize("width", [1, 2, 3, 4, 5, 8])
def test_cpu_max_min_equals_the_reference_bit_for_bit(width):
    for rounding, numel in itertools.product(("nearest", "stochastic"), GRID_SIZES):
        compare_blocks(MaxMin(width, 64 if width < 4 else 1024, rounding), numel)


@pytest.mark.parametrize("threshold", ["zero", "mean", "sign"])
@pytest.mark.parametrize("block", [64, 512, 8192])
def test_cpu_one_bit_equals_the_reference_bit_for_bit(threshold, block):
    for numel in (1, 5, 63, 64, 65, 1000, 4097, 20000):
        codec = OneBit(block, threshold)
        layout, x, residual = codec.layout(numel), awkward(numel), gauss(2, numel, seed=2)
        for start in (None, residual):
            held = [None if start is None else start.clone() for _ in range(2)]
            wires = [torch.full((2, layout.nbytes), fill, dtype=torch.uint8) for fill in (77, 99)]
            onebit_reference.encode(x, wires[0], layout, threshold, held[0])
            block_cpu.onebit_encode(x, wires[1], layout, threshold, held[1])
            assert torch.equal(*wires)
            assert start is None or same(*held)
        out = torch.empty(2, numel)
        block_cpu.onebit_decode(wires[0], out, layout, 1.0, add=False)
        assert same(out, onebit_reference.decode(wires[0], layout))
        out = residual.clone()
        block_cpu.onebit_decode(wires[0], out, layout, 0.3, add=True)
        assert same(out, residual + onebit_reference.decode(wires[0], layout, 0.3))
