"""Measure what `auto` asks for during training: times of steps, errors, costs, trials.

`Metrics` times steps, on a GPU with events. While `auto` measures, the host may wait for the device; once the
choice is made, it no longer does.
"""

import logging
import os
import platform
import statistics
import time
import zlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

import torch
from torch import Tensor

from thinwire import policy as policies
from thinwire.integrations import auto
from thinwire.integrations.audit import Auditor
from thinwire.integrations.auto import (
    Apart,
    Ask,
    Audit,
    Choice,
    Cost,
    Costs,
    Keep,
    Probe,
    Profile,
    Steps,
    Try,
)
from thinwire.integrations.metrics import Metrics
from thinwire.integrations.tell import tell
from thinwire.policy import Policy, TensorInfo

log = logging.getLogger(__name__)

WARM = 4  #: runs of a recipe on a GPU before it is timed, which record its calls
Gradients = list[tuple[TensorInfo, Tensor]]
Bucket = tuple[Gradients, Tensor]  #: copies of gradients, and the buffer in which they lie


class Trainer(Protocol):
    """What a driver needs from the trainer."""

    step: int
    device: torch.device

    @property
    def metrics(self) -> Metrics: ...
    @property
    def world(self) -> int: ...
    @property
    def rank(self) -> int: ...
    def follow(self, policy: Policy) -> None:
        """Use a policy from the next bucket on."""

    def agree(self, numbers: Tensor) -> Tensor:
        """Return the mean over ranks."""

    def prober(self, policy: Policy, buckets: Sequence[Bucket]) -> tuple[Callable[[], float], int]:
        """Return a call that sends copies of buckets by a policy and waits, and the bytes that it sends.

        The call returns the seconds it took to start all sends.
        """


@dataclass
class AutoDriver:
    """Answers the questions of one choice, step by step."""

    choice: Choice = field(default_factory=Choice)
    _asks: Any = None
    _ask: Ask | None = None
    _since: int = 0  #: the step before the ask
    _auditor: Auditor | None = None
    _buckets: list[Bucket] = field(default_factory=list)
    _kept: int = 0  #: the step whose buckets are kept, to be sent again
    _ready: list[list[float]] = field(default_factory=list)
    _around: list[tuple[float, float]] = field(default_factory=list)  #: `sent_s` and `host_s` of steps
    _nbytes: tuple[int, ...] = ()
    _sizes: list[int] = field(default_factory=list)

    @property
    def settled(self) -> bool:
        return self.choice.settled

    @property
    def defers(self) -> bool:
        """Whether to send nothing before the backward pass ends."""
        return isinstance(self._ask, Apart) and not self.settled

    @property
    def chosen(self) -> str:
        return self.choice.chosen

    def describe(self) -> dict[str, Any]:
        return self.choice.describe()

    def state_dict(self) -> dict[str, Any]:
        return self.choice.state_dict()

    def load_state_dict(self, trainer: Trainer, state: dict[str, Any]) -> None:
        """Restore the choice of an earlier run."""
        self.choice.load_state_dict(state)
        trainer.metrics.always = False
        trainer.metrics.mark()
        trainer.follow(policies.get(self.choice.chosen))

    def begin_step(self, trainer: Trainer) -> None:
        """At the first bucket of a step: answer the current question, if enough is measured."""
        if self.settled:
            return
        if trainer.world == 1:
            self._settle(trainer)
            return
        last = trainer.metrics.last
        if last is not None and last.arrivals:
            self._ready.append(last.ready_s())
            if isinstance(self._ask, Apart):
                self._around.append((last.sent_s(), last.host_s()))
        self._nbytes, self._sizes = tuple(self._sizes), []
        if self._asks is None:
            self.choice.gpu = trainer.device.type == "cuda"
            self._asks = auto.choose(self.choice)
            self._go_on(trainer, None)
        while not self.settled and (answer := self._answer(trainer)) is not None:
            self._go_on(trainer, answer)

    def _go_on(self, trainer: Trainer, answer: object) -> None:
        before = self._ask
        try:
            self._ask = self._asks.send(answer)
        except StopIteration:
            self._settle(trainer)
            return
        self._since = trainer.step
        trainer.metrics.always = not (
            isinstance(self._ask, Try) and self.choice.gpu
        )  # steps with events are not replayed
        if isinstance(self._ask, Audit):
            self._auditor = Auditor(self._ask.recipes)
        elif isinstance(self._ask, Try | Keep):
            trainer.follow(policies.get(self._ask.recipe))
        self._tell(before, trainer.rank)

    def _settle(self, trainer: Trainer) -> None:
        """End the choice: start the counts of `since`, and let rank 0 say what was chosen."""
        self.choice.settled = True
        trainer.metrics.always = False
        trainer.metrics.mark()
        if trainer.rank == 0:
            tell(f"thinwire: step {trainer.step}: {self.choice.verdict()}")

    def _tell(self, before: Ask | None, rank: int) -> None:
        if rank == 0 and (isinstance(before, Probe) or isinstance(self._ask, Keep)):
            log.info("%s", self.choice.explain())

    def see(self, trainer: Trainer, gradients: Gradients, buffer: Tensor) -> None:
        """Look at a bucket before it is sent."""
        if self.settled:
            return
        self._sizes.append(buffer.nbytes)
        if isinstance(self._ask, Audit) and self._auditor is not None:
            self._auditor.see(gradients)
        if trainer.step == self._kept:
            copy, first = buffer.detach().clone(), buffer.storage_offset()
            parts = [
                (t, copy.as_strided(g.size(), g.stride(), g.storage_offset() - first)) for t, g in gradients
            ]
            self._buckets.append((parts, copy))

    def _answer(self, trainer: Trainer) -> Any:
        """Return the answer to the current question; None if it needs more steps."""
        ask, done = self._ask, trainer.step - self._since
        if isinstance(ask, Keep):
            return True
        if isinstance(ask, Probe):
            return self._probe(trainer, ask)
        assert ask is not None
        needed = ask.count + (WARM if self.choice.gpu else 1) if isinstance(ask, Try) else ask.count
        if done < needed:
            if isinstance(ask, Audit) and done == ask.count - 1:
                self._kept = trainer.step  # the probe sends this step's buckets again
            return None
        if isinstance(ask, Audit):
            assert self._auditor is not None
            errors = self._auditor.errors()
            self._auditor = None
            agreed = trainer.agree(torch.tensor(list(errors.values()))).tolist()
            return dict(zip(errors, agreed, strict=True))
        return self._timed(trainer, ask)

    def _timed(self, trainer: Trainer, ask: Steps | Apart | Try) -> Profile:
        """Return the profile of recent steps, averaged over ranks."""
        steps_s = trainer.metrics.steps_s(waits=True)
        recent = steps_s[-ask.count :] if isinstance(ask, Try) else steps_s[-auto.LOOK - 1 :]
        recent = steps_s[-ask.count + 1 :] if isinstance(ask, Apart) else recent
        buckets = len(self._nbytes)
        ready = [each for each in self._ready[-auto.LOOK - 1 :] if len(each) == buckets] or [[0.0] * buckets]
        around = self._around[1:] or [(0.0, 0.0)]  # without the first step, which mixes both modes
        numbers = [statistics.median(recent), auto.faster(steps_s)]
        numbers += [statistics.median(each) for each in zip(*around, strict=True)]
        numbers += [statistics.median(each) for each in zip(*ready, strict=True)]
        agreed = trainer.agree(torch.tensor(numbers, dtype=torch.float32)).tolist()
        step_s, faster, sent_s, host_s, *ready_s = agreed
        return Profile(step_s, tuple(ready_s), self._nbytes, faster, sent_s, host_s)

    def _probe(self, trainer: Trainer, ask: Probe) -> Costs:
        crowd = _crowd(trainer) if trainer.device.type == "cpu" else 0.0
        numbers, sent = [], {}
        for name in ask.recipes:
            probe, sent[name] = trainer.prober(policies.get(name), self._buckets)
            for _ in range(1 if name == "fp32" or trainer.device.type == "cpu" else WARM):
                probe()  # compiles, compares calls, makes buffers, records
            trainer.agree(torch.zeros(1))  # all ranks begin together
            began, began_cpu = time.perf_counter(), time.process_time()
            host_s = probe()
            numbers += [time.perf_counter() - began, time.process_time() - began_cpu, host_s]
        self._buckets.clear()
        agreed = iter(trainer.agree(torch.tensor(numbers, dtype=torch.float32)).tolist())
        costs = {
            name: Cost(next(agreed), next(agreed), sent[name], host_s=next(agreed)) for name in ask.recipes
        }
        return Costs(costs, crowd)


def _crowd(trainer: Trainer) -> float:
    """Return ranks per core of this machine, if communication has no core to itself; else 0."""
    numbers = torch.zeros(trainer.world)
    numbers[trainer.rank] = _machine() * trainer.world
    machines = trainer.agree(numbers).round().tolist()
    local_ranks = machines.count(machines[trainer.rank])
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    lacks = cores / local_ranks < torch.get_num_threads() + 1
    return trainer.agree(torch.tensor([max(1.0, local_ranks / cores) if lacks else 0.0])).item()


def _machine() -> int:
    """Return a number for this machine that float32 holds exactly."""
    try:
        text = Path("/proc/sys/kernel/random/boot_id").read_text()
    except OSError:
        text = platform.node()
    return zlib.crc32(text.encode()) & 0xFFFF
