"""The stages of training, each with its own precision.

PositNN (Raposo, Tomas and Roma 2021) distinguishes five, because they do not need the same precision:

| stage | numbers in its precision |
|---|---|
| `forward` | operands of products in the forward pass (activations, copies of weights), and results |
| `backward` | errors: gradients with respect to activations, and the copies of weights that compute them |
| `gradient` | gradients with respect to weights |
| `optimizer` | weights as they are stored, and the optimizer's state |
| `loss` | the loss, and the first error of the backward pass |
"""

from dataclasses import dataclass, fields

from thinwire.errors import FormatError
from thinwire.formats import Format
from thinwire.simulate.gemm import Arithmetic
from thinwire.simulate.precision import Precision

STAGES = ("forward", "backward", "gradient", "optimizer", "loss")
SAME = "same"


@dataclass(frozen=True)
class Stages:
    """A precision for every stage, and how matrix products are computed.

    >>> Stages("posit8_2", "posit8_2", "posit8_2", optimizer="posit12_2", loss="posit12_2").optimizer
    Precision(posit12_2)
    >>> Stages.uniform("bfloat16").gradient
    Precision(bfloat16)
    """

    forward: Precision | Format | str | None = None
    backward: Precision | Format | str | None = None
    gradient: Precision | Format | str | None = None
    optimizer: Precision | Format | str | None = None
    loss: Precision | Format | str | None = None
    #: How products are computed in the forward pass. None: torch's float32, which is fast, but its bits
    #: differ between devices.
    arithmetic: Arithmetic | None = None
    backward_arithmetic: Arithmetic | str | None = SAME  #: of products that compute errors and gradients
    #: Zero the error where the result of a product saturated. Otherwise saturation does not change the error.
    clipped: bool = False
    #: Whether the bias is part of the exact sum in the forward pass, as in a quire. Otherwise it is added to
    #: the rounded sum, and the result is rounded again.
    fused: bool = False

    def __post_init__(self) -> None:
        for name in STAGES:
            object.__setattr__(self, name, Precision.of(getattr(self, name)))
        if self.backward_arithmetic == SAME:
            object.__setattr__(self, "backward_arithmetic", self.arithmetic)
        for name in ("arithmetic", "backward_arithmetic"):
            given = getattr(self, name)
            if given is not None and not isinstance(given, Arithmetic):
                raise FormatError(f"{name} must be a simulate.Arithmetic or None, not {given!r}")
        forward = Precision.of(self.forward)
        if self.clipped and (forward.format is None or forward.scale):
            raise FormatError(f"{forward.spec} has no fixed range to saturate at; use clipped=False")
        if self.fused and (self.arithmetic is None or self.arithmetic.order != "exact"):
            raise FormatError("fused=True needs exact sums; use Arithmetic(order='exact')")

    @classmethod
    def uniform(
        cls, precision: Precision | Format | str | None, arithmetic: Arithmetic | None = None
    ) -> "Stages":
        """Return stages with one precision for all."""
        return cls(precision, precision, precision, precision, precision, arithmetic)

    def __str__(self) -> str:
        specs = {name: Precision.of(getattr(self, name)).spec for name in STAGES}
        options = (", clipped" if self.clipped else "") + (", fused" if self.fused else "")
        if len(set(specs.values())) == 1:
            return specs["forward"] + options
        return ", ".join(f"{name} {spec}" for name, spec in specs.items()) + options

    @property
    def needs_rng(self) -> bool:
        """Whether anything is rounded at random."""
        values = (getattr(self, each.name) for each in fields(self))
        return any(
            (isinstance(each, Precision) and each.needs_rng)
            or (isinstance(each, Arithmetic) and each.rounding == "stochastic")
            for each in values
        )
