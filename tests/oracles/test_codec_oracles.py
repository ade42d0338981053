"""Whole codecs against independent implementations: wires bit for bit where arithmetic allows.

- MX: the OCP Microscaling rules (v1.0) written out in numpy with ml_dtypes' casts; gfloat; torchao.
- NVFP4: its two levels of scales in numpy with ml_dtypes' casts; torchao.
- Blocks of 8-bit dynamic and NF4 numbers: bitsandbytes. Evenly spaced ones: torch's fake quantisation.
- One-bit SGD: two means in float64, and the word layout of CNTK.
"""

import math

import bitsandbytes.functional as bnb
import gfloat.block
import gfloat.formats
import ml_dtypes
import numpy as np
import pytest
import torch

from thinwire import Stream, codecs, formats
from thinwire.codecs import CODECS, OneBitColumn

#: Codec, element type of ml_dtypes (None: int8 in 64ths), exponent of its largest value, gfloat, torchao.
MX = {
    "mxfp8": (ml_dtypes.float8_e4m3fn, 8, gfloat.formats.format_info_mxfp8_e4m3, torch.float8_e4m3fn),
    "mxfp8e5": (ml_dtypes.float8_e5m2, 15, gfloat.formats.format_info_mxfp8_e5m2, torch.float8_e5m2),
    "mxfp6": (ml_dtypes.float6_e2m3fn, 2, gfloat.formats.format_info_mxfp6_e2m3, "fp6_e2m3"),
    "mxfp6e3": (ml_dtypes.float6_e3m2fn, 4, gfloat.formats.format_info_mxfp6_e3m2, "fp6_e3m2"),
    "mxfp4": (ml_dtypes.float4_e2m1fn, 2, gfloat.formats.format_info_mxfp4_e2m1, torch.float4_e2m1fn_x2),
    "mxint8": (None, 0, gfloat.formats.format_info_mxint8, None),
}
every_mx = pytest.mark.parametrize("name", MX)
E4M3_MAX, E2M1_MAX = np.float32(448), np.float32(6)


def gauss(*shape, seed=0):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def unpacked(packed, numel, bits):
    """Codes from bytes: parts of 4, 2 or 1 bits in groups of 64, as 8/b rows of 8b bytes' columns."""
    codes, at, shift = np.zeros(numel, np.int64), 0, 0
    for part in (16, 8, 4, 2, 1):
        if not bits & part:
            continue
        if part >= 8:
            nbytes = math.ceil(numel * part / 32) * 4
            piece = packed[at : at + nbytes].view(f"<u{part // 8}").astype(np.int64)
        else:
            nbytes = math.ceil(numel / 64) * 8 * part
            columns = packed[at : at + nbytes].reshape(-1, 1, 8 * part).astype(np.int64)
            rows = np.arange(8 // part).reshape(-1, 1) * part
            piece = (columns >> rows & (1 << part) - 1).reshape(-1)
        codes |= piece[:numel] << shift
        at, shift = at + nbytes, shift + part
    return codes


def parts(codec, wire, numel):
    """The sections of a wire by name, as bytes."""
    sections, at = {}, 0
    for each in codec.sections(numel):
        sections[each.name] = wire.numpy()[at : at + each.nbytes]
        at += each.nbytes
    return sections


def awkward(name):
    """Ordinary numbers, every value and midpoint of the format at scale one, all magnitudes, zeros."""
    format = codecs.get(name)._format
    values = format.values()
    middles = (values[1:] + values[:-1]) / 2
    exact = torch.cat((values, middles, torch.nextafter(middles, torch.tensor(9e9))))
    exact = torch.cat((exact, exact * 1.25, exact.new_zeros(-2 * exact.numel() % 31))).view(-1, 31)
    ones = torch.full((len(exact), 1), float(format.max))
    blocks = torch.cat((ones, exact), 1)
    powers = 2.0 ** torch.arange(-140, 118).float().view(-1, 1)
    wide = gauss(258, 32, seed=2) * powers
    heavy = gauss(64, 32, seed=3) * torch.exp(4 * gauss(64, 32, seed=4))
    extremes = torch.tensor([0.0, -0.0, 1e-45, -1e-45, 1e-38, 3.4e38, -3.4e38, 1e-40])
    rows = [gauss(256, 32), blocks, blocks * 2.0**-30, wide, heavy, torch.zeros(2, 32)]
    rows += [extremes.repeat(4).view(1, 32), extremes[:4].repeat(8).view(1, 32)]
    return torch.cat(rows).flatten()


# MX


def mx_oracle(name, x):
    """Element codes and e8m0 scales: 2**(floor(log2 of the largest) - emax), elements to nearest even."""
    dtype, emax, *_ = MX[name]
    blocks = x.numpy().astype(np.float64).reshape(-1, 32)
    top = np.abs(blocks).max(1)
    exponent = np.where(top > 0, np.frexp(top)[1] - 1, -(10**6)) - emax
    exponent = exponent.clip(-127, 127)
    scaled = np.ldexp(blocks, -exponent[:, None])
    if dtype is None:
        codes = np.rint(scaled * 64).clip(-128, 127).astype(np.int64) & 255
    else:
        largest = float(ml_dtypes.finfo(dtype).max)
        codes = scaled.clip(-largest, largest).astype(np.float32).astype(dtype).view(np.uint8)
    return codes.reshape(-1), (exponent + 127).astype(np.uint8)


@every_mx
def test_mx_wires_are_those_of_the_ocp_rules(name):
    codec, x = codecs.get(name), awkward(name)
    sections = parts(codec, codec.encode(x), x.numel())
    codes, scales = mx_oracle(name, x)
    np.testing.assert_array_equal(sections["scales"][: scales.size], scales)
    np.testing.assert_array_equal(unpacked(sections["codes"], x.numel(), codec._format.bits), codes)


@every_mx
def test_mx_wires_decode_to_what_their_codes_mean(name):
    codec, x = codecs.get(name), awkward(name)
    codes, scales = mx_oracle(name, x)
    dtype = MX[name][0]
    values = codes.astype(np.uint8).view(np.int8 if dtype is None else dtype).astype(np.float64)
    values = values / 64 if dtype is None else values
    expected = np.ldexp(values.reshape(-1, 32), scales.astype(np.int64)[:, None] - 127).reshape(-1)
    with np.errstate(over="ignore"):
        np.testing.assert_array_equal(codec.decode(codec.encode(x), x.numel()).numpy(), np.float32(expected))


@every_mx
def test_a_block_that_is_not_finite_has_the_scale_nan_of_ocp(name):
    codec, x = codecs.get(name), gauss(96)
    x[40] = math.nan
    sections = parts(codec, codec.encode(x), 96)
    assert sections["scales"][:3].tolist()[1] == 255
    assert 255 not in sections["scales"][[0, 2]]


@every_mx
def test_mx_numbers_are_those_of_gfloat(name):
    codec, info = codecs.get(name), MX[name][2]
    x = torch.cat(
        (gauss(40, 32), gauss(20, 32, seed=1) * torch.exp(4 * gauss(20, 32, seed=2)), torch.zeros(1, 32))
    )
    decoded = codec.decode(codec.encode(x.flatten()), x.numel()).view(x.shape)
    for block, ours in zip(x.double().numpy(), decoded.numpy(), strict=True):
        theirs = gfloat.block.quantize_block(info, block, gfloat.block.compute_scale_amax)
        np.testing.assert_array_equal(ours, theirs)


@pytest.mark.parametrize("name", [name for name in MX if MX[name][3] is not None])
def test_mx_wires_are_those_of_torchao(name):
    pytest.importorskip("torchao")
    from torchao.prototype.mx_formats.config import ScaleCalculationMode
    from torchao.prototype.mx_formats.mx_tensor import to_mx

    codec, x = codecs.get(name), awkward(name)
    scales, elements = to_mx(x, MX[name][3], 32, ScaleCalculationMode.FLOOR)
    theirs = elements.view(torch.uint8).flatten().numpy()
    if name == "mxfp4":
        theirs = np.stack((theirs & 15, theirs >> 4), 1).reshape(-1)
    sections = parts(codec, codec.encode(x), x.numel())
    ours = unpacked(sections["codes"], x.numel(), codec._format.bits)
    their_scales = scales.view(torch.uint8).flatten().numpy()
    normal = np.repeat(their_scales > 0, 32)  # under the scale 2**-127 torchao divides by 2**-126
    np.testing.assert_array_equal(sections["scales"][: their_scales.size], their_scales)
    np.testing.assert_array_equal(ours[normal], theirs[normal])
    assert normal.mean() > 0.9


# NVFP4


def nvfp4_scales(x):
    """Block scales as e4m3 codes, the row's factor, and their products, all in float32."""
    top = np.abs(x.reshape(-1, 16)).max(1)
    wanted = top / E2M1_MAX
    factor = wanted.max() / E4M3_MAX
    codes = (wanted / factor).astype(ml_dtypes.float8_e4m3fn)
    return codes.view(np.uint8), factor, codes.astype(np.float32) * factor


def near_midpoint(values, y, relative):
    """Whether another nearest value would be found by going a little up or down."""
    middles = (values[1:] + values[:-1]) / 2
    low, high = (np.searchsorted(middles, y * side) for side in (1 - relative, 1 + relative))
    return low != high


@pytest.mark.parametrize("seed", range(3))
def test_nvfp4_wires_are_those_of_its_definition(seed):
    codec = codecs.get("nvfp4")
    x = (gauss(500, 16, seed=seed) * torch.exp(2 * gauss(500, 1, seed=9 + seed))).flatten()
    x[160:176] = 0.0
    sections = parts(codec, codec.encode(x), x.numel())
    scales, factor, products = nvfp4_scales(x.numpy())
    np.testing.assert_array_equal(sections["scales"][:500], scales)
    assert sections["factor"].view(np.float32)[0] == factor
    with np.errstate(divide="ignore", invalid="ignore"):
        y = x.numpy().astype(np.float64) / np.repeat(products, 16)
    y = np.nan_to_num(y, nan=0.0, posinf=0.0, neginf=0.0).clip(-6, 6)
    codes = y.astype(np.float32).astype(ml_dtypes.float4_e2m1fn).view(np.uint8)
    ours = unpacked(sections["codes"], x.numel(), 4)
    values = np.unique(np.arange(16, dtype=np.uint8).view(ml_dtypes.float4_e2m1fn).astype(np.float64))
    sure = ~near_midpoint(values, y, 2.0**-22) & (y != 0)
    assert sure.mean() > 0.95
    np.testing.assert_array_equal(ours[sure], codes[sure])
    decoded = ours.astype(np.uint8).view(ml_dtypes.float4_e2m1fn).astype(np.float32) * np.repeat(products, 16)
    np.testing.assert_array_equal(codec.decode(codec.encode(x), x.numel()).numpy(), decoded)


def test_nvfp4_wires_are_those_of_torchao():
    pytest.importorskip("torchao")
    from torchao.prototype.mx_formats.nvfp4_tensor import nvfp4_quantize, per_tensor_amax_to_scale

    codec, x = codecs.get("nvfp4"), gauss(16 * 2000)
    scale = per_tensor_amax_to_scale(x.abs().max())
    scales, packed = nvfp4_quantize(x.view(1, -1), 16, scale)
    sections = parts(codec, codec.encode(x), x.numel())
    assert sections["factor"].view(np.float32)[0] == pytest.approx(float(scale), rel=2.0**-22)
    np.testing.assert_array_equal(sections["scales"][:2000], scales.view(torch.uint8).flatten().numpy())
    theirs = packed.flatten().numpy()
    theirs = np.stack((theirs & 15, theirs >> 4), 1).reshape(-1)
    ours = unpacked(sections["codes"], x.numel(), 4)
    assert np.mean(ours != theirs) < 1e-3  # theirs multiplies by a reciprocal that is rounded twice
    values = codec._format.from_codes(torch.arange(16).to(torch.uint8)).numpy()
    assert np.abs(values[ours] - values[theirs]).max() <= 2.0


# Tables


@pytest.mark.parametrize("blocksize", [64, 256, 4096])
@pytest.mark.parametrize("name", ["bnb_dynamic", "bnb_linear"])
def test_blocks_of_8_bit_tables_are_those_of_bitsandbytes(name, blocksize):
    """Codes away from the change-over points: its CPU path rounds to 2**16 even steps over [-1, 1] first."""
    codec, x = codecs.get(f"{name}/{blocksize}"), gauss(4096 * 8) * torch.exp(gauss(4096 * 8, seed=1))
    code = torch.tensor(formats.get(name).numbers)
    theirs, state = bnb.quantize_blockwise(x, code=code, blocksize=blocksize)
    wire = codec.encode(x)
    sections = parts(codec, wire, x.numel())
    ours = torch.from_numpy(sections["codes"].copy())
    absmax = torch.from_numpy(sections["scales"].view(np.float32).copy())
    assert torch.equal(absmax, state.absmax)
    y = x.double() / absmax.double().repeat_interleave(blocksize)
    middles = (code[1:].double() + code[:-1].double()) / 2
    step = 2 / 65535
    near = torch.searchsorted(middles, y - step) != torch.searchsorted(middles, y + step)
    assert near.float().mean() < 0.15
    assert torch.equal(ours[~near], theirs.flatten()[~near])
    theirs = bnb.dequantize_blockwise(ours, absmax=absmax, code=code, blocksize=blocksize)
    assert torch.equal(codec.decode(wire, x.numel()), theirs)


@pytest.mark.parametrize("blocksize", [64, 256, 1024])
def test_blocks_of_nf4_are_those_of_bitsandbytes(blocksize):
    codec, x = codecs.get(f"nf4/{blocksize}"), gauss(4096 * 4)
    packed, state = bnb.quantize_4bit(x, blocksize=blocksize, quant_type="nf4")
    theirs = torch.stack((packed.view(-1) >> 4, packed.view(-1) & 15), dim=1).flatten().numpy()
    wire = codec.encode(x)
    sections = parts(codec, wire, x.numel())
    ours = unpacked(sections["codes"], x.numel(), 4)
    absmax = sections["scales"].view(np.float32)
    np.testing.assert_array_equal(absmax, state.absmax.numpy())
    y = x.numpy().astype(np.float64) / np.repeat(absmax, blocksize)
    sure = ~near_midpoint(np.array(formats.get("nf4").numbers), y, 2.0**-20)
    assert sure.mean() > 0.999
    np.testing.assert_array_equal(ours[sure], theirs[sure])
    swapped = torch.from_numpy((ours[::2] << 4 | ours[1::2]).astype(np.uint8)).view(-1, 1)
    back = bnb.dequantize_4bit(swapped, state)
    assert torch.equal(codec.decode(wire, x.numel()), back.flatten())


# Even steps


@pytest.mark.parametrize(("bits", "block"), [(2, 64), (4, 128), (8, 256), (8, 16), (16, 1024)])
def test_integers_are_those_of_torchs_fake_quantisation(bits, block):
    codec, top = codecs.get(f"int{bits}/{block}"), 2 ** (bits - 1) - 1
    x = gauss(64, block) * torch.exp(3 * gauss(64, block, seed=1))
    scales = x.abs().amax(1) / top
    nothing = torch.zeros(64, dtype=torch.int32)
    theirs = torch.fake_quantize_per_channel_affine(x, scales, nothing, 0, -top, top)
    assert torch.equal(codec.decode(codec.encode(x.flatten()), x.numel()), theirs.flatten())


def test_a_whole_vector_of_integers_is_that_of_torchs_fake_quantisation():
    x = gauss(5000)
    scale = x.abs().max() / 127
    theirs = torch.fake_quantize_per_tensor_affine(x, float(scale), 0, -127, 127)
    codec = codecs.get("int8/tensor")
    assert torch.equal(codec.decode(codec.encode(x), 5000), theirs)


# Casts


@pytest.mark.parametrize("name", ["fp32", "fp16", "bf16"])
def test_casts_are_those_of_torch(name, probes):
    dtype = {"fp32": torch.float32, "fp16": torch.float16, "bf16": torch.bfloat16}[name]
    x = probes(formats.get("float16"))
    codec = codecs.get(name)
    wire = codec.encode(x)
    assert torch.equal(wire[: x.numel() * dtype.itemsize], x.to(dtype).view(torch.uint8))
    expected, decoded = x.to(dtype).float(), codec.decode(wire, x.numel())
    torch.testing.assert_close(decoded, expected, rtol=0, atol=0, equal_nan=True)


@pytest.mark.parametrize(("name", "dtype"), [("fp16", np.float16), ("bf16", ml_dtypes.bfloat16)])
def test_casts_are_those_of_numpy(name, dtype, probes):
    x = probes(formats.get("float16"))
    x = x[~x.isnan()]
    with np.errstate(over="ignore"):
        expected = x.numpy().astype(dtype).view(np.uint8)
    np.testing.assert_array_equal(codecs.get(name).encode(x).numpy()[: expected.size], expected)


# One bit


@pytest.mark.parametrize("block", [64, 512])
def test_one_bit_is_the_sign_and_two_means(block):
    codec, x = codecs.get(f"onebit/{block}"), gauss(block * 50) + 0.3
    sections = parts(codec, codec.encode(x), x.numel())
    bits = unpacked(sections["bits"], x.numel(), 1)
    rows = x.double().view(-1, block)
    np.testing.assert_array_equal(bits, (x >= 0).numpy())
    for name, kind in (("high", rows >= 0), ("low", rows < 0)):
        mean = (rows * kind).sum(1) / kind.sum(1).clamp(min=1)
        np.testing.assert_allclose(sections[name].view(np.float32), mean.numpy(), rtol=2.0**-20)


@pytest.mark.parametrize("block", [64, 512])
def test_the_other_thresholds_are_a_mean_deviation_and_a_mean_magnitude(block):
    x = gauss(block * 50) + 0.3
    rows = x.double().view(-1, block)
    mean = rows.mean(1)
    spread = (rows - mean[:, None]).abs().mean(1)
    codec = codecs.get(f"onebit/{block}~mean")
    sections = parts(codec, codec.encode(x), x.numel())
    np.testing.assert_array_equal(unpacked(sections["bits"], x.numel(), 1), (rows >= mean[:, None]).flatten())
    np.testing.assert_allclose(sections["low"].view(np.float32), (mean - spread).numpy(), rtol=2.0**-18)
    np.testing.assert_allclose(sections["high"].view(np.float32), (mean + spread).numpy(), rtol=2.0**-18)
    codec = codecs.get(f"sign/{block}")
    sections = parts(codec, codec.encode(x), x.numel())
    np.testing.assert_array_equal(unpacked(sections["bits"], x.numel(), 1), (x >= 0).numpy())
    np.testing.assert_allclose(sections["high"].view(np.float32), rows.abs().mean(1).numpy(), rtol=2.0**-20)


SHORT_ENDS = {"onebit/column:7": 7, "onebit/64": 64, "onebit/64~mean": 64, "sign/64": 64, "onebit/128": 128}


@pytest.mark.parametrize("numel", [30, 45, 64, 65])
@pytest.mark.parametrize("spec", SHORT_ENDS)
def test_a_last_block_that_is_short_has_the_means_of_its_own_elements(spec, numel):
    codec, x = codecs.get(spec), gauss(numel, seed=3) - 0.2
    last = x[(numel - 1) // SHORT_ENDS[spec] * SHORT_ENDS[spec] :].double()
    middle = last.mean() if codec.threshold == "mean" else 0.0
    high, low = ((last - middle) * kind for kind in (last >= middle, last < middle))
    if codec.threshold == "zero":
        high, low = high.sum() / max((high != 0).sum(), 1), low.sum() / max((low != 0).sum(), 1)
    else:
        high = (last - middle).abs().mean()
        low = -high
    expected = middle + torch.where(last >= middle, high, low)
    decoded = codec.decode(codec.encode(x), numel)[-last.numel() :]
    assert torch.allclose(decoded.double(), expected, rtol=2.0**-18)


@pytest.mark.parametrize("shape", [(70, 9), (3, 4), (33, 1), (8, 5, 3, 3), (100,)])
def test_columns_are_laid_out_as_in_cntk(shape):
    """Of W = ceil(M / 32) words to a column of M rows, word i holds rows i, i + W, i + 2W, ..."""
    codec = OneBitColumn().for_shape(shape)
    x = gauss(*shape)
    columns = x.T if len(shape) == 2 else x.reshape(-1, shape[-1])
    rows = columns.shape[1]
    words = math.ceil(rows / 32)
    sections = parts(codec, codec.encode(x.flatten()), x.numel())
    expected = np.zeros((len(columns), words), np.uint32)
    for j, column in enumerate(columns.tolist()):
        for row, value in enumerate(column):
            expected[j, row % words] |= np.uint32((value >= 0) << (row // words))
    np.testing.assert_array_equal(sections["words"].view(np.uint32), expected.reshape(-1))
    for name, kind in (("high", columns >= 0), ("low", columns < 0)):
        mean = (columns.double() * kind).sum(1) / kind.sum(1).clamp(min=1)
        np.testing.assert_allclose(sections[name].view(np.float32), mean.numpy(), rtol=2.0**-20)
    decoded = codec.decode(codec.encode(x.flatten()), x.numel()).view(shape)
    signs = (decoded >= 0) == (x >= 0)
    assert bool((signs | (decoded == 0)).all())


# A threshold that another library sets itself

EIGHT_BITS = [name for name, codec in CODECS.items() if 8 <= codec.bits_per_element() < 8.6]
#: Two mantissa bits, MX scales that saturate and waste up to a binade, or a scale that ignores the data.
COARSE = {
    "e5m2/128", "e5m2/128~sr", "mxfp8e5", "aps/e5m2", "mxfp8", "static8~offset-1", "mantissa8~offset-1",
}  # fmt: skip


@pytest.mark.parametrize("name", EIGHT_BITS)
def test_8_bit_codecs_meet_the_threshold_of_hivemind(name):
    """Its tests ask for a mean squared error under 8e-4 on a million standard normal numbers."""
    codec, x = CODECS[name], gauss(1 << 20)
    rng = Stream(1) if codec.needs_rng else None
    error = float((codec.decode(codec.encode(x, rng), x.numel()) - x).square().mean())
    assert 8e-4 < error < 8e-3 if name in COARSE else error < 8e-4


def test_the_exceptions_to_the_threshold_are_8_bit_codecs():
    assert set(EIGHT_BITS) > COARSE
