"""The random generator against Random123's known answers and against Philox written from its definition.

Then the words of a stream: that they are the documented ones in every kernel, look random, and differ
between streams.
"""

import zlib

import numpy as np
import pytest
import torch

from thinwire import Stream, formats
from thinwire.kernels import reference

MASK = 0xFFFFFFFF
PI = (0x243F6A88, 0x85A308D3, 0x13198A2E, 0x03707344), (0xA4093822, 0x299F31D0)
ONES = (MASK,) * 4, (MASK,) * 2
ZEROS = (0,) * 4, (0,) * 2

# From the file kat_vectors of Random123.
KNOWN = {
    (7, *ZEROS): (0x5F6FB709, 0x0D893F64, 0x4F121F81, 0x4F730A48),
    (7, *ONES): (0x5207DDC2, 0x45165E59, 0x4D8EE751, 0x8C52F662),
    (7, *PI): (0x4DFCCABA, 0x190A87F0, 0xC47362BA, 0xB6B5242A),
    (10, *ZEROS): (0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8),
    (10, *ONES): (0x408F276D, 0x41C83B0E, 0xA20BC7C6, 0x6D5451FD),
    (10, *PI): (0xD16CFE09, 0x94FDCCEB, 0x5001E420, 0x24126EA1),
}


def philox4x32(rounds, counter, key):
    """Salmon et al. 2011, section 3.3: multiply, swap halves, mix in the key, advance the key."""
    x0, x1, x2, x3 = counter
    k0, k1 = key
    for _ in range(rounds):
        high0, low0 = divmod(0xD2511F53 * x0, 1 << 32)
        high1, low1 = divmod(0xCD9E8D57 * x2, 1 << 32)
        x0, x1, x2, x3 = high1 ^ x1 ^ k0, low1, high0 ^ x3 ^ k1, low0
        k0, k1 = (k0 + 0x9E3779B9) & MASK, (k1 + 0xBB67AE85) & MASK
    return x0, x1, x2, x3


def expected_key(stream):
    tensor = zlib.crc32(stream.tensor.encode()) if isinstance(stream.tensor, str) else stream.tensor
    counter = (stream.step & MASK, stream.step >> 32, tensor, stream.rank)
    return philox4x32(7, counter, (stream.seed & MASK, stream.seed >> 32))


def expected_word(key, index):
    call = 128 * (index // 512) + index % 128
    words = philox4x32(7, (call & MASK, call >> 32, key[2], key[3]), key[:2])
    return words[(index // 128) % 4]


STREAMS = [
    Stream(seed=0),
    Stream(seed=1, step=10, tensor="layer.weight", rank=3),
    Stream(seed=(1 << 64) - 1, step=(1 << 64) - 1, tensor=MASK, rank=MASK),
    Stream(seed=0x0123456789ABCDEF, step=1 << 40, tensor=7, rank=1),
]


@pytest.mark.parametrize(("question", "answer"), KNOWN.items())
def test_the_definition_gives_the_known_answers(question, answer):
    assert philox4x32(*question) == answer


@pytest.mark.parametrize(("counter", "key"), [ZEROS, ONES, PI])
def test_the_generator_gives_the_known_answers(counter, key):
    call = counter[0] | counter[1] << 32
    assert reference.philox(call, (*key, *counter[2:])) == KNOWN[7, counter, key]


def test_the_generator_agrees_with_the_definition_on_tensors_of_calls():
    calls = torch.from_numpy(np.random.default_rng(1).integers(0, 1 << 63, 500))
    calls[:4] = torch.tensor([0, 1, MASK, MASK + 1])
    words = torch.stack(reference.philox(calls, (*PI[1], *PI[0][2:])), dim=1)
    expected = [philox4x32(7, (call & MASK, call >> 32, *PI[0][2:]), PI[1]) for call in calls.tolist()]
    assert words.tolist() == [list(each) for each in expected]


@pytest.mark.parametrize("stream", STREAMS)
def test_a_streams_key_is_one_call_keyed_by_the_seed(stream):
    assert stream.key == expected_key(stream)


@pytest.mark.parametrize("stream", STREAMS)
def test_a_streams_words_are_the_documented_ones(stream):
    key = expected_key(stream)
    words = stream.words(1500)
    assert words.dtype == torch.uint32
    assert words.tolist() == [expected_word(key, index) for index in range(1500)]
    for numel in (0, 1, 127, 128, 511, 512, 513):
        assert torch.equal(stream.words(numel), words[:numel])


@pytest.mark.parametrize("name", ["float8_e4m3fn", "bfloat16", "int8", "posit8_1"])
@pytest.mark.parametrize("numel", [1, 511, 1025, (1 << 20) + 777])
def test_rounding_with_a_stream_is_rounding_with_its_words(name, numel):
    """The compiled kernels generate words themselves, and the longest input is spread over threads."""
    format, stream = formats.get(name), STREAMS[1]
    x = torch.randn(numel, generator=torch.Generator().manual_seed(2))
    ours = format.to_codes(x, "stochastic", stream)
    assert torch.equal(ours, format.to_codes(x, "stochastic", stream.words(numel)))


@pytest.fixture(scope="module")
def words():
    return Stream(seed=2024, step=5, tensor="words").words(1 << 20).numpy()


def test_every_bit_is_set_half_of_the_time(words):
    """Within five standard deviations."""
    bits = np.unpackbits(words.view(np.uint8).reshape(-1, 4), axis=1)
    assert np.abs(bits.mean(axis=0) - 0.5).max() < 5 * 0.5 / np.sqrt(words.size)


@pytest.mark.parametrize("byte", range(4))
def test_every_byte_is_uniform(words, byte):
    """Chi-square with 255 degrees of freedom: mean 255, within five standard deviations of sqrt(510)."""
    counts = np.bincount(words >> np.uint32(8 * byte) & np.uint32(255), minlength=256)
    expected = words.size / 256
    chi_square = ((counts - expected) ** 2 / expected).sum()
    assert abs(chi_square - 255) < 5 * np.sqrt(510)


@pytest.mark.parametrize("lag", [1, 2, 3, 4, 127, 128, 256, 384, 512])
def test_words_are_not_correlated_with_later_ones(words, lag):
    """Within five standard deviations; 128 elements on is the next word of the same call."""
    scaled = words / 2.0**32 - 0.5
    correlation = 12 * (scaled[lag:] * scaled[:-lag]).mean()
    assert abs(correlation) < 5 / np.sqrt(words.size - lag)


def test_no_call_is_repeated(words):
    """A million 32-bit words hold about 128 equal pairs by chance, but no equal pair of two in a row."""
    pairs = words[1:].astype(np.uint64) << np.uint64(32) | words[:-1]
    assert np.unique(pairs).size == pairs.size
    assert words.size - np.unique(words).size < 200


@pytest.mark.parametrize(
    "other",
    [
        Stream(seed=2, step=3, tensor=4, rank=5),
        Stream(seed=1 + (1 << 32), step=3, tensor=4, rank=5),
        Stream(seed=1, step=4, tensor=4, rank=5),
        Stream(seed=1, step=3 + (1 << 32), tensor=4, rank=5),
        Stream(seed=1, step=3, tensor=5, rank=5),
        Stream(seed=1, step=3, tensor="4", rank=5),
        Stream(seed=1, step=3, tensor=4, rank=6),
        Stream(seed=3, step=1, tensor=5, rank=4),
    ],
)
def test_streams_that_differ_in_one_field_share_no_words(other):
    """Two sets of 4096 words would share one by chance in one case of 256."""
    words = Stream(seed=1, step=3, tensor=4, rank=5).words(4096)
    assert np.intersect1d(words.numpy(), other.words(4096).numpy()).size == 0
