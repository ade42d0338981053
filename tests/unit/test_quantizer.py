"""Rounding inside of a network: forward and backward formats, streams, counts."""

import pytest
import torch
from torch import nn

from thinwire import FormatError, Stream, formats
from thinwire.simulate import Counters, Precision, Quantizer

X = torch.randn(64, 32, generator=torch.Generator().manual_seed(0)) * 3
G = torch.randn(64, 32, generator=torch.Generator().manual_seed(1))


@pytest.mark.parametrize("forward", ["e4m3", "e5m2", "posit8_1", "fixed4.4", None])
@pytest.mark.parametrize("backward", ["e5m2", "bfloat16", None])
def test_values_and_gradients_are_rounded_to_formats_of_their_own(forward, backward):
    x = X.clone().requires_grad_()
    y = Quantizer(forward, backward)(x)
    y.backward(G)
    assert torch.equal(y.detach(), formats.get(forward).round(X) if forward else X)
    assert torch.equal(x.grad, formats.get(backward).round(G) if backward else G)


def test_stochastic_rounding_names_its_stream():
    first, second = (Quantizer("e4m3", rounding="stochastic", seed=3, name="fc") for _ in range(2))
    one, two = first(X), first(X)
    assert torch.equal(one, second(X))
    assert not torch.equal(one, two)
    e4m3 = formats.get("e4m3")
    assert torch.equal(two, e4m3.round(X, "stochastic", Stream(3, step=2, tensor="fc/forward")))


def test_the_backward_rounding_may_differ():
    x = X.clone().requires_grad_()
    Quantizer("e4m3", "e4m3", backward_rounding="zero")(x).backward(G)
    assert torch.equal(x.grad, formats.get("e4m3").round(G, "zero"))


def test_inside_a_network_only_what_passes_is_rounded():
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(32, 8), Quantizer("e5m2", "e4m3"), nn.Linear(8, 1))
    net(X).sum().backward()
    hidden = nn.functional.linear(X, net[0].weight, net[0].bias)
    error = formats.get("e4m3").round(net[2].weight.expand(64, 8))
    assert torch.equal(net[0].weight.grad, error.t() @ X)
    torch.testing.assert_close(net[2].weight.grad, formats.get("e5m2").round(hidden).sum(0, keepdim=True))


def test_sixteen_bit_numbers_stay_what_they_are():
    assert Quantizer("e4m3")(X.bfloat16()).dtype == torch.bfloat16


def test_counts_add_up():
    counters = Counters()
    quantizer = Quantizer("e4m3", "float8_e4m3fn", name="fc", counters=counters)
    x = torch.tensor([1.0, 1e9, -1e9, 1e-9, 0.0, float("inf")], requires_grad=True)
    quantizer(x).backward(torch.tensor([1e9, 1.0, 1e-9, 0.0, -0.0, float("nan")]))
    found = counters.read()
    assert found["fc/forward"] == {"numbers": 6, "overflow": 2, "saturation": 0, "underflow": 1}
    assert found["fc/backward"] == {"numbers": 6, "overflow": 1, "saturation": 0, "underflow": 1}
    saturating = formats.Float(4, 3, saturate=True)
    counters.clear()
    Quantizer(saturating, counters=counters)(torch.tensor([1e9, -1e9, 240.0]))
    assert counters.read()["quantizer/forward"]["saturation"] == 2


def test_every_so_many_calls_are_counted():
    counters = Counters(every=3)
    quantizer = Quantizer("e4m3", counters=counters)
    for _ in range(7):
        quantizer(X)
    assert counters.read()["quantizer/forward"]["numbers"] == 3 * X.numel()


def test_unknown_names_are_errors():
    with pytest.raises(FormatError, match="unknown rounding 'sideways'"):
        Quantizer("e4m3", rounding="sideways")
    with pytest.raises(FormatError, match="no format is called 'e4n3'"):
        Quantizer("e4n3")
    with pytest.raises(FormatError, match=r"Precision.of\('e4m3~sr'\) takes a spec"):
        Precision("e4m3~sr")
