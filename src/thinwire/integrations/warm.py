"""Load or compile the loops of a policy before the first step rather than in it.

Numba and Triton compile a loop at its first call and keep it on disk. That takes seconds on a machine that
never ran it, and tenths of a second later. Compiled loops do not depend on sizes, so small tensors suffice:
two ranks in this process reduce one with every codec and schedule that the policy uses.
"""

import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager

import torch

from thinwire.channel import Channel
from thinwire.codecs import get as get_codec
from thinwire.integrations.audit import Auditor
from thinwire.integrations.metrics import round_trip_error
from thinwire.integrations.routes import Route, schedule_of
from thinwire.policy import Policy, TensorInfo
from thinwire.rounding import Stream
from thinwire.runtimes import local

SHAPE = (128, 64)
PATIENCE_S = 1.0  #: before a line says that loops load or compile
NAME = "thinwire/warm"

Say = Callable[[str], None]


def routes(policies: Iterable[Policy], tensors: Iterable[TensorInfo], world: int) -> set[Route]:
    """Return the routes of these tensors that need loops of their own."""
    rules = {
        (policy.route(tensor, level=level), tensor.numel)
        for policy in policies
        for tensor in tensors
        for level in range(len(policy.ladder.levels) if policy.ladder else 1)
    }
    chosen = {Route(rule.codec, schedule_of(rule, numel, world)) for rule, numel in rules}
    simplified = {Route(route.codec, _one_level(route.schedule)) for route in chosen}
    return {route for route in simplified if route.codec != "fp32"}


def _one_level(schedule: str) -> str:
    """Return a schedule with the same loops that two ranks can run: `two_shot` for two levels."""
    return "two_shot" if schedule.startswith("hierarchical") else schedule


def warm(ways: Iterable[Route], device: torch.device, say: Say, *, audit: Sequence[str] = ()) -> None:
    """Run every route once, and the audit of these recipes for `auto`. A line says so if it takes long."""
    with patience(say, device):
        for codec, schedule in sorted(ways):
            ranks, rng = [torch.ones(SHAPE, device=device) for _ in range(2)], Stream(0)
            local.all_reduce(ranks, [Channel(codec) for _ in ranks], "avg", schedule, name=NAME, rng=rng)
            round_trip_error(get_codec(codec).for_shape(SHAPE), ranks[0], Stream(0, tensor=NAME))
        if audit:
            auditor = Auditor(audit)
            for _ in range(2):
                auditor.see([(TensorInfo(NAME, "weight", SHAPE), torch.ones(SHAPE, device=device))])
            auditor.errors()


@contextmanager
def patience(say: Say, device: torch.device) -> Iterator[None]:
    """Say that loops load or compile, if that takes longer than `PATIENCE_S`."""
    what = "kernels" if device.type == "cuda" else "loops"
    line = f"thinwire: loading {what}, or compiling those that this machine never ran; they are kept on disk"
    timer = threading.Timer(PATIENCE_S, say, (line,))
    timer.daemon = True
    timer.start()
    try:
        yield
    finally:
        timer.cancel()
