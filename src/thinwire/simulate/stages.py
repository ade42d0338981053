"""The stages of training, each with numbers of its own.

PositNN (Raposo, Tomas and Roma 2021) tells five of them apart, because they do not need the same precision:

| stage | what is kept in it |
|---|---|
| `forward` | operands of products on the way forward (activations, copies of weights), and results |
| `backward` | errors: gradients with respect to activations, and the copies of weights they are made with |
| `gradient` | gradients with respect to weights |
| `optimizer` | weights as they are stored, and the optimizer's own numbers |
| `loss` | the loss and the error it begins with |
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
    #: Of products on the way forward. None: float32, added up as the device likes: fast, not the same bits
    #: everywhere.
    arithmetic: Arithmetic | None = None
    backward_arithmetic: Arithmetic | str | None = SAME  #: of the products that make errors and gradients
    #: Whether no error goes back to results of products that lie at the ends of their format, where numbers
    #: are cut off. Otherwise it does, as if they had not been.
    clipped: bool = False
    #: Whether exact sums on the way forward take a bias in before they are rounded, as a quire would.
    #: Otherwise it is added after that, and the sum is rounded again.
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
            raise FormatError(f"{forward.spec} has no fixed ends to cut off at; use clipped=False")
        if self.fused and (self.arithmetic is None or self.arithmetic.order != "exact"):
            raise FormatError("only exact sums can take a bias in; use Arithmetic(order='exact') with fused")

    @classmethod
    def uniform(
        cls, precision: Precision | Format | str | None, arithmetic: Arithmetic | None = None
    ) -> "Stages":
        """One precision for everything."""
        return cls(precision, precision, precision, precision, precision, arithmetic)

    def __str__(self) -> str:
        said = {name: Precision.of(getattr(self, name)).spec for name in STAGES}
        clipped = (", clipped" if self.clipped else "") + (", fused" if self.fused else "")
        if len(set(said.values())) == 1:
            return said["forward"] + clipped
        return ", ".join(f"{name} {spec}" for name, spec in said.items()) + clipped

    @property
    def needs_rng(self) -> bool:
        """Whether anything is rounded at random."""
        kept = (getattr(self, each.name) for each in fields(self))
        return any(
            (isinstance(each, Precision) and each.needs_rng)
            or (isinstance(each, Arithmetic) and each.rounding == "stochastic")
            for each in kept
        )
