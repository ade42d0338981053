"""Bytes of whole networks under the methods of the 2018 communication study.

The table was computed apart from this package, from the networks' layer lists and the wire formats of CNTK's
one-bit SGD (Seide et al. 2014) and of QSGD (Alistarh et al. 2017). It is no figure of a paper.
"""

import functools
import math

import pytest

from thinwire import codecs, zoo
from thinwire.codecs.footprint import STUDY, footprint

METHODS = ("32bit", "1bit", "1bit*", "QSGD 16bit", "QSGD 8bit", "QSGD 4bit", "QSGD 2bit")
#: Megabytes (10**6 bytes), to one decimal or as many as are given.
MEGABYTES = {
    "alexnet": (248.0, 20.1, 15.5, 124.1, 62.5, 31.5, 17.5),
    "vgg19": (574.7, 95.8, 36.0, 287.4, 144.8, 73.0, 40.5),
    "resnet50": (102.2, 191.1, 6.6, 51.3, 26.0, 13.2, 7.4),
    "resnet152": (240.8, 459.3, 15.7, 120.75, 61.2, 31.15, 17.55),
    "resnet110": (6.9, 6.9, 2.0, 4.3, 3.0, 2.35, 2.1),
    "an4_lstm": (54.5, 1.76, 3.5, 27.3, 13.8, 7.0, 3.9),
}
TOLERANCE = 0.06  # rounding to one decimal, and the tags and padding of hundreds of tensors
TAG = 4
SMALL = 10_000  # tensors of fewer elements stay float32, unless the method takes every tensor
EVERY = ("32bit", "1bit")
#: Bits, elements to a block, float32 numbers to a block.
BLOCKS = {
    "1bit*": (1, 64, 2),
    "QSGD 16bit": (16, 8192, 1),
    "QSGD 8bit": (8, 512, 1),
    "QSGD 4bit": (4, 512, 1),
    "QSGD 2bit": (2, 128, 1),
}

shapes = functools.cache(zoo.shapes)


def measured(net, method):
    return footprint(shapes(net), codecs.get(STUDY[method]), 0 if method in EVERY else SMALL)


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("net", MEGABYTES)
def test_networks_take_the_bytes_of_the_table(net, method):
    expected = MEGABYTES[net][METHODS.index(method)]
    assert measured(net, method)["wire_nbytes"] / 1e6 == pytest.approx(expected, abs=TOLERANCE)


def test_the_rule_for_small_tensors_is_the_default():
    assert set(METHODS) == set(STUDY)
    for method in METHODS:
        assert footprint(shapes("resnet110"), codecs.get(STUDY[method])) == measured("resnet110", method)


@pytest.mark.parametrize("net", MEGABYTES)
def test_column_wise_one_bit_is_counted_to_the_byte(net):
    """8 bytes of means and 4 to every 32 rows of a column: over `out` of a matrix, over a kernel's width."""
    total = 0
    for shape in shapes(net).values():
        rows = shape[0] if len(shape) <= 2 else shape[-1]
        columns = math.prod(shape) // rows
        total += columns * (8 + 4 * math.ceil(rows / 32)) + TAG
    assert measured(net, "1bit")["wire_nbytes"] == total


@pytest.mark.parametrize("method", BLOCKS)
@pytest.mark.parametrize("net", MEGABYTES)
def test_blocks_are_counted_to_the_padding(net, method):
    """b bits to an element and 4 bytes to a scale; the rest is a tag and less than two groups of 64."""
    width, block, scales = BLOCKS[method]
    low = high = 0
    for shape in shapes(net).values():
        numel = math.prod(shape)
        small = numel < SMALL
        bare = 4 * numel if small else numel * width / 8 + 4 * scales * math.ceil(numel / block)
        low += bare + (0 if small else TAG)
        high += bare + (0 if small else TAG + 8 * width + 4)
    assert low <= measured(net, method)["wire_nbytes"] < high


@pytest.mark.parametrize("net", MEGABYTES)
def test_counts_and_ratios_follow_from_the_shapes(net):
    params = zoo.MODELS[net].params
    for method in METHODS:
        counts = measured(net, method)
        assert counts["params"] == params
        assert counts["fp32_nbytes"] == 4 * params
        assert counts["ratio"] == counts["fp32_nbytes"] / counts["wire_nbytes"]
    assert measured(net, "32bit")["ratio"] == 1
    assert measured(net, "1bit")["quantised_fraction"] == 1


def test_only_some_parameters_of_a_small_network_are_quantised():
    """Tensors under 10 000 elements stay float32; in ResNet-110 that is a quarter of all parameters."""
    assert measured("resnet110", "QSGD 4bit")["quantised_fraction"] == pytest.approx(0.756, abs=0.001)
    for net in set(MEGABYTES) - {"resnet110"}:
        assert measured(net, "QSGD 4bit")["quantised_fraction"] > 0.99


def test_columns_expand_networks_of_small_kernels_and_suit_dense_ones():
    """Why the study reshapes: a 1x1 kernel costs 12 bytes for 4, a dense column of 2048 almost nothing."""
    assert measured("resnet50", "1bit")["ratio"] < 0.55
    assert measured("resnet110", "1bit")["ratio"] == pytest.approx(1.0, abs=0.01)
    assert measured("an4_lstm", "1bit")["ratio"] > 30
    for net in set(MEGABYTES) - {"resnet110"}:
        assert measured(net, "1bit*")["ratio"] > 15


def test_tensors_of_just_the_least_size_are_quantised():
    codec = codecs.get("qsgd4/512")
    for numel, expected in ((SMALL - 1, 4 * (SMALL - 1)), (SMALL, codec.nbytes(SMALL))):
        counts = footprint({"w": (numel,)}, codec, SMALL)
        assert counts["wire_nbytes"] == expected
        assert counts["quantised_fraction"] == (numel == SMALL)


def test_no_tensors_take_no_bytes():
    assert footprint({}, codecs.get("int8/256")) == {
        "params": 0, "fp32_nbytes": 0, "wire_nbytes": 0, "ratio": 1.0, "quantised_fraction": 0.0,
    }  # fmt: skip
