"""What a policy computes with, loaded or compiled before the first step rather than in it.

Numba and Triton compile a loop when it is first called, and keep it on disk: seconds on a machine that never
ran it, tenths of a second later. Neither asks for sizes, so small tensors do: two ranks in this process
reduce one by every codec and schedule that the policy sends something by.
"""

import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager

import torch

from thinwire.channel import Channel
from thinwire.codecs import get as get_codec
from thinwire.integrations.audit import Auditor
from thinwire.integrations.meter import round_trip_error
from thinwire.integrations.routes import Route, schedule_of
from thinwire.policy import Policy, Tensorlike
from thinwire.rounding import Stream
from thinwire.runtimes import local

SHAPE = (128, 64)
PATIENCE_S = 1.0  #: before a line says why nothing happens
NAME = "thinwire/warm"

Say = Callable[[str], None]


def routes(policies: Iterable[Policy], tensors: Iterable[Tensorlike], world: int) -> set[Route]:
    """The ways in which tensors travel that need loops of their own."""
    rules = {
        (policy.route(tensor, level=level), tensor.numel)
        for policy in policies
        for tensor in tensors
        for level in range(len(policy.ladder.levels) if policy.ladder else 1)
    }
    found = {Route(rule.codec, schedule_of(rule, numel, world)) for rule, numel in rules}
    levels = {Route(each.codec, _one_level(each.schedule)) for each in found}
    return {each for each in levels if each.codec != "fp32"}


def _one_level(schedule: str) -> str:
    """A schedule for two ranks; schedules of two levels use the loops of this one."""
    return "two_shot" if schedule.startswith("hierarchical") else schedule


def warm(ways: Iterable[Route], device: torch.device, say: Say, *, audit: Sequence[str] = ()) -> None:
    """Use everything once; `audit` are recipes that `auto` will look at. A line says so if it takes long."""
    with patience(say, device):
        for codec, schedule in sorted(ways):
            ranks, rng = [torch.ones(SHAPE, device=device) for _ in range(2)], Stream(0)
            local.all_reduce(ranks, [Channel(codec) for _ in ranks], "avg", schedule, name=NAME, rng=rng)
            round_trip_error(get_codec(codec).for_shape(SHAPE), ranks[0], Stream(0, tensor=NAME))
        if audit:
            auditor = Auditor(audit)
            for _ in range(2):
                auditor.see([(Tensorlike(NAME, "weight", SHAPE), torch.ones(SHAPE, device=device))])
            auditor.errors()


@contextmanager
def patience(say: Say, device: torch.device) -> Iterator[None]:
    """After a while, say that it compiles."""
    what = "kernels" if device.type == "cuda" else "loops"
    line = f"thinwire: loading {what}, or compiling those that this machine never ran; they are kept on disk"
    timer = threading.Timer(PATIENCE_S, say, (line,))
    timer.daemon = True
    timer.start()
    try:
        yield
    finally:
        timer.cancel()
