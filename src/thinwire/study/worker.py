"""One rank of a study, started by a lab: trains the given trials one after another.

    python -m thinwire.study.worker '[{"study": "demo", "codec": "int8", ...}, ...]'

The seed of a trial decides the initial weights and the order of the data, whatever the codec, so that trials
of one seed can be compared in pairs. On a CPU ranks use gloo, on GPUs NCCL.

Rank 0 prints lines that `thinwire.study.run` reads: `STEP` and JSON for each point of a curve, `RECORD` and a
record as soon as a trial is done. A rank that fails prints `FAILED` and why.
"""

import hashlib
import json
import math
import os
import statistics
import sys
import time
import traceback
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime, timedelta
from functools import cache
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from thinwire import data, machine
from thinwire.errors import InputError
from thinwire.integrations import Handle, attach
from thinwire.runtimes.trace import trace
from thinwire.study.record import PLAIN, Layer, Point, Record, Trial
from thinwire.study.run import FAILED, RECORD, STEP, command
from thinwire.zoo import small

Examples = data.Images | data.Text
POINTS = 20  #: of a training curve
EVALUATIONS = 4  #: points with an accuracy, the last one included
AT_ONCE = 500  #: examples per batch of an evaluation
PATIENCE = timedelta(seconds=60)
CUDA_PATIENCE = timedelta(seconds=180)  #: kernels are compiled when they are first used


@dataclass
class Course:
    """What a rank records while it trains."""

    points: list[Point] = field(default_factory=list)
    times_s: list[float] = field(default_factory=list)  #: of every step
    losses: list[float] = field(default_factory=list)  #: since the last point
    equal: bool = True


def main() -> None:
    """Train the trials of the command line."""
    trials = [Trial(**each) for each in json.loads(sys.argv[1])]
    torch.set_num_threads(1)
    doing = "starting"
    try:
        start(trials[0].device)
        for trial in trials:
            doing = f"{trial.codec}, seed {trial.seed}"
            record = train(trial)
            if dist.get_rank() == 0:
                _say(RECORD, record.to_json())
        dist.barrier()
        dist.destroy_process_group()
    except Exception as error:  # noqa: BLE001
        traceback.print_exc()
        _say(FAILED, f"{doing}: {type(error).__name__}: {' '.join(str(error).split())}")
        sys.exit(1)
    sys.stdout.flush()
    os._exit(0)  # DDP keeps the group's threads, which abort if they free a tensor while Python exits


def start(device: str) -> None:
    """Join the group of all ranks: gloo on a CPU, NCCL on GPUs, where float32 products may use TF32."""
    if device == "cpu":
        dist.init_process_group("gloo", timeout=PATIENCE)
        return
    if not torch.cuda.is_available():
        raise InputError("this rank sees no CUDA device; train with --device cpu")
    mine = torch.device("cuda", int(os.environ.get("LOCAL_RANK", "0")))
    torch.cuda.set_device(mine)
    torch.set_float32_matmul_precision("high")
    dist.init_process_group("nccl", timeout=CUDA_PATIENCE, device_id=mine)


def train(trial: Trial) -> Record:
    """Train one trial from its initial weights, and return its record."""
    examples, tests = _examples(trial.data, trial.device)
    compute_s = _warm_up(trial.data, trial.network, trial.codec, trial.batch, trial.device)
    model, handle = build(trial, examples)
    optimizer = small.optimizer(trial.network, model.parameters(), trial.lr)
    evaluated = marks(trial.steps, EVALUATIONS)
    noted = evaluated | marks(trial.steps, POINTS)
    course = Course()
    dist.barrier()
    for step, picked in zip(range(1, trial.steps + 1), order(trial, len(examples)), strict=False):
        began = _now(trial.device)
        for group in optimizer.param_groups:
            group["lr"] = trial.lr * small.rate(trial.network, step, trial.steps)
        loss = backward(model, *examples.batch(picked.to(trial.device)))
        optimizer.step()
        course.times_s.append(_now(trial.device) - began)
        course.losses.append(loss.item())
        if step in noted:
            accuracy = evaluate(model.module, tests) if step in evaluated else None
            _note(course, trial, step, model, _sent(handle, model, step), accuracy)
    return _record(trial, course, model, handle, compute_s)


def _now(device: str) -> float:
    """Return the time after the GPU has finished all its work."""
    if device != "cpu":
        torch.cuda.synchronize()
    return time.perf_counter()


@cache
def _examples(name: str, device: str) -> tuple[Examples, Examples]:
    train, test = data.examples(name)
    return train.to(device), test.to(device)


def build(trial: Trial, examples: Examples) -> tuple[DistributedDataParallel, Handle | None]:
    """Return the network with the weights of its seed, and the handle attached to it."""
    torch.manual_seed(trial.seed)
    net = small.get(trial.network, examples.shape, examples.classes)
    model = DistributedDataParallel(net.to(trial.device))
    return model, None if trial.codec == PLAIN else attach(model, trial.codec, seed=trial.seed)


def order(trial: Trial, count: int) -> Iterator[Tensor]:
    """Yield this rank's samples of every step; all ranks shuffle alike and take their share."""
    size = trial.batch * trial.hosts
    if size > count:
        raise InputError(f"{trial.data} has {count} examples, a step takes {size}: use smaller batches")
    generator = torch.Generator().manual_seed(trial.seed)
    while True:
        shuffled = torch.randperm(count, generator=generator)
        for first in range(0, count - size + 1, size):
            start = first + dist.get_rank() * trial.batch
            yield shuffled[start : start + trial.batch]


def backward(model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
    """Compute the gradients of a batch, and return its loss."""
    model.zero_grad()
    loss = nn.functional.cross_entropy(model(x).flatten(0, -2), y.flatten())
    loss.backward()
    return loss.detach()


@torch.no_grad()
def evaluate(net: nn.Module, tests: Examples) -> float:
    """Return the accuracy on the test set; every rank evaluates a share of it."""
    net.eval()
    right = torch.zeros((), dtype=torch.int64, device=tests.y.device)
    step = AT_ONCE * dist.get_world_size()
    for start in range(AT_ONCE * dist.get_rank(), len(tests), step):
        x, y = tests.batch(slice(start, start + AT_ONCE))
        right += (net(x).argmax(-1) == y).sum()
    net.train()
    dist.all_reduce(right)
    return right.item() / tests.y.numel()


def marks(steps: int, count: int) -> set[int]:
    """Return evenly spaced steps, the last one included.

    >>> sorted(marks(10, 4))
    [2, 5, 8, 10]
    """
    return {max(1, round(steps * each / count)) for each in range(1, count + 1)}


@cache
def _warm_up(name: str, network: str, codec: str, batch: int, device: str) -> float:
    """Run a few steps, since the first ones compile; returns the seconds of one without communication."""
    examples, _ = _examples(name, device)
    world = dist.get_world_size()
    trial = Trial("warm-up", name, network, codec, 0, world, "", 1, batch, 0.0, device=device)
    model, _handle = build(trial, examples)
    x, y = examples.batch(slice(0, batch))
    for _ in range(2):
        backward(model, x, y)
    times = []
    with model.no_sync():
        for _ in range(3):
            began = _now(device)
            backward(model, *examples.batch(slice(0, batch)))
            times.append(_now(device) - began)
    return statistics.median(times)


def _note(
    course: Course,
    trial: Trial,
    step: int,
    model: DistributedDataParallel,
    sent_nbytes: int,
    accuracy: float | None,
) -> None:
    """Add a point to the curve, and check that all ranks hold the same bits.

    Hashing a large network takes a while: on a GPU it is done only where the accuracy is measured.
    """
    total = torch.tensor([statistics.fmean(course.losses)], dtype=torch.float64, device=trial.device)
    dist.all_reduce(total)
    if trial.device == "cpu" or accuracy is not None:
        mine = torch.frombuffer(bytearray(_digest(model)), dtype=torch.uint8).to(trial.device)
        digests = [torch.empty_like(mine) for _ in range(dist.get_world_size())]
        dist.all_gather(digests, mine)
        course.equal &= all(torch.equal(mine, each) for each in digests)
    loss = total.item() / dist.get_world_size()
    course.points.append(Point(step, sum(course.times_s), sent_nbytes, loss, accuracy))
    course.losses.clear()
    if dist.get_rank() == 0:
        progress = {"trial": trial.key, "step": step, "loss": round(loss, 4), "accuracy": accuracy}
        _say(STEP, json.dumps(progress))
    dist.barrier()


def _digest(model: nn.Module) -> bytes:
    digest = hashlib.sha256()
    for parameter in model.parameters():
        digest.update(parameter.detach().cpu().numpy().data)
    return digest.digest()


def _sent(handle: Handle | None, model: DistributedDataParallel, steps: int) -> int:
    return steps * _plain_nbytes(model) if handle is None else handle.metrics.sent_nbytes


def _plain_nbytes(model: DistributedDataParallel) -> int:
    """Return the bytes that a rank sends in one step of DDP."""
    numel = sum(parameter.numel() for parameter in model.parameters())
    return trace(numel, "fp32", dist.get_world_size(), "native").sent_nbytes


def parts_of_a_step(
    times_s: Sequence[float], totals_s: Mapping[str, float], compute_s: float
) -> dict[str, float]:
    """Return the mean seconds of each part of a step; computing and waiting add up to a step.

    If waiting was not measured, it is the rest of a step after `compute_s`.

    >>> parts_of_a_step([1.0, 1.0, 4.0], {"wait": 1.5}, 0.2)
    {'compute': 1.5, 'wait': 0.5}
    >>> parts_of_a_step([1.0, 3.0], {}, 0.5)
    {'compute': 0.5, 'wait': 1.5}
    """
    mean_s = statistics.fmean(times_s)
    seconds = {name: each / len(times_s) for name, each in totals_s.items()}
    seconds.setdefault("wait", max(0.0, mean_s - compute_s))
    return {"compute": max(0.0, mean_s - seconds["wait"]), **seconds}


def _record(
    trial: Trial, course: Course, model: DistributedDataParallel, handle: Handle | None, compute_s: float
) -> Record:
    stats = handle.stats() if handle else {}
    auto = stats.get("auto")
    step_s = statistics.median(course.times_s)
    sent, fp32 = _sent(handle, model, trial.steps), trial.steps * _plain_nbytes(model)
    last = course.points[-1].accuracy
    assert last is not None
    return Record(
        trial,
        tuple(course.points),
        accuracy=last,
        step_s=step_s,
        samples_per_s=trial.batch * trial.hosts / step_s,
        sent_nbytes_per_step=sent / trial.steps,
        fp32_nbytes_per_step=fp32 / trial.steps,
        seconds=parts_of_a_step(course.times_s, stats.get("seconds", {}), compute_s),
        overlap=stats.get("overlap", 0.0),
        layers=tuple(_layer(name, each) for name, each in stats.get("layers", {}).items()),
        replicas_equal=course.equal,
        predicted_step_s=auto["predicted_step_s"] if auto else None,
        choice=auto,
        environment=_environment(),
        command=command(trial),
    )


def _layer(name: str, metrics: dict[str, Any]) -> Layer:
    measured = [_finite(metrics[each]) for each in ("error", "snr_db", "residual_norm")]
    return Layer(name, metrics["codec"], metrics["numel"], metrics["wire_nbytes"], *measured)


def _finite(value: float | None) -> float | None:
    return value if value is not None and math.isfinite(value) else None


@cache
def _environment() -> dict[str, Any]:
    now = datetime.now(UTC).isoformat(timespec="seconds")
    lab = json.loads(os.environ.get("THINWIRE_LAB", "{}"))
    shared = {"lab": lab} if lab.get("gpus") else {}
    return {"date": now, "commit": machine.commit(), "cores": os.cpu_count(), **machine.describe(), **shared}


def _say(kind: str, text: str) -> None:
    sys.stdout.write(f"{kind}{text}\n")
    sys.stdout.flush()


if __name__ == "__main__":
    main()
