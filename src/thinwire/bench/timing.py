"""Time of a call, beside a plain copy of its input."""

import statistics
import time
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

Call = Callable[[], Any]


def against_copy(call: Call, x: Tensor, nbytes: int) -> dict[str, float]:
    """Return median times of a call and of a copy of x, and their ratios. They take turns: machines drift.

    `nbytes` counts what the call reads and writes per value; a float32 copy moves 8.
    """
    target = torch.empty_like(x)
    repeats, rounds = _repeats(call, x.device, 0.5)
    times = []
    for _ in range(rounds):
        copied = _timed(lambda: target.copy_(x), x.device, 10 if x.device.type == "cuda" else 1)
        times.append((_timed(call, x.device, repeats), copied))
    elapsed_s, copy_s = (statistics.median(each) for each in zip(*times, strict=True))
    return {
        "seconds": elapsed_s,
        "elements_per_s": x.numel() / elapsed_s,
        "copy_s": copy_s,
        "speed_ratio": copy_s / elapsed_s,
        "bandwidth_ratio": nbytes / elapsed_s / (8 / copy_s),
    }


def seconds(call: Call, device: torch.device, budget_s: float = 0.4) -> float:
    """Return the median time of one call, after a warm-up. Short calls are timed many at a time.

    On a GPU at least ten calls run back to back, so that its clock measures its work. A call shorter than a
    launch still takes the time of a launch.
    """
    repeats, rounds = _repeats(call, device, budget_s)
    return statistics.median(_timed(call, device, repeats) for _ in range(rounds))


def _repeats(call: Call, device: torch.device, budget_s: float) -> tuple[int, int]:
    """Warm up; return how many calls to time at once, and how often."""
    call()
    call()
    once = _timed(call, device, 1)
    repeats = max(10 if device.type == "cuda" else 1, int(2e-4 / max(once, 1e-7)))
    return repeats, min(25, max(5, int(budget_s / max(once * repeats, 1e-6))))


def _timed(call: Call, device: torch.device, repeats: int) -> float:
    if device.type == "cuda":
        start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        start.record()
        for _ in range(repeats):
            call()
        end.record()
        end.synchronize()
        return float(start.elapsed_time(end)) / 1000 / repeats
    begin = time.perf_counter()
    for _ in range(repeats):
        call()
    return (time.perf_counter() - begin) / repeats
