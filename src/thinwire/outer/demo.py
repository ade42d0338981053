"""DeMo: decoupled momentum (Peng et al. 2024, arXiv 2411.19870).

Each rank has a momentum of its own, and never sends it as a whole. A step

    delta = decay * delta + lr * gradient       on each rank
    sent  = the k largest cosines of every chunk of delta
    delta = delta - sent                        what was not sent stays in the momentum
    x     = x * (1 - lr * weight_decay) - lr * sign(mean of all ranks' sent)

sends only the k largest coefficients of a discrete cosine transform. So the momentum that moves slowly
travels at once, and the rest follows later. Delta is what this package calls a residual, with a decay: it is
the residual of the codec "dct/64:32", and any other codec may take its place.

As published: the formulas, chunks of 64, k = 32, a decay of 0.999, sign, decoupled weight decay, and a mean
in which each cosine is divided by the number of ranks that sent it. Ours:

- the transform's arithmetic, which is the same on all devices (`thinwire.codecs.dct`);
- with mean="ranks", each cosine is divided by the number of all ranks, so that without sign all that is sent
  arrives in the end;
- vectors and small tensors are sent whole, so that they keep no momentum;
- without sign, the step is the mean of what was sent, which contains the learning rate.
"""

from typing import Any

import torch
import torch.distributed as dist

from thinwire import slots
from thinwire.codecs import AnySpec, Codec, DctTopK
from thinwire.codecs import get as get_codec
from thinwire.errors import InputError
from thinwire.outer.communicating import Communicating, check_number
from thinwire.outer.cosines import MEANS, SENDERS, Cosines
from thinwire.outer.flat import Flat, Layout, Part
from thinwire.outer.mean import Sending
from thinwire.policy import SMALL, Policy, Rule


class DeMo(Communicating):
    """Decoupled momentum: every step sends a few coefficients of each chunk.

    codec: what is sent; "dct/64:32" is the 32 largest cosines of every 64 elements, or 64 x 64 of a matrix.
        Also a `thinwire.Policy`, for a codec by tensor.
    sign: step by the sign of the mean, as published; else by the mean itself.
    mean: of cosines: over the "senders" of each one, as published, or over all "ranks", as for other codecs.
    min_numel: elements under which a tensor is sent in float32, as are vectors; 0 encodes all.
    check_start: compare weights and gradients between ranks before the first step.
    """

    def __init__(  # noqa: PLR0913
        self,
        params: Any,
        lr: float = 1e-3,
        *,
        decay: float = 0.999,
        weight_decay: float = 0.0,
        codec: AnySpec | Policy = "dct/64:32",
        sign: bool = True,
        mean: str = SENDERS,
        min_numel: int = SMALL,
        group: dist.ProcessGroup | None = None,
        check_start: bool = True,
    ) -> None:
        self.sign = sign
        defaults = {"lr": lr, "decay": decay, "weight_decay": weight_decay}
        super().__init__(params, defaults, Sending(codec, "one_shot", group, min_numel, check_start))
        if mean not in MEANS:
            raise InputError(f"mean must be one of: {', '.join(MEANS)}; not {mean!r}")
        policy = self.mean.policy
        rules = tuple(Rule(**{**vars(rule), "codec": _codec(rule.codec, mean)}) for rule in policy.rules)
        self.mean.policy = Policy(policy.name, rules)

    def _check_options(self, group: Any) -> None:
        super()._check_options(group)
        check_number("decay", group["decay"], low=0.0, below=1.0)

    def _options(self) -> str:
        return f"sign {self.sign}"

    def _advance(self, layout: Layout) -> None:
        delta = self._flat("delta", layout)
        delta.write(self._gradients(layout))
        for part in layout.parts():
            delta.vector[part.elements] *= part.options["lr"]
        self._decay(layout)
        if self.world == 1:
            self.mean.round_trip(delta, layout)
        else:
            self.mean.reduce(delta, layout, self.steps)
        for part in layout.parts():
            self._update(part, delta, layout)

    def _decay(self, layout: Layout) -> None:
        """Multiply residuals by the decay of their parameter's group."""
        by_name = {
            info.name: part.options["decay"] for part in layout.parts() for info in layout.infos[part.tensors]
        }
        by_decay: dict[float, list[torch.Tensor]] = {}
        for slot, residual in self.mean.residuals():
            by_decay.setdefault(by_name.get(slots.name_of(slot), 1.0), []).append(residual)
        for decay, residuals in by_decay.items():
            torch._foreach_mul_(residuals, decay)

    def _update(self, part: Part, delta: Flat, layout: Layout) -> None:
        params, change = list(layout.params[part.tensors]), delta.vector[part.elements]
        lr, weight_decay = part.options["lr"], part.options["weight_decay"]
        if weight_decay:
            torch._foreach_mul_(params, 1.0 - lr * weight_decay)
        if self.sign:
            # torch's sign of NaN is 0: the sum keeps NaN, and makes infinity NaN
            change.copy_(change.sign().add_(change, alpha=0))
        torch._foreach_add_(params, delta.tensors[part.tensors], alpha=-lr if self.sign else -1.0)


def _codec(spec: str, mean: str) -> Codec:
    """Return the codec that averages cosines, for a codec that sends cosines; else the codec itself."""
    codec = get_codec(spec)
    if codec.feedback not in ("", "float32"):
        raise InputError(f"{spec}: DeMo's momentum is the residual, in float32; leave out '+ef:...'")
    return Cosines.of(codec, mean) if isinstance(codec, DctTopK) else codec
