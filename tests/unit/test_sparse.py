"""Sparse codecs: what is chosen, what arrives, and what happens to wires that are none."""

import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from thinwire import Stream, codecs
from thinwire.codecs import Cast, DctTopK, MSTopK, RandomK, Threshold, TopK
from thinwire.codecs.base import write_tags
from thinwire.codecs.dct import _largest, transform
from thinwire.codecs.names import spell
from thinwire.codecs.sparse import index_bits, part
from thinwire.errors import CodecError, WireError
from thinwire.kernels import reference, select, select_numba

STREAM = Stream(seed=3, step=1, tensor="weights")
LONG = select.WORTH_SAMPLING + 12_345  # long enough to be sampled, and no round number
INFINITY = 0x7F800000
KINDS = ("gauss", "laplace", "ties", "zeros", "constant", "subnormal", "huge", "heavy", "spike", "periodic")
SPARSE = [
    TopK(0.05), TopK(0.05, "fp16"), TopK(0.3, "int8/256"), TopK(0.3, "int4/64~sr"), MSTopK(0.05),
    MSTopK(0.6, rounds=4), RandomK(0.05), RandomK(0.3, "bf16"), RandomK(0.2, unbiased=True),
    Threshold(0.5, 0.1), Threshold(1.5, 0.5, "bf16"), DctTopK(64, 8), DctTopK(32, 32), DctTopK(10, 3, "fp16"),
]  # fmt: skip
EXACT = [codec for codec in SPARSE if codec.values == Cast("fp32") and not isinstance(codec, DctTopK)]
every_sparse = pytest.mark.parametrize("codec", SPARSE, ids=lambda codec: codec.spec)
every_exact = pytest.mark.parametrize("codec", EXACT, ids=lambda codec: codec.spec)


def data(kind, numel, seed=0):
    random = np.random.default_rng(seed)
    gauss = random.standard_normal(numel)
    made = {
        "gauss": gauss,
        "laplace": random.laplace(size=numel),
        "ties": np.round(gauss),
        "zeros": np.zeros(numel),
        "constant": np.full(numel, -0.3),
        "subnormal": gauss * 1e-42,
        "huge": np.clip(gauss * 1e38, -3e38, 3e38),
        "heavy": gauss * np.exp(4 * gauss[::-1]),
        "spike": np.where(np.arange(numel) == numel // 2, 1e30, gauss),
        "periodic": gauss * (1 + 1000 * (np.arange(numel) % 1024 < 16)),
    }[kind]
    return torch.from_numpy(made.astype(np.float32))


def rng(codec):
    return STREAM if codec.needs_rng else None


def bits(x):
    return x.contiguous().view(torch.int32)


def same(x, y):
    return torch.equal(bits(x), bits(y))


def round_trip(codec, x):
    return codec.decode(codec.encode(x, rng(codec)), x.shape[-1])


# What is chosen


def sorted_choice(x, k):
    """The k largest by a stable sort: of equals the first."""
    magnitude = (x.numpy().view(np.int32) & 0x7FFFFFFF).astype(np.int64)
    return np.sort(np.argsort(-magnitude, kind="stable")[:k])


def bisected_choice(x, k, rounds):
    """MSTopK one round after the other, as the paper has it; the run starts at the first candidate."""
    size = np.abs(x.numpy())
    top = size.max()
    exponent = max(int(math.frexp(float(top))[1]), -125)
    whole = np.rint(size.astype(np.float64) * 2.0 ** (24 - exponent)).astype(np.int64)
    mean = min(
        np.float32(float(np.float32(whole.sum()) / np.float32(size.size)) * 2.0 ** (exponent - 24)), top
    )
    above, below = np.float32(np.inf), np.float32(0)
    if (size >= mean).sum() > k:
        low, high, below = mean, top, mean
    else:
        low, high, above = np.float32(0), mean, mean
    for _ in range(rounds):
        middle = low + (high - low) * np.float32(0.5)
        if (size >= middle).sum() <= k:
            high = above = middle
        else:
            low = below = middle
    sure = np.flatnonzero(size >= above)
    band = np.flatnonzero((size >= below) & (size < above))
    return np.sort(np.concatenate((sure, band[: k - sure.size])))


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("numel", [1, 2, 17, 1000, LONG])
def test_topk_chooses_the_largest_and_of_equals_the_first(kind, numel):
    x = data(kind, numel)
    for k in {1, part(0.01, numel), part(0.3, numel), numel}:
        expected = torch.from_numpy(sorted_choice(x, k))
        assert torch.equal(select.largest(x.view(1, -1), k)[0], expected)
        assert torch.equal(select.largest_reference(x.view(1, -1), k)[0], expected)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("numel", [1, 2, 17, 1000, LONG])
def test_mstopk_equals_one_round_after_the_other(kind, numel):
    x = data(kind, numel)
    for k in {1, part(0.01, numel), part(0.6, numel), numel}:
        for rounds in (1, 3, 30):
            expected = torch.from_numpy(bisected_choice(x, k, rounds))
            assert expected.numel() == k
            assert torch.equal(select.bisected(x.view(1, -1), k, rounds)[0], expected)
            assert torch.equal(select.bisected_reference(x.view(1, -1), k, rounds)[0], expected)


@pytest.mark.parametrize("bad", [math.inf, -math.inf, math.nan])
@pytest.mark.parametrize("rounds", [1, 2, 3, 30])
def test_mstopk_begins_with_the_mean_of_what_is_finite(rounds, bad):
    x = data("gauss", 1000)
    finite = torch.where(torch.arange(1000) == 7, 0.0, x)
    x[7] = bad
    expected = sorted([7, *bisected_choice(finite, 9, rounds)])
    assert select.bisected(x.view(1, -1), 10, rounds)[0].tolist() == expected
    assert select.bisected_reference(x.view(1, -1), 10, rounds)[0].tolist() == expected


@settings(max_examples=60, deadline=None)
@given(
    numel=st.integers(1, 300),
    k=st.floats(0, 1),
    rounds=st.integers(1, 40),
    kind=st.sampled_from(KINDS),
    seed=st.integers(0, 99),
)
def test_choices_hold_for_any_size(numel, k, rounds, kind, seed):
    x = data(kind, numel, seed)
    k = part(k, numel)
    assert select.largest(x.view(1, -1), k)[0].tolist() == sorted_choice(x, k).tolist()
    assert select.bisected(x.view(1, -1), k, rounds)[0].tolist() == bisected_choice(x, k, rounds).tolist()


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("room", [1, 50, 2000])
def test_a_threshold_is_reached_or_the_room_is_full(kind, room):
    x = data(kind, 2000)
    places, count = select.reaching(x.view(1, -1), 0.3, room)
    passing = np.flatnonzero(np.abs(x.numpy()) >= np.float32(0.3))
    expected = passing if passing.size <= room else sorted_choice(x, room)
    assert int(count) == expected.size
    assert places[0, : expected.size].tolist() == expected.tolist()
    assert not places[0, expected.size :].any()
    others = select.reaching_reference(x.view(1, -1), 0.3, room)
    assert all(torch.equal(one, other) for one, other in zip((places, count), others, strict=True))


def test_a_misleading_sample_changes_nothing():
    """All large elements where the sample looks, and then none of them there."""
    spans = torch.arange(LONG) // select_numba.SPAN
    block = spans // select_numba.SAMPLED
    sampled = spans % select_numba.SAMPLED == block * 29 % select_numba.SAMPLED
    for where in (sampled, ~sampled):
        x = data("gauss", LONG) * torch.where(where, 1e4, 1.0)
        k = part(0.005, LONG)
        assert select.largest(x.view(1, -1), k)[0].tolist() == sorted_choice(x, k).tolist()


def test_threads_do_not_change_the_choice():
    x = data("laplace", 1 << 21)
    k = part(0.01, x.numel())
    before = torch.get_num_threads()
    choices = []
    try:
        for threads in (1, 2):
            torch.set_num_threads(threads)
            row = x.view(1, -1)
            reaching = select.reaching(row, 4.0, k)
            choices.append((select.largest(row, k), select.bisected(row, k, 30), *reaching))
    finally:
        torch.set_num_threads(before)
    assert all(torch.equal(one, other) for one, other in zip(*choices, strict=True))
    assert choices[0][0][0].tolist() == sorted_choice(x, k).tolist()


@pytest.mark.parametrize("density", [0.001, 0.003, 0.01])
def test_mstopk_keeps_the_energy_of_exact_topk(density):
    x = data("laplace", 1_000_000)
    exact, approximate = (round_trip(codec, x).norm() for codec in (TopK(density), MSTopK(density)))
    assert approximate**2 > 0.999 * exact**2
    assert approximate <= exact


# What arrives


@every_sparse
@settings(max_examples=15, deadline=None)
@given(numel=st.integers(0, 700), rows=st.integers(1, 3), seed=st.integers(0, 99))
def test_declared_bytes_are_sent_bytes_and_batches_are_loops(codec, numel, rows, seed):
    x = data("gauss", rows * numel, seed).view(rows, numel)
    wire = codec.encode(x, rng(codec))
    assert wire.shape == (rows, codec.nbytes(numel))
    decoded = codec.decode(wire, numel)
    for i in range(rows):
        assert same(codec.decode(wire[i], numel), decoded[i])
        if not codec.needs_rng:
            assert torch.equal(codec.encode(x[i]), wire[i])


@pytest.mark.parametrize("numel", [1, 2, 63, 64, 65, 1000, LONG])
@every_exact
def test_sent_elements_arrive_to_the_bit_and_others_are_zero(codec, numel):
    x = data("gauss", numel)
    decoded = round_trip(codec, x)
    assert int((decoded != 0).sum()) <= codec._chosen(numel)
    if not codec.unbiased:
        assert bool(((bits(decoded) == bits(x)) | (decoded == 0)).all())
    if isinstance(codec, TopK | RandomK):
        assert int((decoded != 0).sum()) == codec._chosen(numel)


@every_sparse
@pytest.mark.parametrize("kind", KINDS)
def test_residual_plus_sent_is_given(codec, kind):
    x, residual = data(kind, 600).view(2, 300), data("gauss", 600, 9).view(2, 300) * 0.1
    total = x + residual
    wire = codec.encode(x, rng(codec), residual=residual)
    assert torch.equal(wire, codec.encode(total, rng(codec)))
    decoded = codec.decode(wire, 300)
    torch.testing.assert_close(residual, total - decoded, rtol=0, atol=0, equal_nan=True)
    if codec in EXACT and not codec.unbiased:
        assert same(residual + decoded, total + 0.0)
        assert bool(((residual == 0) | (decoded == 0)).all())


@every_sparse
def test_zeros_arrive_as_zeros(codec):
    assert not round_trip(codec, torch.zeros(300)).any()
    if codec.keeps_zeros:
        x = torch.where(torch.arange(300) % 3 == 0, data("gauss", 300), 0.0)
        assert not round_trip(codec, x)[x == 0].any()


@every_sparse
@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("many", [1, 250])
def test_what_is_not_finite_never_arrives_finite(codec, bad, many):
    x = data("gauss", 300)
    x[torch.randperm(300, generator=torch.Generator().manual_seed(1))[:many]] = bad
    decoded = round_trip(codec, x)
    assert not decoded.isfinite().all()
    if codec in EXACT and not isinstance(codec, RandomK):
        sent = min(many, codec._chosen(300))
        assert int((~decoded.isfinite()).sum()) == sent
        assert same(decoded[~decoded.isfinite()].abs(), torch.full((sent,), abs(bad)).abs())


def test_nan_is_chosen_before_infinity_and_infinity_before_all_else():
    x = torch.tensor([3e38, -math.inf, 1.0, math.nan, math.inf])
    assert select.largest(x.view(1, -1), 1).tolist() == [[3]]
    assert select.largest(x.view(1, -1), 2).tolist() == [[1, 3]]
    for bisected in (select.bisected, select.bisected_reference):
        assert bisected(x.view(1, -1), 2, 30).tolist() == [[1, 3]]  # the first two of three
        assert bisected(x.view(1, -1), 4, 30).tolist() == [[0, 1, 3, 4]]


@every_sparse
def test_decode_add_adds_the_weighted_vector(codec):
    x, out = data("gauss", 500), data("laplace", 500)
    wire = codec.encode(x, rng(codec))
    expected = out + 0.5 * codec.decode(wire, 500)
    assert torch.allclose(codec.decode_add(wire, out.clone(), 0.5), expected, rtol=1e-6, atol=1e-7)


def test_values_may_have_any_codec_and_the_stream_reaches_it():
    x = data("gauss", 4000)
    for spec in ("fp16", "int8/256", "qsgd4/512", "nf4/64", "onebit/64", "topk/0.5"):
        codec = TopK(0.1, spec)
        assert codec.needs_rng == codecs.get(spec).needs_rng
        chosen = select.largest(x.view(1, -1), 400)[0]
        inside = codec.values.encode(x[chosen], rng(codec))
        assert same(round_trip(codec, x)[chosen], codec.values.decode(inside, 400))


# Random places


@pytest.mark.parametrize(("numel", "k"), [(1, 1), (100, 7), (1000, 1000), (5000, 700), (1 << 20, 1025)])
def test_one_element_is_drawn_from_each_stratum(numel, k):
    key = STREAM.key
    places = select.drawn(torch.tensor([key, key[::-1]]), numel, k)
    start, length = select.strata(numel, k, places.device)
    assert int(length.min()) >= 1
    assert int(length.max()) - int(length.min()) <= 1
    assert int(length.sum()) == numel
    assert bool(((places >= start) & (places < start + length)).all())
    words = reference.stream_words(key, k).view(torch.int32).long() & reference.MASK32
    assert torch.equal(places[0], start + (words * length >> 32))


def test_every_element_is_drawn_equally_often_and_rows_differ():
    codec, runs = RandomK(0.25), 4000
    drawn = codec.decode(codec.encode(torch.ones(runs, 40), STREAM), 40)
    often = drawn.sum(0)
    assert bool((drawn.sum(1) == 10).all())
    assert float(((often - runs / 4) ** 2 / (runs / 4)).sum()) < 80  # chi-square, 30 degrees of freedom
    assert len({tuple(row) for row in drawn[:50].tolist()}) == 50


def test_unbiased_random_places_are_right_on_average():
    codec, x = RandomK(0.3, unbiased=True), data("gauss", 33)
    runs = 20_000
    mean = codec.decode(codec.encode(x.expand(runs, -1), STREAM), 33).mean(0)
    assert float(((mean - x) / x.abs()).abs().max()) < 6 * math.sqrt(3 / runs)
    assert codec.unbiased
    assert not RandomK(0.3).unbiased


def test_places_and_roundings_of_one_stream_are_independent():
    """In one row: what is drawn with a word must not be rounded with it. Further rows have other words."""
    codec, values = RandomK(0.25, "int4/64~sr"), (1.5, 2.5, 3.5, 7.0)  # between steps, but for the largest
    x = torch.tensor(values).repeat(4096)
    arrived = codec.decode(codec.encode(x, STREAM), x.numel()).view(-1, 4)
    for place, value in enumerate(values):
        sent = arrived[:, place][arrived[:, place] != 0]
        assert float(sent.mean()) == pytest.approx(value, abs=6 * 0.5 / math.sqrt(1024))


def test_the_same_stream_draws_the_same_and_others_do_not():
    codec, x = RandomK(0.1), data("gauss", 1000)
    wire = codec.encode(x, STREAM)
    assert torch.equal(wire, codec.encode(x, STREAM))
    assert not torch.equal(wire, codec.encode(x, Stream(seed=3, step=2, tensor="weights")))


# Cosines


def test_the_transform_is_the_orthonormal_dct():
    for size in (1, 2, 7, 64, 100):
        place = torch.arange(size, dtype=torch.float64)
        basis = torch.cos(math.pi / size * place.view(-1, 1) * (place + 0.5)) * math.sqrt(2 / size)
        basis[0] /= math.sqrt(2)
        x = data("gauss", 5 * size * size).view(5, size, size)
        expected = basis @ x.double() @ basis.T
        scale = float(x.abs().max()) * size * 2.0**-22
        assert float((transform(x) - expected).abs().max()) < scale
        assert float((transform(transform(x), inverse=True) - x).abs().max()) < scale
        assert float((transform(x[:, :1]) - x[:, :1].double() @ basis.T).abs().max()) < scale


@pytest.mark.parametrize("scale", [1e-42, 1e-30, 1.0, 1e36])
def test_all_coefficients_give_the_vector_back(scale):
    codec = DctTopK(16, 16)
    x = data("gauss", 100) * scale
    assert float((round_trip(codec, x) - x).abs().max()) <= max(1e-6 * float(x.abs().max()), 3e-45)


def test_a_matrix_is_cut_into_tiles_of_its_divisors():
    codec = DctTopK(64, 8).for_shape((96, 3, 5, 5))
    assert codec.name == "dct/64:8@96x75"
    assert codec._sides == (48, 25)
    assert codec._count(96 * 75) == 6
    assert codec.sections(96 * 75)[0].bits == 11
    assert DctTopK(64, 8).for_shape((31,)) == DctTopK(64, 8)
    assert codecs.get(codec.spec) == codec
    place = torch.arange(96.0)
    smooth = torch.cos(math.pi / 48 * (place[:48] + 0.5) * 3).repeat(2).view(-1, 1) * torch.ones(75)
    one = DctTopK(64, 1).for_shape((96, 75))
    assert torch.allclose(round_trip(one, smooth.flatten()), smooth.flatten(), atol=1e-5)
    with pytest.raises(CodecError, match="7200 elements"):
        codec.nbytes(100)


def test_coefficients_of_equal_size_are_taken_from_the_first():
    places, kept = _largest(torch.tensor([[0.0, 1.0, -1.0, 1.0], [2.0, -2.0, 2.0, -3.0]]), 2)
    assert places.tolist() == [[1, 2], [0, 3]]
    assert kept.tolist() == [[1.0, -1.0], [2.0, -3.0]]


def test_only_the_tile_that_is_not_finite_becomes_nan():
    x = data("gauss", 256)
    x[70] = math.inf
    decoded = round_trip(DctTopK(64, 8), x)
    assert bool(decoded[64:128].isnan().all())
    assert bool(decoded[:64].isfinite().all())
    assert bool(decoded[128:].isfinite().all())


# Wires that are none, codecs that are none


def corrupt(codec, wire, name, numel, offset=0, value=255):
    at = 0
    for each in codec.sections(numel):
        if each.name == name:
            wire[..., at + offset] = value
        at += each.nbytes
    return wire


@pytest.mark.parametrize("codec", [TopK(0.05), MSTopK(0.05), Threshold(0.5, 0.1), DctTopK(48, 8)])
def test_places_outside_or_out_of_order_are_refused(codec):
    x = data("gauss", 1000)
    wire = codec.encode(x)
    out = torch.ones(1000)
    for value in (255, 0):  # too large; or no larger than the one before
        broken = wire.clone()
        for offset in range(4):
            corrupt(codec, broken, "indices", 1000, offset, value)
        with pytest.raises(WireError, match="invalid indices: out of range or not ascending"):
            codec.decode(broken, 1000, out=out)
        with pytest.raises(WireError):
            codec.decode_add(broken, out)
    assert bool((out == 1).all())


def test_a_count_above_the_capacity_is_refused():
    codec = Threshold(0.5, 0.1)
    wire = codec.encode(data("gauss", 1000))
    assert wire[:4].view(torch.int32).item() == 100
    with pytest.raises(WireError):
        codec.decode(corrupt(codec, wire.clone(), "count", 1000, 0, 101), 1000)
    with pytest.raises(WireError):
        codec.decode(corrupt(codec, wire.clone(), "count", 1000, 3), 1000)


def test_what_is_behind_the_count_is_not_read():
    codec = Threshold(100.0, 0.1)
    wire = codec.encode(data("gauss", 1000))
    for each in ("indices", "values"):
        for offset in range(40):
            corrupt(codec, wire, each, 1000, offset)
    assert not codec.decode(wire, 1000).any()
    ones = torch.ones(1000)
    assert bool((codec.decode_add(wire, ones) == 1).all())


@every_sparse
def test_wires_of_another_codec_or_length_are_refused(codec):
    wire = codec.encode(data("gauss", 300), rng(codec))
    with pytest.raises(WireError):
        codec.decode(wire[:-1], 300)
    write_tags(wire.view(1, -1), 12345)
    with pytest.raises(WireError, match="tag"):
        codec.decode(wire, 300)


def test_specs_name_everything_that_matters():
    assert TopK(0.01).spec == "topk/0.01"
    assert TopK(0.01, "bf16").with_feedback().spec == "topk/0.01~bf16+ef"
    assert TopK(1e-5, "int8/256~sr").spec == "topk/1e-05~int8/256~sr"
    assert MSTopK(0.01, rounds=10).spec == "mstopk/0.01~rounds10"
    assert RandomK(0.5, "qsgd4/512", unbiased=True).spec == "randomk/0.5~unbiased~qsgd4/512"
    assert Threshold(1e20, 0.1).spec == "threshold/1e20~cap0.1"
    assert DctTopK(64, 8, "fp16").spec == "dct/64:8~fp16"
    assert spell(1 / 3) == "0.3333333333333333"


@every_sparse
def test_specs_lead_back_to_the_codec(codec):
    assert codecs.get(codec.spec) == codec


def test_fractions_are_taken_as_written():
    assert [part(0.07, 100), part(0.01, 1), part(0.01, 0), part(1.0, 9), part(0.001, 1001)] == [7, 1, 0, 9, 2]


def test_a_place_has_no_more_bits_than_the_last_one_needs():
    assert [index_bits(numel) for numel in (1, 2, 3, 4, 5, 64, 65, 1 << 20)] == [1, 1, 2, 2, 3, 6, 7, 20]
    for codec in (TopK(0.5), MSTopK(0.5), Threshold(1.0, 0.5), DctTopK(64, 32)):
        assert {each.name: each.bits for each in codec.sections(64)}["indices"] == 6


def test_codecs_that_cannot_be_are_refused():
    for fraction in (0, -0.1, 1.5, math.nan):
        with pytest.raises(CodecError):
            TopK(fraction)
        with pytest.raises(CodecError):
            Threshold(1.0, fraction)
    for threshold in (0, -1.0, math.nan, math.inf, 1e-60, 1e60):
        with pytest.raises(CodecError, match="positive float32"):
            Threshold(threshold)
    with pytest.raises(CodecError, match="feedback belongs"):
        TopK(0.1, "onebit/64+ef")
    with pytest.raises(CodecError, match="agreement"):
        TopK(0.1, "qsgd8~shared")
    with pytest.raises(CodecError, match="right on average"):
        RandomK(0.1, "fp16", unbiased=True)
    with pytest.raises(CodecError, match="round"):
        MSTopK(0.1, rounds=0)
    for chunk, k in ((0, 1), (5000, 1), (64, 0), (4, 17)):
        with pytest.raises(CodecError):
            DctTopK(chunk, k)
