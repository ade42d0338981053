"""Run the trials of reproductions, in this process or in several that share a device."""

import math
import shlex
import time
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from dataclasses import replace
from datetime import UTC, datetime
from functools import cache
from multiprocessing import get_context
from typing import Any

import torch
from torch import Tensor, nn

from thinwire import data, machine, simulate
from thinwire.policy import Policy, Rule
from thinwire.runtimes.trace import trace
from thinwire.simulate import cuda_graph, recipes, update
from thinwire.simulate.layers import simulated
from thinwire.study import reproduce
from thinwire.study.record import Point, Record, Trial
from thinwire.study.reproduce.paper import FULL, PREFIX, QUICK, Arm, Table
from thinwire.study.run import Progress, Tell
from thinwire.study.store import Store
from thinwire.zoo import small

SHIFT = 4  #: pixels by which images are shifted at random, at most


def run(
    trials: Iterable[Trial],
    store: Store,
    tell: Tell = lambda _: None,
    *,
    device: str = "cpu",
    jobs: int = 1,
) -> list[Record]:
    """Return the records of all trials, in their order; trials that the store does not hold are run first.

    `jobs` processes train at the same time, since small networks do not fill a GPU.
    """
    trials = list(trials)
    missing = [trial for trial in trials if store.get(trial) is None]
    for record in _alone(missing, tell, device) if jobs == 1 else _shared(missing, device, jobs):
        store.put(record)
        last = record.points[-1]
        tell(Progress(record.trial, last.step, last.loss, record.accuracy, record))
    return [record for record in map(store.get, trials) if record is not None]


def _alone(trials: Sequence[Trial], tell: Tell, device: str) -> Iterable[Record]:
    for trial in trials:

        def told(point: simulate.Point, trial: Trial = trial) -> None:
            tell(Progress(trial, point.step, point.loss, point.accuracy))

        yield train(trial, device, told)


def _shared(trials: Sequence[Trial], device: str, jobs: int) -> Iterable[Record]:
    with ProcessPoolExecutor(jobs, mp_context=get_context("spawn")) as pool:
        try:
            for done in as_completed([pool.submit(_train, trial, device) for trial in trials]):
                yield done.result()
        except BaseException:
            pool.shutdown(wait=False, cancel_futures=True)
            raise


def _train(trial: Trial, device: str) -> Record:
    torch.set_num_threads(1)
    return train(trial, device)


def train(trial: Trial, device: str = "cpu", tell: Callable[[simulate.Point], None] | None = None) -> Record:
    """Train one trial from the initial weights of its seed, and return its record."""
    table, arm = reproduce.get(trial.study.removeprefix(PREFIX)).find(trial)
    images, tests = data.images(table.data)
    if table.unit:
        images, tests = (replace(each, mean=0.0, deviation=255.0) for each in (images, tests))
    torch.manual_seed(trial.seed)
    net = small.get(table.network, images.shape, images.classes)
    if arm.recipe != "fp32":
        simulate.convert(net, arm.recipe, seed=trial.seed, tell=None)

    loss, codec = _loss(table, arm, trial.seed), _codec(arm, table, net)

    def per_sample(point: simulate.Point) -> simulate.Point:
        """Return the point with the mean loss over a batch."""
        return replace(point, loss=point.loss / table.batch) if _summed(table, arm) else point

    began = time.perf_counter()
    done = simulate.train(
        net,
        images,
        tests=tests,
        nodes=table.nodes,
        codec=codec,
        schedule=arm.schedule,
        plan=_plan(table),
        optimizer=_optimizer(table, arm, net, trial.seed),
        loss=loss,
        loss_scale=1 / table.nodes if arm.loss_scale == "1/N" else arm.loss_scale,
        pure=arm.pure,
        augment=_augment if table.augment else None,
        together=table.together,
        recorded=cuda_graph.obstacle(torch.device(device), net, loss, codec, arm.schedule) is None,
        seed=trial.seed,
        device=device,
        tell=None if tell is None else lambda point: tell(per_sample(point)),
    )
    done = replace(done, points=tuple(map(per_sample, done.points)))
    return _record(trial, table, net, done, time.perf_counter() - began, device)


def _codec(arm: Arm, table: Table, net: nn.Module) -> str | Policy:
    """Return a codec for all tensors, or a policy that sends some of them in float32."""
    if not arm.wide:
        return arm.wire
    if arm.wide == "start":
        wide = [Rule("fp32", last_step=table.steps // 10 - 1)]
    else:
        names = [name.rpartition(".")[0] for name, each in net.named_parameters() if each.dim() > 1]
        wide = [Rule("fp32", name=f"{name}.*") for name in (names[0], names[-1])]
    return Policy(arm.name, (*wide, Rule(arm.wire, arm.schedule)))


def _loss(table: Table, arm: Arm, seed: int) -> Callable[..., Tensor]:
    if arm.recipe == "fp32":
        return nn.functional.cross_entropy
    loss = nn.CrossEntropyLoss(reduction="sum" if _summed(table, arm) else "mean")
    return simulated(loss, recipes.get(arm.recipe).stages, seed=seed, name="loss")


def _summed(table: Table, arm: Arm) -> bool:
    """Whether gradients are sums over a batch."""
    return table.summed and arm.recipe != "fp32"


def _plan(table: Table) -> simulate.Plan:
    def halved(done: float) -> float:
        return float(0.5 ** math.floor(done / table.halve_every + 1e-9))

    plan = simulate.Plan(
        table.steps, table.batch, table.lr, table.momentum, table.weight_decay, table.warm_up
    )
    return replace(plan, decay=halved) if table.halve_every else plan


def _optimizer(
    table: Table, arm: Arm, net: nn.Module, seed: int
) -> Callable[[Iterable[nn.Parameter]], torch.optim.Optimizer] | None:
    """Return a function that makes the optimizer; None: torch's own SGD."""
    keep = recipes.get(arm.recipe).optimizer
    summed = _summed(table, arm)
    if table.optimizer == "sgd" and keep.format is None and not summed:
        return None
    names = [name for name, each in net.named_parameters() if each.requires_grad]

    def make(parameters: Iterable[nn.Parameter]) -> torch.optim.Optimizer:
        if table.optimizer == "rmsprop":
            return update.RMSprop(parameters, table.lr, keep=keep, update=arm.update, seed=seed, names=names)
        return update.SGD(
            parameters, table.lr, table.momentum, table.weight_decay,
            keep=keep, update=arm.update, seed=seed, names=names,
            gradient=recipes.get(arm.recipe).stages.gradient if summed else None,
            sum_of=table.batch if summed else 1,
        )  # fmt: skip

    return make


def _augment(x: Tensor, draw: torch.Generator) -> Tensor:
    """Flip and shift each image at random; pixels from outside are zero."""
    flipped = torch.rand(len(x), generator=draw).to(x.device) < 0.5
    x = torch.where(flipped[:, None, None, None], x.flip(3), x)
    down, across = torch.randint(0, 2 * SHIFT + 1, (2, len(x)), generator=draw).to(x.device)
    height, width = x.shape[2:]
    rows = torch.arange(height, device=x.device) + down[:, None]
    columns = torch.arange(width, device=x.device) + across[:, None]
    padded = nn.functional.pad(x, (SHIFT, SHIFT, SHIFT, SHIFT))
    samples = torch.arange(len(x), device=x.device)[:, None, None]
    return padded.permute(0, 2, 3, 1)[samples, rows[:, :, None], columns[:, None]].permute(0, 3, 1, 2)


def _record(
    trial: Trial, table: Table, net: nn.Module, done: simulate.Trained, seconds: float, device: str
) -> Record:
    numel = sum(each.numel() for each in net.parameters())
    fp32 = trace(numel, "fp32", table.nodes, "native").sent_nbytes if table.nodes > 1 else 0
    step_s = seconds / done.steps
    points = tuple(
        Point(each.step, each.step * step_s, each.step * done.sent_nbytes, each.loss, each.accuracy)
        for each in done.points
    )
    return Record(
        trial,
        points,
        accuracy=done.accuracy,
        step_s=step_s,
        samples_per_s=table.nodes * table.batch / step_s,
        sent_nbytes_per_step=done.sent_nbytes,
        fp32_nbytes_per_step=fp32,
        seconds={"compute": step_s},
        overlap=0.0,
        layers=(),
        replicas_equal=True,  # there is only one
        environment=_environment(device),
        command=command(trial),
    )


def _environment(device: str) -> dict[str, Any]:
    now = datetime.now(UTC).isoformat(timespec="seconds")
    return {"date": now, "device": device, **_place()}


@cache
def _place() -> dict[str, Any]:
    return {"commit": machine.commit(), **machine.describe()}


def command(trial: Trial) -> str:
    """Return the command that repeats a trial."""
    paper = reproduce.get(trial.study.removeprefix(PREFIX))
    table, _ = paper.find(trial)
    quick = ["--quick"] if table in paper.tables.get(QUICK, ()) and table not in paper.tables[FULL] else []
    chosen = [] if quick else ["--table", table.title]
    return shlex.join(
        [
            "thinwire",
            "reproduce",
            paper.name,
            *quick,
            *chosen,
            "--arm",
            trial.codec,
            "--seed",
            str(trial.seed),
        ]
    )
