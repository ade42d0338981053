"""What the ranks of an outer loop agree to: when they send, what, and what they do with the result."""

import math
import zlib
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any, Literal, TypeAlias, TypedDict

import torch.distributed as dist
from torch import nn
from torch.optim import Optimizer

from thinwire import policy as policies
from thinwire.codecs import AnySpec
from thinwire.codecs import get as get_codec
from thinwire.codecs.own import identity
from thinwire.errors import InputError, PolicyError
from thinwire.policy import LADDER, NOOP, Policy

MEAN, LOCAL = "mean", "local"
RAISE, SKIP = "raise", "skip"
HALF = 0.5  #: `alpha` with a delay, as in Streaming DiLoCo
MakeOptimizer: TypeAlias = Callable[[Iterable[nn.Parameter]], Optimizer]


class Options(TypedDict, total=False):
    """The options that all methods have."""

    #: Parts of the model that are sent at different steps, each every `every` steps.
    fragments: int
    #: Steps from the start of an outer step until its result is used; inner steps go on meanwhile.
    delay: int
    #: Share of the local weights when a result is used: 0, and with a delay 0.5.
    alpha: float | None
    #: "mean": floating-point buffers, such as batch norm's, are averaged in float32; "local": left alone.
    buffers: Literal["mean", "local"]
    #: If an outer gradient is not finite: "raise" on all ranks, or "skip" the outer step on all ranks.
    on_nan: Literal["raise", "skip"]
    #: The outer optimizer of the global weights, instead of the method's own.
    outer: MakeOptimizer | None
    #: Ranks that average; by default all. Ranks that already average every step must not be in it.
    group: dist.ProcessGroup | None
    #: Seed of random rounding.
    seed: int


@dataclass(frozen=True)
class Settings:
    """The settings of an outer loop, checked. All ranks must have the same."""

    method: str
    policy: Policy
    every: int
    make_optimizer: MakeOptimizer
    decay: float = 1.0  #: by which residuals are multiplied before each outer step
    fragments: int = 1
    delay: int = 0
    alpha: float = 0.0
    buffers: str = MEAN
    on_nan: str = RAISE
    seed: int = 0

    def text(self, outer: Optimizer) -> str:
        """Return all settings in words, which ranks compare and checkpoints keep."""
        rules = f"{self.policy.name} {_checksum(self.policy):08x}"
        parts = [f"every {self.every}", rules, f"outer {_described(outer)}"]
        parts += [f"decay {self.decay:g}"] if self.decay != 1.0 else []
        parts += [f"fragments {self.fragments}", f"delay {self.delay}", f"alpha {self.alpha:g}"]
        parts += [f"buffers {self.buffers}", f"on_nan {self.on_nan}", f"seed {self.seed}"]
        return ", ".join(parts)


def settings(
    method: str,
    every: int,
    codec: AnySpec | Policy,
    make_optimizer: MakeOptimizer,
    options: Options,
    decay: float = 1.0,
) -> Settings:
    """Check what a user passed to a method."""
    unknown = sorted(options.keys() - Options.__annotations__.keys())
    if unknown:
        known = ", ".join(Options.__annotations__)
        raise InputError(f"{method} has no option {', '.join(unknown)}; there are: {known}")
    _whole("every", every, 1)
    fragments, delay = options.get("fragments", 1), options.get("delay", 0)
    _whole("fragments", fragments, 1, every, "every")
    _whole("delay", delay, 0, every - 1, "every - 1: the next outer step must not begin before it ends")
    _whole("seed", options.get("seed", 0), 0)
    alpha = options.get("alpha")
    alpha = (HALF if delay else 0.0) if alpha is None else alpha
    _share("alpha", alpha, below=True)
    _share("decay", decay)
    _word("buffers", options.get("buffers", MEAN), (MEAN, LOCAL))
    _word("on_nan", options.get("on_nan", RAISE), (RAISE, SKIP))
    return Settings(
        method, _policy(method, codec, decay), every, options.get("outer") or make_optimizer, decay,
        fragments, delay, alpha, options.get("buffers", MEAN), options.get("on_nan", RAISE),
        options.get("seed", 0),
    )  # fmt: skip


def _policy(method: str, codec: AnySpec | Policy, decay: float) -> Policy:
    if codec in ("auto", NOOP):
        raise PolicyError(
            f"{method} takes a recipe, a codec or a policy; '{codec}' is for gradients of every step"
        )
    policy = policies.get(codec)
    if policy.ladder is not None:
        raise PolicyError(f"{method} takes no ladder: ladders look at gradients of every step; name a codec")
    if decay != 1.0:
        stored = {get_codec(rule.codec).feedback for rule in policy.rules} - {"", "float32"}
        if stored:
            raise PolicyError(
                f"{method} multiplies residuals by {decay:g}, so they must be float32: use +ef, not "
                "+ef:bf16 or +ef:8bit"
            )
    return policy


def _whole(name: str, number: Any, least: int, most: float = math.inf, why: str = "") -> None:
    if isinstance(number, bool) or not isinstance(number, int) or not least <= number <= most:
        upto = f" to {most} ({why})" if most < math.inf else " on"
        raise InputError(f"{name} must be a whole number from {least}{upto}, not {number!r}")


def _share(name: str, number: Any, *, below: bool = False) -> None:
    inside = isinstance(number, int | float) and not isinstance(number, bool) and 0 <= number <= 1
    if not inside or (below and number == 1):
        raise InputError(f"{name} must be from 0 to {'below ' if below else ''}1, not {number!r}")


def _word(name: str, given: Any, known: tuple[str, ...]) -> None:
    if given not in known:
        raise InputError(f"{name} must be {' or '.join(map(repr, known))}, not {given!r}")


def _checksum(policy: Policy) -> int:
    """Of all rules, and of codecs that users define."""
    own = [identity(get_codec(rule.codec)) for rule in policy.rules if rule.codec != LADDER]
    return zlib.crc32(f"{policy.to_toml()}{own}".encode())


def _described(outer: Optimizer) -> str:
    """Return an optimizer's class and its numbers: what it does to weights, not where they are."""
    groups = [{key: each for key, each in group.items() if key != "params"} for group in outer.param_groups]
    shown = {key: each for key, each in groups[0].items() if isinstance(each, float | bool) and each}
    first = " ".join(f"{key}={each}" for key, each in shown.items())
    return f"{type(outer).__name__} {first} {zlib.crc32(repr(groups).encode()):08x}"
