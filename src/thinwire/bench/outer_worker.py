"""One rank of `thinwire bench outer`. The lab starts it; rank 0 prints a line of JSON for each result.

"loss": trains a small GPT on text by one method with several seeds, and evaluates held-out text on the way.
"time": trains a few rounds by each method between throttled hosts; a round ends with an outer step.
"""

import gc
import hashlib
import json
import statistics
import sys
import time
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from thinwire import collectives, data
from thinwire.bench import outer_methods as methods
from thinwire.bench.parallel_worker import interface_nbytes
from thinwire.bench.training_worker import first_says, slowest
from thinwire.data.texts import LENGTH

DATA = "sotu"
TESTS = 512  # held-out windows, evenly spaced
POINTS = 8  # evaluations of a run
ROUND = 4  # steps from one outer step to the next where times are measured
ROUNDS, TURN_S = 3, 5.0  # fewest rounds, and seconds after which no other begins
WARM = 3  # steps before times are taken
UNLIKE = "ranks hold different weights"


def main() -> None:
    """Read the task from the command line, do it, print."""
    task = json.loads(sys.argv[1])
    torch.set_num_threads(1)
    dist.init_process_group("gloo", timeout=timedelta(seconds=task["patience_s"]))
    if task["what"] == "loss":
        for seed in task["seeds"]:
            say(learn(task["method"], seed, task["steps"], task["batch"]))
    else:
        for method in task["methods"]:
            say(timed(method, task["batch"]))
    dist.barrier()
    dist.destroy_process_group()


def say(result: dict[str, Any]) -> None:
    if dist.get_rank() == 0:
        sys.stdout.write("RESULT " + json.dumps(result) + "\n")
        sys.stdout.flush()
    gc.collect()


def learn(method: str, seed: int, steps: int, batch: int) -> dict[str, Any]:
    """Train with a seed; return held-out losses and bytes on the way. Every method sees the same batches."""
    train, test = data.examples(DATA)
    net, shadow = (methods.network(seed, LENGTH) for _ in range(2))
    trained = methods.build(method, net, steps)
    rank, world = dist.get_rank(), dist.get_world_size()
    order = torch.Generator().manual_seed(seed)
    points = {steps * point // POINTS for point in range(1, POINTS + 1)}
    curve: list[list[float]] = []
    for number in range(1, steps + 1):
        windows = torch.randint(len(train), (world, batch), generator=order)[rank]
        trained.step(*train.batch(windows), number, steps)
        if number in points:
            weights = trained.weights()
            check_alike(weights)
            curve.append([number, held_out(shadow, weights, test), trained.sent_nbytes()])
    return {
        "part": "loss",
        "method": method,
        "seed": seed,
        "steps": steps,
        "batch": batch * world,
        "curve": curve,
    }


def held_out(net: nn.Module, weights: dict[str, Tensor], test: Any) -> float:
    """Return the loss on held-out windows, in nats; every rank evaluates a part."""
    rank, world = dist.get_rank(), dist.get_world_size()
    with torch.no_grad():
        for name, each in net.named_parameters():
            each.copy_(weights[name])
        apart = len(test) // TESTS
        x, y = test.batch(slice(rank * apart, None, world * apart))
        total = torch.stack(
            [methods.loss_of(net, *both) for both in zip(x.split(64), y.split(64), strict=True)]
        )
        mean = total.mean().view(1)
    collectives.all_reduce(mean, "fp32", "avg")
    return float(mean)


def check_alike(weights: dict[str, Tensor]) -> None:
    """Fail if ranks hold different weights."""
    joined = torch.cat([each.float().flatten() for each in weights.values()])
    digest = hashlib.sha256(joined.numpy().tobytes()).hexdigest()
    everyone: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(everyone, digest)
    assert len(set(everyone)) == 1, UNLIKE


def timed(method: str, batch: int) -> dict[str, Any]:
    """Train a few rounds; return seconds and bytes of a round, and seconds of a step without an outer step.

    Outer loops without overlap are timed with outer steps after 4 inner steps: what an outer step sends does
    not depend on its interval. `warm_up_s` is the last step of the first round, or of 1-bit Adam's warm-up.
    """
    every = methods.interval(method)
    overlaps = method.startswith("streaming")
    shown = method if overlaps or every == 1 else methods.shown_with(method, ROUND)
    round_, first = methods.interval(shown), max(WARM, methods.interval(shown))
    train, _ = data.examples(DATA)
    steps = round(WARM / methods.WARMUP)  # so that 1-bit Adam's warm-up has WARM steps
    trained = methods.build(shown, methods.network(0, LENGTH), steps)
    x, y = train.batch(torch.arange(batch) + batch * dist.get_rank())
    warm_up = [one_step(trained, x, y, number, steps) for number in range(1, first + 1)]
    rounds: list[float] = []
    inner: list[float] = []
    nbytes, began = 0, time.perf_counter()
    while first_says(len(rounds) < ROUNDS or time.perf_counter() - began < TURN_S):
        dist.barrier()
        before = interface_nbytes()
        spent = [one_step(trained, x, y, steps, steps) for _ in range(round_)]
        dist.barrier()
        nbytes += interface_nbytes() - before
        rounds.append(sum(spent))
        inner += spent[:-1]
    result = {"part": "time", "method": method, "round": round_, "warm_up_s": slowest([warm_up])[0][-1]}
    result["round_s"] = statistics.median(slowest([rounds])[0])
    result["inner_s"] = statistics.median(slowest([inner])[0]) if inner and not overlaps else None
    return {**result, "nbytes": nbytes / len(rounds)}


def one_step(trained: methods.Trained, x: Tensor, y: Tensor, number: int, steps: int) -> float:
    """Train one step; return its seconds on this rank."""
    began = time.perf_counter()
    trained.step(x, y, min(number, steps), steps)
    return time.perf_counter() - began


if __name__ == "__main__":
    main()
