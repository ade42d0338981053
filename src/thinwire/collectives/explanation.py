"""Which schedule a call would use, why, and how many bytes each schedule would send."""

from dataclasses import dataclass

import torch.distributed as dist
from torch import Tensor

from thinwire import schedules
from thinwire.codecs import AnySpec
from thinwire.codecs import get as get_codec
from thinwire.errors import ScheduleError
from thinwire.runtimes.trace import Trace, trace
from thinwire.schedules.choose import choose


@dataclass(frozen=True)
class Explanation:
    """The schedule that `auto` chooses, the reason, and all candidates."""

    numel: int
    codec: str
    world: int
    schedule: str
    why: str
    fp32_nbytes: int  #: bytes that a rank sends in a float32 all-reduce
    choices: tuple[Trace, ...]

    @property
    def chosen(self) -> Trace:
        return next(each for each in self.choices if each.schedule == self.schedule)

    def __str__(self) -> str:
        lines = [
            f"{self.schedule}: all_reduce of {self.numel:,} elements, {self.codec}, {self.world} ranks",
            f"because {self.why}",
            f"{'schedule':<28}{'bytes sent':>16}{'of fp32':>10}{'messages':>10}{'exchanges':>11}",
        ]
        for choice in self.choices:
            share = choice.sent_nbytes / self.fp32_nbytes if self.fp32_nbytes else 0.0
            lines.append(
                f"{choice.schedule:<28}{choice.sent_nbytes:>16,}{share:>10.1%}{choice.messages:>10,}"
                f"{choice.exchanges:>11,}"
            )
        return "\n".join(lines)


def explain(
    tensor: Tensor | int,
    codec: AnySpec,
    world: int | None = None,
    group: dist.ProcessGroup | None = None,
) -> Explanation:
    """Explain what `all_reduce(tensor, codec, schedule="auto")` would do, in a group or a world of any size.

    >>> from thinwire import explain
    >>> explain(25_000_000, "int4/128", world=8).schedule
    'two_shot'
    """
    numel = tensor.numel() if isinstance(tensor, Tensor) else tensor
    world = dist.get_world_size(group) if world is None else world
    resolved = get_codec(codec)
    if isinstance(tensor, Tensor):
        resolved = resolved.for_shape(tensor.shape)
    spec, why = choose(resolved, numel, world)
    choices = []
    shape = tuple(tensor.shape) if isinstance(tensor, Tensor) else ()
    for name in schedules.SCHEDULES:
        if not shape and name.startswith("low_rank"):  # it needs the shape of the matrix
            continue
        try:
            choices.append(trace(numel, resolved, world, name, shapes=[shape] if shape else ()))
        except ScheduleError:  # the schedule cannot serve this codec
            continue
    fp32 = trace(numel, "fp32", world, "native").sent_nbytes
    return Explanation(numel, resolved.spec, world, spec, why, fp32, tuple(choices))
