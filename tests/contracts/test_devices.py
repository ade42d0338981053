"""New tensors are made where the input is, whatever torch's default device; here it is one without memory."""

import pytest
import torch
from torch import nn

from thinwire import Channel, Stream, codecs, simulate
from thinwire.codecs import CODECS
from thinwire.formats import FORMATS
from thinwire.runtimes import local
from thinwire.schedules import SCHEDULES
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


@pytest.mark.parametrize("spec", SCHEDULES)
@pytest.mark.parametrize("codec", CHOSEN)
def test_schedules(spec, codec):
    if SCHEDULES[spec].refuses(codecs.get(codec)):
        pytest.skip("does not go together")
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
