"""Tables against the maps of bitsandbytes, bit for bit, and rounding against its quantizers on the CPU.

Its quantizers are not exact: the 8-bit one rounds its input to one of 2**16 even steps over [-1, 1] first,
the 4-bit one rounds the midpoints to float32. Where they differ from thinwire, ours must be the nearer.
"""

import bitsandbytes.functional as bnb
import pytest
import torch

from thinwire import formats
from thinwire.formats.table import bnb_linear

MAPS = {
    "bnb_dynamic": lambda: bnb.create_dynamic_map(),
    "bnb_dynamic_unsigned": lambda: bnb.create_dynamic_map(signed=False),
    "bnb_linear": lambda: bnb.create_linear_map(),
}
GRID_STEP = 2 / 65535


def assert_same_table(numbers, theirs):
    ours = torch.tensor(numbers, dtype=torch.float32)
    assert theirs.dtype == torch.float32
    assert torch.equal(ours.view(torch.int32), theirs.view(torch.int32))


def unit_blocks(x, blocksize):
    """Inputs within [-1, 1] in blocks that begin with 1, so that bitsandbytes scales them by one."""
    x = x[x.abs() <= 1]
    rows = x[: x.numel() // (blocksize - 1) * (blocksize - 1)].view(-1, blocksize - 1)
    return torch.cat((torch.ones(len(rows), 1), rows), dim=1)


def distance(format, codes, x):
    return (format.from_codes(codes).double() - x.double()).abs()


@pytest.mark.parametrize("name", MAPS)
def test_the_8_bit_tables_are_the_same(name):
    assert len(formats.get(name).numbers) == 256
    assert_same_table(formats.get(name).numbers, MAPS[name]())


def test_the_unsigned_linear_table_is_the_same():
    assert_same_table(bnb_linear(signed=False), bnb.create_linear_map(signed=False))


def test_nf4_is_the_same_table():
    assert_same_table(formats.get("nf4").numbers, bnb.get_4bit_type("nf4", device="cpu"))


@pytest.mark.parametrize("name", MAPS)
def test_nearest_is_at_least_as_near_as_the_8_bit_quantizer(name, probes):
    format = formats.get(name)
    x = unit_blocks(probes(format), blocksize=256)
    theirs, state = bnb.quantize_blockwise(x, code=MAPS[name](), blocksize=256)
    assert torch.all(state.absmax == 1)
    lost = distance(format, theirs, x) - distance(format, format.to_codes(x), x)
    assert lost.min() >= 0
    assert lost.max() <= GRID_STEP


@pytest.mark.parametrize("name", MAPS)
def test_8_bit_codes_are_the_same_away_from_the_change_over_points(name):
    format = formats.get(name)
    numbers = torch.tensor(format.numbers, dtype=torch.float64)
    middles = (numbers[1:] + numbers[:-1]) / 2
    x = torch.randn(1 << 16, generator=torch.Generator().manual_seed(5)).div(6).clamp(-1, 1)
    x = unit_blocks(x, blocksize=256)
    theirs, _ = bnb.quantize_blockwise(x, code=MAPS[name](), blocksize=256)
    near = torch.searchsorted(middles, x.double() - GRID_STEP) != torch.searchsorted(middles, x + GRID_STEP)
    assert near.float().mean() < 0.1
    assert torch.equal(format.to_codes(x)[~near], theirs[~near])


@pytest.mark.parametrize("name", MAPS)
def test_every_code_dequantizes_to_the_same_value(name):
    format = formats.get(name)
    codes = torch.arange(256).to(torch.uint8)
    theirs = bnb.dequantize_blockwise(codes, absmax=torch.ones(1), code=MAPS[name](), blocksize=256)
    assert torch.equal(format.from_codes(codes), theirs)


def test_nf4_codes_are_the_same_except_at_the_rounded_midpoints(probes):
    """There bitsandbytes goes down; thinwire goes to the nearer one, or if it is a tie to the even code."""
    format = formats.get("nf4")
    numbers = torch.tensor(format.numbers)
    x = unit_blocks(probes(format), blocksize=64)
    packed, _ = bnb.quantize_4bit(x, blocksize=64, quant_type="nf4")
    theirs = torch.stack((packed.view(-1) >> 4, packed.view(-1) & 15), dim=1).view_as(x)
    ours = format.to_codes(x)
    at_midpoint = torch.isin(x, (numbers[1:] + numbers[:-1]) / 2)
    assert torch.equal(ours[~at_midpoint], theirs[~at_midpoint])
    assert torch.all(distance(format, ours, x) <= distance(format, theirs, x))
