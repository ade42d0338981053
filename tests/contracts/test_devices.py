"""New tensors are made where the input is, whatever torch's default device; here it is one without memory."""

import pytest
import torch
from torch import nn

from thinwire import Channel, Stream, codecs, simulate
from thinwire.codecs import CODECS
from thinwire.formats import FORMATS
from thinwire.kernels import select
from thinwire.runtimes import local
from thinwire.schedules import SCHEDULES
from thinwire.schedules.low_rank import _unit, cholesky_qr
from thinwire.simulate import Arithmetic, Nodes, Stages

ELSEWHERE = torch.device("meta")
CHOSEN = ("int8/256", "aps/e5m2", "topk/0.01+ef", "onebit/64+ef", "bf16+ef", "fp16", "qsgd4/512")


def gauss(*shape, seed=0):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def same(make):
    """Whether a function returns the same tensors wherever new ones are made."""
    expected = make()
    with ELSEWHERE:
        found = make()
    return all(torch.equal(one, two) for one, two in zip(expected, found, strict=True))


PAIRS = [
    (spec, codec)
    for spec, schedule in SCHEDULES.items()
    for codec in CHOSEN
    if not schedule.refuses(codecs.get(codec))
]


@pytest.mark.parametrize(("spec", "codec"), PAIRS)
def test_schedules(spec, codec):
    given = [gauss(700, seed=rank) for rank in range(4)]

    def make():
        ranks = [each.clone() for each in given]
        channels = [Channel(codec) for _ in ranks]
        for step in range(2):
            local.all_reduce(ranks, channels, schedule=spec, rng=Stream(3, step=step))
        return ranks

    assert same(make)


@pytest.mark.parametrize("spec", CODECS)
def test_codecs(spec):
    codec, x = CODECS[spec], gauss(3, 500)
    rng = Stream(1) if codec.needs_rng else None

    def make():
        shared = codec.summary(x) if codec.agreement(500) else None
        residual = x / 4 if codec.feedback else None
        wire = codec.encode(x, rng, residual=residual, shared=shared)
        total = codec.decode_add(wire, x.clone(), 0.5)
        return [wire, codec.decode(wire, 500), total, *([residual] if residual is not None else [])]

    assert same(make)


@pytest.mark.parametrize("name", FORMATS)
def test_formats(name):
    format, x = FORMATS[name], gauss(300).abs()
    stochastic = ["stochastic"] if "stochastic" in format.roundings else []

    def make():
        codes = format.to_codes(x)
        return [codes, format.from_codes(codes), *(format.round(x, each, Stream(1)) for each in stochastic)]

    assert same(make)


@pytest.mark.parametrize("order", ["sequential", "pairwise", "exact", "kahan"])
def test_simulated_products(order):
    arithmetic = Arithmetic(None if order == "exact" else "e5m2", "e5m10", order=order)
    a, b = gauss(5, 9), gauss(9, 4)
    assert same(lambda: [simulate.matmul(a, b, arithmetic)])


@pytest.mark.parametrize("schedule", ["two_shot", "ring"])
def test_simulated_nodes(schedule):
    net = nn.Sequential(nn.Linear(6, 5), nn.ReLU(), nn.Linear(5, 3))
    x = gauss(8, 6)

    def make():
        nodes = Nodes(net, 4, "int8/256", schedule)
        net.zero_grad()
        nodes.backward(lambda model, given: model(given).square().mean(), x)
        return [each.grad.clone() for each in net.parameters()]

    assert same(make)


def test_simulated_layers():
    plain = nn.Sequential(nn.Conv2d(2, 3, 3), nn.BatchNorm2d(3), nn.ReLU(), nn.Flatten(), nn.Linear(48, 4))
    net = simulate.convert(plain, Stages.uniform("e5m2"), tell=None)
    x = gauss(2, 2, 6, 6)

    def make():
        net.zero_grad()
        y = net(x)
        y.square().sum().backward()
        return [y.detach(), *(each.grad.clone() for each in net.parameters())]

    assert same(make)


def test_orthonormal_columns_as_a_gpu_makes_them():
    """With columns that depend on each other, and matrices of several heights."""
    given = [gauss(20, 3), gauss(9, 3, seed=1), gauss(30, 3, seed=2)]
    given[2][:, 1] = 2 * given[2][:, 0]

    def make():
        _unit.cache_clear()
        found = [each.clone() for each in given]
        cholesky_qr(found)
        return found

    assert same(make)
    for one, other in zip(make()[:2], given, strict=False):
        assert torch.allclose(one.T @ one, torch.eye(3), atol=1e-5)
        expected = torch.linalg.qr(other).Q
        assert torch.allclose(one @ (one.T @ other), expected @ (expected.T @ other), atol=1e-4)
    assert all(each.isfinite().all() for each in make())


def test_what_a_gpu_reads_without_a_copy():
    """Plain formats with a scale for each segment, whatever the dtype."""
    gpu = torch.device("cuda")
    specs = ("int8/256", "int8/tensor", "nvfp4")
    reads = {spec: codecs.get(spec).reads(torch.bfloat16, gpu) for spec in specs}
    assert reads == {"int8/256": True, "int8/tensor": True, "nvfp4": False}
    for spec in reads:
        assert codecs.get(spec).reads(torch.float32, gpu)
        assert codecs.get(spec).reads(torch.float32, torch.device("cpu"))
        assert not codecs.get(spec).reads(torch.bfloat16, torch.device("cpu"))


def test_rows_that_a_gpu_cannot_count_are_not_given_to_it(monkeypatch):
    monkeypatch.setattr(select, "_programs", lambda: "programs")
    gpu, longest = torch.device("cuda"), (1 << 31) - (1 << 16)
    assert select.gpu(gpu, longest - 1) == "programs"
    assert select.gpu(gpu, longest) is None
    assert select.gpu(torch.device("cpu"), 5) is None
