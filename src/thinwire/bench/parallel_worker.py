"""One rank of `thinwire bench parallel`. The lab starts it; rank 0 prints one line of JSON for each kind.

Methods take turns, as in `training_worker`. Bytes are counted twice: by thinwire, and by this host's network
interface. The error is that of the first gradients, against torch in float32.
"""

import faulthandler
import gc
import json
import signal
import sys
import time
from dataclasses import dataclass, field
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from thinwire.bench.parallel_all import KINDS
from thinwire.bench.parallel_kinds import COMPUTE, PLAIN, Arm, relative_error
from thinwire.bench.training_worker import first_says, in_groups, slowest, synchronize

WARMUP = {"cpu": 2, "cuda": 8}  # steps; on a GPU calls are recorded after a few
FEWEST_ROUNDS = 4
FEWEST_STEPS = {"cpu": 1, "cuda": 3}
TURN_S = 0.4
MOST_STEPS = 8
MOST_ARMS = {"cpu": 16, "cuda": 16}  # of all ranks that fit on a device together
INTERFACE = "eth0"
COUNTERS = Path("/proc/net/dev")


@dataclass
class Timed:
    """An arm and its times."""

    arm: Arm
    steps: int = 1  #: in a turn
    done: int = 0
    times: list[float] = field(default_factory=list)
    sent: int = 0  #: bytes that the interface counted in all turns
    claimed: int = 0  #: bytes that thinwire counted in all turns
    counted: int = 0  #: steps in these turns

    def turn(self) -> None:
        """Train a few steps, timed."""
        dist.barrier()
        synchronize()
        before, claimed, began = interface_nbytes(), self._claimed(), time.perf_counter()
        for _ in range(self.steps):
            self.arm.step()
        synchronize()
        self.times.append((time.perf_counter() - began) / self.steps)
        dist.barrier()
        self.counted += self.steps
        self.sent += interface_nbytes() - before
        self.claimed += self._claimed() - claimed

    def _claimed(self) -> int:
        return self.arm.sent_nbytes() if self.arm.sent_nbytes is not None else 0


def interface_nbytes() -> int:
    """Bytes that this host's interface has sent; 0 on loopback, where no host has one of its own."""
    for line in COUNTERS.read_text().splitlines():
        name, _, numbers = line.partition(":")
        if name.strip() == INTERFACE:
            return int(numbers.split()[8])
    return 0


def measure(name: str, methods: list[str], seconds: float, device: torch.device) -> dict[str, Any]:
    """Train one kind with all methods; return times by round, bytes and errors."""
    kind, world = KINDS[name], dist.get_world_size()
    others = [each for each in methods if each not in (PLAIN, COMPUTE)]
    groups = in_groups(others, max(1, MOST_ARMS[device.type] // world - 2))
    rows: list[dict[str, Any]] = []
    for group in groups:
        arms = [kind.build(each, device) for each in (PLAIN, COMPUTE, *group)]
        wanted = arms[0].gradients()
        errors = [relative_error(arm.gradients(), wanted) if arm.method != COMPUTE else None for arm in arms]
        del wanted
        timed = _timed(arms, seconds / len(groups), device)
        times = slowest([each.times for each in timed])
        more = [_row(*each, times[0]) for each in zip(timed, times, errors, strict=True)]
        for row, arm in zip(more, arms, strict=True):
            if arm.overlap is not None:
                row |= overlap(*arm.overlap())
        rows += more[2:] if rows else more
        arms.clear()
        timed.clear()
        gc.collect()
        if device.type == "cuda":
            torch.cuda.empty_cache()
    return {"kind": name, "hosts": world, "rows": rows, "alone": kind.alone}


def _row(timed: Timed, times: list[float], error: float | None, plain: list[float]) -> dict[str, Any]:
    return {
        "method": timed.arm.method,
        "times_s": times,
        "plain_times_s": plain,
        "interface_nbytes": timed.sent / timed.counted,
        "sent_nbytes": timed.claimed / timed.counted if timed.arm.sent_nbytes is not None else None,
        "gradient_error": error,
    }


def overlap(hidden_share: float, exposed_s: float) -> dict[str, float]:
    """Return the overlap of transfers of the ranks that hide least."""
    ((shown, longest),) = slowest([[1 - hidden_share, exposed_s]])
    return {"hidden_share": 1 - shown, "exposed_s": longest}


def _timed(arms: list[Arm], seconds: float, device: torch.device) -> list[Timed]:
    timed = [Timed(arm) for arm in arms]
    for each in timed:
        for _ in range(WARMUP[device.type]):
            each.arm.step()
        each.turn()
        step_s = slowest([each.times])[0][0]
        each.steps = max(FEWEST_STEPS[device.type], min(MOST_STEPS, int(TURN_S / step_s)))
        each.times, each.sent, each.claimed, each.counted = [], 0, 0, 0
    began = time.perf_counter()
    for round_ in range(1000):
        first = round_ % len(timed)
        for each in timed[first:] + timed[:first]:
            each.turn()
        if first_says(round_ + 1 >= FEWEST_ROUNDS and time.perf_counter() - began > seconds):
            break
    return timed


def main() -> None:
    """Read the task from the command line, measure, print."""
    task = json.loads(sys.argv[1])
    faulthandler.register(signal.SIGTERM, chain=True)  # shows where each thread is when time is up
    torch.set_num_threads(1)
    device = torch.device(task["device"])
    if device.type == "cuda":
        torch.cuda.set_device(0)
        torch.set_float32_matmul_precision("high")  # TF32, as people train in float32
        device = torch.device("cuda", 0)
    backend = "nccl" if device.type == "cuda" else "gloo"
    dist.init_process_group(backend, timeout=timedelta(seconds=task["patience_s"]))
    for kind in task["kinds"]:
        cell = measure(kind, task["methods"] or list(KINDS[kind].methods), task["seconds"], device)
        if dist.get_rank() == 0:
            sys.stdout.write("RESULT " + json.dumps(cell) + "\n")
            sys.stdout.flush()
        gc.collect()
        dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
