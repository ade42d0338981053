"""Rounding inside of a network: forward and backward formats, streams, counts."""

import pytest
import torch
from torch import nn

from thinwire import FormatError, InputError, Stream, formats
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
    counts = counters.read()
    assert counts["fc/forward"] == {"numbers": 6, "overflow": 2, "saturation": 0, "underflow": 1}
    assert counts["fc/backward"] == {"numbers": 6, "overflow": 1, "saturation": 0, "underflow": 1}
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
    with pytest.raises(FormatError, match="unknown format 'e4n3'"):
        Quantizer("e4n3")
    with pytest.raises(FormatError, match=r"use Precision.of\('e4m3~sr'\)"):
        Precision("e4m3~sr")


@pytest.mark.parametrize(
    "formats_", [(None, None), ("float16", "float16"), ("float16", None), (None, "float16")]
)
def test_it_can_be_differentiated_twice(formats_):
    """A gradient penalty, in numbers that float16 has."""
    w, x = nn.Parameter(torch.tensor([[2.0]])), torch.tensor([[1.5]], requires_grad=True)
    y = Quantizer(*formats_)(x @ w)
    (gradient,) = torch.autograd.grad(y.square().sum(), x, create_graph=True)
    (gradient.square() + w.square()).sum().backward()
    assert w.grad.item() == 2 * (4 * 1.5 * 1.5 * 4 * 2**3 / 2) + 4  # of (2 x w**2)**2 + w**2


def test_gradients_of_gradients_are_rounded_like_gradients():
    x = torch.tensor([1.0], requires_grad=True)
    (gradient,) = torch.autograd.grad(Quantizer("float16", "e4m3")(x) * x, x, create_graph=True)
    (second,) = torch.autograd.grad(gradient, x, torch.tensor([0.3]))
    assert second.item() == formats.get("e4m3").round(torch.tensor([0.3])).item() * 1 + 0.3125


def test_scales_leave_room_for_what_rounding_does():
    """Half a step beyond the largest integer is rounded to it; at random it would be cut, and biased."""
    x = torch.full((4096,), 127.4)
    assert Precision.of("int8~fit").round(x).unique().tolist() == [127.0]
    rounded = Precision.of("int8~fit~sr").round(x, Stream(0))
    assert rounded.unique().tolist() == [126.0, 128.0]
    assert abs(rounded.mean().item() - 127.4) < 0.05
    assert Precision.of("int8~fit~up").round(x).unique().tolist() == [128.0]


def test_names_and_modes_are_taken_as_codecs_and_specs_have_them():
    assert Precision.of("bf16~sr") == Precision.of("bfloat16~sr")
    assert Quantizer("e4m3", rounding="sr").precisions[0] == Precision.of("e4m3~sr")
    assert Precision(formats.get("e4m3"), "stochastic").needs_rng
    with pytest.raises(FormatError, match="unknown rounding 'nearer'; use one of: nearest"):
        Precision(formats.get("e4m3"), "nearer")
    for spec in ("e4m3~sr~zero", "e4m3~fit~centre"):
        with pytest.raises(FormatError, match="two roundings, or two scales"):
            Precision.of(spec)
    with pytest.raises(InputError, match="float64"):
        Precision.of("int8~fit").round(torch.ones(3, dtype=torch.float64))


def test_a_short_float_that_a_format_outgrows_is_an_overflow(recwarn):
    counters = Counters()
    y = Quantizer("bfloat16", counters=counters)(torch.tensor([65504.0, 1.0], dtype=torch.float16))
    assert y.isinf().tolist() == [True, False]
    assert counters.read()["quantizer/forward"]["overflow"] == 1
    assert not recwarn.list


def test_ordinary_rounding_is_not_saturation():
    for spec, numbers in (("int8~fit", [127.4, 3.0]), ("float8_e4m3fn", [460.0, 1.0]), ("e4m3", [241.0])):
        counters = Counters()
        Quantizer(spec, counters=counters)(torch.tensor(numbers))
        assert counters.read()["quantizer/forward"]["saturation"] == 0, spec
    counters = Counters()
    Quantizer("fixed4.4", counters=counters)(torch.tensor([float("nan"), 8.1, 7.95, 1e-9]))
    assert counters.read()["quantizer/forward"] == {
        "numbers": 4, "overflow": 0, "saturation": 1, "underflow": 1,
    }  # fmt: skip


def test_counters_want_a_number_of_calls():
    with pytest.raises(InputError, match="every must be a number of calls"):
        Counters(every=0)
