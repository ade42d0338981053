"""The Hadamard rotation: orthonormal, the same as a product with the matrix, and worth it for outliers."""

import math

import pytest
import torch

from thinwire import Channel, codecs, testing
from thinwire.codecs.hadamard import Hadamard, rotation
from thinwire.errors import CodecError


def matrix(side):
    """Sylvester's construction."""
    found = torch.ones(1, 1, dtype=torch.float64)
    while len(found) < side:
        found = torch.cat((torch.cat((found, found), 1), torch.cat((found, -found), 1)))
    return found / math.sqrt(side)


def error(codec, x):
    codec, flat = codecs.get(codec), x.reshape(-1)
    return float((codec.decode(codec.encode(flat), flat.numel()) - flat).norm() / flat.norm())


def gauss(*shape, seed=0):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


@pytest.mark.parametrize(
    "codec",
    [
        Hadamard(), Hadamard("int8/256", 16), Hadamard("int4/64", 256), Hadamard("bf16", 2),
        Hadamard("maxmin4/64", 64), Hadamard("nf4/64").with_feedback(), Hadamard("int4/128~sr", 32),
    ],
    ids=lambda codec: codec.spec,
)  # fmt: skip
def test_the_contract_of_codecs(codec):
    testing.check_codec(codec)


@pytest.mark.parametrize("side", [2, 8, 64, 256])
def test_a_rotation_is_a_product_with_the_matrix_and_its_own_inverse(side):
    x = gauss(10, side)
    assert torch.allclose(rotation(x).double(), x.double() @ matrix(side), atol=1e-5)
    assert torch.allclose(rotation(rotation(x)), x, atol=1e-5)
    assert torch.allclose(rotation(x).norm(dim=1), x.norm(dim=1))


def test_outliers_cost_the_other_elements_less():
    x = gauss(512, 256)
    plain = error("int4/128", x)
    assert error(Hadamard("int4/128"), x) == pytest.approx(plain, rel=0.02)  # a rotation of a Gauss is one
    x[:, [5, 77, 200]] *= 30.0
    assert error(Hadamard("int4/128"), x) < 0.5 * error("int4/128", x)


def test_an_incomplete_group_is_not_rotated():
    x = gauss(64 + 20)
    codec, inner = Hadamard("int8/16"), codecs.get("int8/16")
    assert torch.equal(codec.decode(codec.encode(x), 84)[64:], inner.decode(inner.encode(x[64:]), 20))


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
def test_what_is_not_finite_spoils_its_block(bad):
    x = gauss(1024)
    codec = Hadamard("int4/128")
    clean = codec.decode(codec.encode(x), 1024)
    x[300] = bad
    found = codec.decode(codec.encode(x), 1024)
    spoilt = torch.arange(1024) // 128 == 2
    assert found[spoilt].isnan().all()
    assert torch.equal(found[~spoilt], clean[~spoilt])
    assert "its block" in codec.nonfinite
    assert "the vector" in Hadamard("int8/tensor").nonfinite


def test_feedback_keeps_what_the_wire_lost():
    channel, x = Channel(Hadamard("int4/128").with_feedback()), gauss(1000)
    wire = channel.encode(x, "a")
    assert torch.allclose(channel.decode(wire, 1000) + channel.residuals["a"], x, atol=1e-6)


@pytest.mark.parametrize(
    ("values", "side", "said"),
    [
        ("int4/128", 48, "power of two"),
        ("int4/128", 1, "power of two"),
        ("int4/128", 8192, "power of two"),
        ("int4/128+ef", 64, "belongs to the whole codec"),
        ("aps/e5m2", 64, "agreement"),
    ],
)
def test_groups_and_codecs_that_do_not_fit_are_refused(values, side, said):
    with pytest.raises(CodecError, match=said):
        Hadamard(values, side)
