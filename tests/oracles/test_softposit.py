"""Posits against SoftPosit: posit(8,0), posit(16,1) and posit(n,2) for n from 3 to 16 in full.

Every code must decode to the same value and every probe must get the same code. Shorter posits with
es = 0 and 1 have no function of their own there; they are compared as prefixes of longer ones.
"""

import numpy as np
import pytest
import softposit
import torch

from thinwire.formats import Posit


class Peer:
    """One of SoftPosit's types: codes of `bits` bits, held in the upper part of `held` bits."""

    def __init__(self, bits, held, cell, to_double, from_double):
        self.shift = held - bits
        self.cell, self.to_double, self.from_double = cell, to_double, from_double

    def value(self, code):
        cell = self.cell()
        cell.v = int(code) << self.shift
        value = self.to_double(cell)
        return np.nan if np.isinf(value) else value  # NaR is Inf there

    def values(self, codes):
        return np.array([self.value(code) for code in codes])

    def codes(self, x):
        return np.array([self.from_double(each).v >> self.shift for each in x.tolist()])


def posit8_0(bits=8):
    return Peer(bits, 8, softposit.posit8_t, softposit.convertP8ToDouble, softposit.convertDoubleToP8)


def posit16_1(bits=16):
    return Peer(bits, 16, softposit.posit16_t, softposit.convertP16ToDouble, softposit.convertDoubleToP16)


def posit_2(bits):
    def from_double(x):
        return softposit.convertDoubleToPX2(x, bits)

    return Peer(bits, 32, softposit.posit_2_t, softposit.convertPX2ToDouble, from_double)


PAIRS = [(Posit(8, 0), posit8_0()), (Posit(16, 1), posit16_1())]
PAIRS += [(Posit(n, 2), posit_2(n)) for n in range(3, 17)]
PREFIXES = [(Posit(n, 0), posit8_0) for n in range(3, 8)]
PREFIXES += [(Posit(n, 1), posit16_1) for n in range(3, 16)]


def name(value):
    return value.name if isinstance(value, Posit) else ""


def all_values(format):
    dtype = torch.uint8 if format.bits <= 8 else torch.uint16
    return format.from_codes(torch.arange(1 << format.bits).to(dtype)).numpy()


def with_geometric_means(format, x):
    """Where exponent bits are cut off, posits change over at the geometric mean, not at the midpoint."""
    values = format.values().double()
    low, high = values[values > 0][:-1], values[values > 0][1:]
    means = (low * high).sqrt().float()
    means = torch.cat((means, -means)).numpy()
    around = [np.nextafter(means, np.float32(side)) for side in (-np.inf, np.inf)]
    return torch.cat((x, *(torch.from_numpy(each) for each in (means, *around))))


@pytest.mark.parametrize(("format", "peer"), PAIRS, ids=name)
def test_every_code_has_the_same_value(format, peer):
    np.testing.assert_array_equal(all_values(format), peer.values(range(1 << format.bits)))


@pytest.mark.parametrize(("format", "peer"), PAIRS, ids=name)
def test_nearest_gives_the_same_code(format, peer, probes):
    x = with_geometric_means(format, probes(format))
    np.testing.assert_array_equal(format.to_codes(x).numpy(), peer.codes(x))


@pytest.mark.parametrize(("format", "peer"), PREFIXES, ids=name)
def test_every_code_has_the_value_of_the_longer_posit(format, peer):
    np.testing.assert_array_equal(all_values(format), peer(format.bits).values(range(1 << format.bits)))


@pytest.mark.parametrize(("format", "peer"), PREFIXES, ids=name)
def test_codes_change_at_the_posit_one_bit_longer(format, peer):
    """Between codes c and c+1 lies code 2c+1 of one more bit: a tie, which goes to the even code."""
    codes = np.arange(1, (1 << (format.bits - 1)) - 1)
    ties = peer(format.bits + 1).values(2 * codes + 1).astype(np.float32)
    below, above = np.nextafter(ties, np.float32(0)), np.nextafter(ties, np.float32(np.inf))
    for x, expected in ((below, codes), (above, codes + 1), (ties, codes + codes % 2)):
        np.testing.assert_array_equal(format.to_codes(torch.from_numpy(x)).numpy(), expected)
        negative = format.to_codes(torch.from_numpy(-x)).numpy()
        np.testing.assert_array_equal(negative, (1 << format.bits) - expected)
