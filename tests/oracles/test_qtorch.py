"""QPyTorch (`qtorch`, Zhang et al. 2019) and `simulate`: how their numbers differ, each case run in both.

docs/comparison.md says so in words. Every trait is checked on the numbers that decide: all values and all
midpoints of a format, or special values.
"""

import importlib
import inspect
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from thinwire.bench.qtorch_peer import FAILURES, FRACTION, KINDS, STREAM, WORD, cases, load
from thinwire.formats import Float, get
from thinwire.rounding import Rounding
from thinwire.simulate.precision import Precision
from thinwire.simulate.quantizer import Quantizer

STEP = 2.0**-FRACTION
INFINITY, NAN = float("inf"), float("nan")
DRAWS = 1 << 22


@dataclass(frozen=True)
class Trait:
    """What both do in a case, perhaps the same; `holds` runs both and tells whether they do."""

    function: str
    what: str
    theirs: str
    ours: str
    holds: Callable[[Any], bool]


def _values(exp: int, man: int) -> Tensor:
    """All finite values of an (exp, man) float, ascending, zero once."""
    format = Float(exp, man)
    values = format.from_codes(torch.arange(1 << format.bits).to(torch.uint8))
    return values[values.isfinite()].unique()


def midpoints(exp: int, man: int) -> tuple[Tensor, Tensor, Tensor]:
    """What lies halfway between two values, and these: that nearer to zero, and that further away."""
    values = _values(exp, man)
    low, high = values[:-1], values[1:]
    swap = low < 0
    return (low + high) / 2, torch.where(swap, high, low), torch.where(swap, low, high)


def _nearest(quant: Any, x: Tensor, exp: int, man: int) -> Tensor:
    rounded: Tensor = quant.float_quantize(x, exp, man, rounding="nearest")
    return rounded


def _float_ties(quant: Any) -> bool:
    for exp, man in KINDS:
        middle, near, far = midpoints(exp, man)
        ours = Float(exp, man).round(middle)
        even = Float(exp, man).to_codes(ours) % 2 == 0
        if not (torch.equal(_nearest(quant, middle, exp, man), far) and even.all() and (ours == near).any()):
            return False
    return True


def _float_subnormal_ties(quant: Any) -> bool:
    """Looks just below every midpoint: all above the smallest normal number must agree, none below."""
    for exp, man in KINDS:
        middle, near, far = midpoints(exp, man)
        below = middle.nextafter(torch.zeros(()))
        small = below.abs() < 2.0 ** (2 - (1 << exp - 1))
        theirs, ours = _nearest(quant, below, exp, man), Float(exp, man).round(below)
        if not (torch.equal(theirs, torch.where(small, far, near)) and (ours == near).all()):
            return False
    return True


def _float_range(quant: Any) -> bool:
    """Top values; and no other difference from the format without specials than at ties."""
    for exp, man in KINDS:
        format, wide = Float(exp, man), Float(exp, man, specials="none")
        x = torch.tensor([2.0 * format.max, 1e30, -1e30])
        top = torch.tensor([1.0, 1.0, -1.0]) * wide.max
        limits = torch.tensor([INFINITY, INFINITY, -INFINITY])
        plain = torch.cat([x, top, _values(exp, man), _values(exp, man)[1:-1] * 1.03])
        if not (
            wide.max > format.max
            and torch.equal(_nearest(quant, x, exp, man), top)
            and torch.equal(format.round(x), limits)
            and torch.equal(_nearest(quant, plain, exp, man), wide.round(plain))
        ):
            return False
    return True


def _float_specials(quant: Any) -> bool:
    for exp, man in KINDS:
        x = torch.tensor([INFINITY, -INFINITY, NAN])
        top = Float(exp, man, specials="none").max
        ours = Float(exp, man).round(x)
        if _nearest(quant, x, exp, man).tolist() != [top, -top, top] or not torch.equal(ours[:2], x[:2]):
            return False
        if not ours[2].isnan():
            return False
    return True


def _float_zero(quant: Any) -> bool:
    x = torch.tensor([-0.0, -1e-30])
    theirs, ours = _nearest(quant, x, 5, 2), Float(5, 2).round(x)
    return not theirs.any() and not theirs.signbit().any() and not ours.any() and bool(ours.signbit().all())


def _float_seed(quant: Any) -> bool:
    return (
        not _repeats(quant.float_quantize, 5, 2)
        and not _repeats(quant.block_quantize, WORD)
        and _ours_repeat()
    )


def _repeats(function: Callable[..., Tensor], *args: int) -> bool:
    """Whether torch's seed decides what is drawn."""
    x = torch.full((4096,), 1.1)
    repeats = []
    with torch.random.fork_rng(devices=[]):
        for _ in range(2):
            torch.manual_seed(1)
            repeats.append(function(x, *args, rounding="stochastic"))
    return torch.equal(*repeats)


def _ours_repeat() -> bool:
    x = torch.full((4096,), 1.1)
    return torch.equal(*(Float(5, 2).round(x, "stochastic", STREAM) for _ in range(2)))


def _float_inputs(quant: Any) -> bool:
    for dtype in (torch.float16, torch.bfloat16):
        x = torch.ones(3, dtype=dtype)
        if not torch.equal(Float(5, 2).round(x), torch.ones(3)):
            return False
        try:
            quant.float_quantize(x, 5, 2, rounding="nearest")
        except RuntimeError:
            continue
        return False
    return True


def _defaults(quant: Any) -> bool:
    functions = (quant.float_quantize, quant.fixed_point_quantize, quant.block_quantize)
    theirs = [inspect.signature(each).parameters["rounding"].default for each in functions]
    theirs.append(inspect.signature(quant.Quantizer).parameters["forward_rounding"].default)
    return set(theirs) == {"stochastic"} and Quantizer("e5m2").precisions[0].rounding is Rounding.NEAREST


def _fixed(quant: Any, x: Tensor, rounding: str = "nearest") -> Tensor:
    rounded: Tensor = quant.fixed_point_quantize(x, WORD, FRACTION, rounding=rounding)
    return rounded


def _fixed_nan(quant: Any) -> bool:
    x = torch.tensor([NAN])
    return bool(_fixed(quant, x).isnan().all()) and get("fixed2.6").round(x).item() == 0


def _fixed_half(quant: Any) -> bool:
    """Looks at all midpoints and their neighbours: one number is rounded to the wrong side."""
    middle = (torch.arange(-(1 << WORD), 1 << WORD) + 0.5) * STEP
    x = torch.cat([middle, middle.nextafter(torch.tensor(9.0)), middle.nextafter(torch.tensor(-9.0))])
    differ = x[_fixed(quant, x) != get("fixed2.6").round(x)]
    return differ.tolist() == [torch.tensor(STEP / 2).nextafter(torch.tensor(9.0)).item()]


def _fixed_zero(quant: Any) -> bool:
    x = torch.tensor([-1e-9])
    return bool(_fixed(quant, x).signbit().all()) and not get("fixed2.6").round(x).signbit().any()


def _fixed_grid(quant: Any) -> bool:
    x = torch.full((DRAWS,), -127 * STEP)
    theirs, ours = _fixed(quant, x, "stochastic"), get("fixed2.6").round(x, "stochastic", STREAM)
    return 0 < int((theirs != x).sum()) < DRAWS / 1e4 and torch.equal(ours, x)


def _block(quant: Any, x: Tensor) -> Tensor:
    rounded: Tensor = quant.block_quantize(x, WORD, rounding="nearest")
    return rounded


def _block_ties(quant: Any) -> bool:
    steps = torch.arange(-64, 64.0)
    x = torch.cat([torch.tensor([64.0]), steps + 0.5])  # steps are 1 in both
    fit = Precision.of("int8~fit").round(x)
    return torch.equal(_block(quant, x)[1:], steps + 1) and torch.equal(fit[1:], (steps + 0.5).round())


def _block_step(quant: Any) -> bool:
    x = torch.tensor([127.75, 1.0])
    return _block(quant, x).tolist() == [127.0, 1.0] and Precision.of("int8~fit").round(x).tolist() == [
        128.0,
        0.0,
    ]


def _float_subnormals(quant: Any) -> bool:
    pairs = [(_nearest(quant, _values(*kind), *kind), _values(*kind)) for kind in KINDS]
    return all(torch.equal(*each) for each in pairs) and torch.equal(
        Float(5, 2).round(_values(5, 2)), _values(5, 2)
    )


def _input_kept(quant: Any) -> bool:
    x = torch.linspace(-3, 3, 1001)
    before = x.clone()
    for _, _, theirs, ours in cases(quant, x):
        theirs()
        ours()
    return torch.equal(x, before)


def _gradients(quant: Any) -> bool:
    x, gradient = torch.linspace(-300, 300, 1001, requires_grad=True), torch.linspace(-1, 1, 1001) * 1.01
    number: Any = importlib.import_module("qtorch").FloatingPoint
    module = quant.Quantizer(number(4, 3), number(5, 2), "nearest", "nearest")
    (theirs,) = torch.autograd.grad(module(x), x, gradient)
    (ours,) = torch.autograd.grad(Quantizer("e4m3", "e5m2")(x), x, gradient)
    return torch.equal(theirs, _nearest(quant, gradient, 5, 2)) and torch.equal(
        ours, Float(5, 2).round(gradient)
    )


SUBNORMAL, INPUT, GRADIENT = "kept", "left as it is", "straight through, rounded to a number of its own"
TRAITS = (
    Trait("float_quantize", "subnormals", SUBNORMAL, SUBNORMAL, _float_subnormals),
    Trait("all", "the input tensor", INPUT, INPUT, _input_kept),
    Trait("Quantizer", "the gradient", GRADIENT, GRADIENT, _gradients),
    Trait(
        "float_quantize", "ties, rounding to nearest", "away from zero", "to even, as IEEE 754", _float_ties
    ),
    Trait(
        "float_quantize",
        "just below a tie between subnormals",
        "rounded twice (first by a float32 addition): away from zero",
        "rounded once: to the nearer value",
        _float_subnormal_ties,
    ),
    Trait(
        "float_quantize",
        "beyond the range",
        "no exponent is kept for specials: up to 114688 (5, 2) or 480 (4, 3), then saturates",
        "infinity beyond 57344 (e5m2) or 240 (e4m3); Float(5, 2, specials='none') has qtorch's range",
        _float_range,
    ),
    Trait(
        "float_quantize",
        "infinities and NaN",
        "the largest value; NaN becomes positive",
        "kept",
        _float_specials,
    ),
    Trait("float_quantize", "-0 and negatives that vanish", "+0", "-0", _float_zero),
    Trait(
        "float_quantize, block_quantize",
        "random numbers",
        "a generator of its own: torch.manual_seed does not repeat them",
        "a named stream: the same on every run and device",
        _float_seed,
    ),
    Trait("float_quantize", "float16 and bfloat16 inputs", "refused", "taken", _float_inputs),
    Trait("all", "rounding, if not said", "stochastic", "nearest", _defaults),
    Trait("fixed_point_quantize", "NaN", "kept", "0: a fixed-point number has none", _fixed_nan),
    Trait(
        "fixed_point_quantize",
        "the float32 just above half a step",
        "0 (half is added in float32 first)",
        "one step, which is nearer",
        _fixed_half,
    ),
    Trait("fixed_point_quantize", "negatives that vanish", "-0", "+0", _fixed_zero),
    Trait(
        "fixed_point_quantize",
        "values of the format, stochastic",
        "change now and then (8 in a million at -127/64)",
        "never change",
        _fixed_grid,
    ),
    Trait("block_quantize", "ties, rounding to nearest", "upward", "to even", _block_ties),
    Trait(
        "block_quantize",
        "a largest value that would round beyond 127 steps",
        "is cut to 127 steps",
        "doubles the step (int8~fit)",
        _block_step,
    ),
)


@pytest.fixture(scope="module")
def quant():
    try:
        return load()
    except FAILURES as error:
        pytest.skip(f"qtorch is not here: {error}")


@pytest.mark.parametrize("trait", TRAITS, ids=lambda trait: f"{trait.function}: {trait.what}")
def test_what_is_said_of_qtorch_is_so(quant, trait):
    assert trait.holds(quant)


def test_the_documents_say_what_is_tested():
    said = (Path(__file__).parents[2] / "docs" / "comparison.md").read_text()
    for each in TRAITS:
        assert f"| `{each.function}` | {each.what} | {each.theirs} | {each.ours} |" in said, each.what


def test_ties_of_floats_lie_between_neighbours():
    for kind in KINDS:
        middle, near, far = midpoints(*kind)
        assert torch.equal(middle * 2, near + far)
        assert (near.abs() < middle.abs()).all()
        assert (middle.abs() < far.abs()).all()
