# ruff: noqa: T201
"""Do sub-batches learn as one device does? K = 1 and 4, 32 and 8 bits, with and without updates for each.

    python benchmarks/sub_batch_accuracy.py --save benchmarks/results
    python benchmarks/sub_batch_accuracy.py --save /tmp/tiny --data digits --steps 20 --seeds 2

Four ranks on this machine, over gloo, train an AlexNet-like network: convolutions data parallel, fully
connected layers split. All arms of a seed start from the same weights and see the same batches. The base is
one device with one update in each step; "one device, 4 updates" takes the four sub-batches one after another.
With 8 bits, activations, their errors and the gradients of convolutions are encoded, the last outputs not.
"""

import argparse
import json
import logging
import tempfile
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass, replace
from functools import cache
from itertools import pairwise
from pathlib import Path
from typing import Any

import parallel_accuracy_tables
import torch
import torch.distributed as dist
from parallel_accuracy_tables import BASE, MARGINS
from torch import Tensor, nn
from torch.multiprocessing import spawn
from torch.nn.functional import cross_entropy
from torch.nn.parallel import DistributedDataParallel

import thinwire
from thinwire import data, machine
from thinwire.parallel import SubBatches

NAME, RANKS, SEEDS, KIND, NETWORK = "sub-batch-accuracy", 4, 5, "sub-batches", "cnn"
ONE_BY_ONE = "one device, 4 updates"


@dataclass(frozen=True)
class Arm:
    """How one arm trains; without ranks it is one device."""

    split: bool
    codec: str | None = None
    count: int = 1
    updates: bool = False  #: after every sub-batch


ARMS = {
    BASE: Arm(False),
    ONE_BY_ONE: Arm(False, None, 4, True),
    **{
        f"{bits} bits, K = {count}{', 4 updates' if updates else ''}": Arm(True, codec, count, updates)
        for count, updates in ((1, False), (4, False), (4, True))
        for bits, codec in ((32, None), (8, "int8"))
    },
}


@dataclass(frozen=True)
class Setting:
    """How all arms train."""

    data: str = "cifar10"
    steps: int = 300
    batch: int = 128  #: of all ranks together
    lr: float = 0.01
    width: int = 512
    tests: int = 2000

    def net(self, seed: int) -> tuple[nn.Sequential, nn.Sequential]:
        """Return convolutions and fully connected layers with the weights of a seed."""
        shape, classes = examples(self.data)[0].shape, examples(self.data)[0].classes
        torch.manual_seed(seed)
        features = nn.Sequential(
            nn.Conv2d(shape[0], 32, 5, padding=2), nn.ReLU(), nn.MaxPool2d(2),
            nn.Conv2d(32, 64, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2),
            nn.Conv2d(64, 64, 3, padding=1), nn.ReLU(), nn.Flatten(),
        )  # fmt: skip
        sizes = [64 * (shape[1] // 4) * (shape[2] // 4), self.width, self.width, classes]
        linears = [nn.Linear(one, other) for one, other in pairwise(sizes)]
        connected = nn.Sequential(linears[0], nn.ReLU(), linears[1], nn.ReLU(), linears[2])
        for each in (*features, *connected):
            if isinstance(each, nn.Conv2d | nn.Linear):
                nn.init.kaiming_normal_(each.weight, nonlinearity="relu")
                nn.init.zeros_(each.bias)
        return features, connected

    def batches(self, seed: int) -> Iterator[tuple[float, Tensor, Tensor]]:
        """Yield learning rates, which fall to 0, and the same batches for all arms of a seed."""
        train, order = examples(self.data)[0], torch.Generator().manual_seed(seed)
        for step in range(self.steps):
            picked = torch.randint(len(train), (self.batch,), generator=order)
            yield self.lr * (1 - step / self.steps), *train.batch(picked)


@cache
def examples(name: str) -> Any:
    return data.examples(name)


def optimizers(features: nn.Module, connected: nn.Module) -> list[torch.optim.Optimizer]:
    return [torch.optim.SGD(each.parameters(), 0.0, momentum=0.9) for each in (features, connected)]


def set_rate(trained: list[torch.optim.Optimizer], lr: float) -> None:
    for optimizer in trained:
        optimizer.zero_grad()
        for group in optimizer.param_groups:
            group["lr"] = lr


def alone(setting: Setting, seed: int, arm: Arm) -> nn.Module:
    """Train on one device; sub-batch k is the k-th part of every rank's samples."""
    features, connected = setting.net(seed)
    first, second = trained = optimizers(features, connected)
    for lr, x, y in setting.batches(seed):
        set_rate(trained, lr)
        found = features(x)
        parts, labels = (each.detach().unflatten(0, (RANKS, arm.count, -1)) for each in (found, y))
        parts.requires_grad_()
        for k in range(arm.count):
            second.zero_grad()
            cross_entropy(connected(parts[:, k].flatten(0, 1)), labels[:, k].flatten()).backward()
            second.step()
        assert parts.grad is not None
        found.backward(parts.grad.view_as(found) / arm.count)
        first.step()
    return nn.Sequential(features, connected)


def split(setting: Setting, seed: int, arm: Arm) -> tuple[nn.Module, float]:
    """Train on all ranks; return the whole network, and bytes as a share of those of 32 bits."""
    features, connected = setting.net(seed)
    replica = DistributedDataParallel(features)
    handle = None if arm.codec is None else thinwire.attach(replica, arm.codec, seed=seed)
    net = SubBatches(
        replica, connected, arm.count, forward=arm.codec, backward=arm.codec, seed=seed, min_numel=1000
    )
    first, second = trained = optimizers(net.features, net.classifier)
    for lr, *batch in setting.batches(seed):
        x, y = (each.chunk(RANKS)[net.rank] for each in batch)
        set_rate(trained, lr)
        if arm.updates:
            net.update_each(x, labels=y, loss=cross_entropy, optimizer=second).backward()
        else:
            cross_entropy(net(x), y).backward()
            second.step()
        first.step()
    sent, plain = net.stats()["sent_nbytes"], net.stats()["plain_nbytes"]
    if handle is not None:
        sent, plain = sent + handle.stats()["sent_nbytes"], plain + handle.stats()["fp32_nbytes"]
    return net.whole(), sent / plain


def accuracy(net: nn.Module, setting: Setting) -> float:
    """Return the share of test images, evenly spaced, that are recognised."""
    test = examples(setting.data)[1]
    picked = torch.arange(len(test))[:: max(1, len(test) // setting.tests)][: setting.tests]
    right = 0.0
    with torch.no_grad():
        for part in picked.split(250):
            x, y = test.batch(part)
            right += (net(x).argmax(1) == y).sum().item()
    return right / len(picked)


def trial(setting: Setting, method: str, seed: int) -> dict[str, Any] | None:
    """Train one arm with one seed; rank 0 returns what is saved."""
    began, arm, sent_share = time.monotonic(), ARMS[method], None
    net: nn.Module | None = None
    if arm.split:
        net, sent_share = split(setting, seed, arm)
    elif dist.get_rank() == 0:
        net = alone(setting, seed, arm)
    weights: list[Any] = [None] * RANKS
    dist.all_gather_object(weights, None if net is None else [each.detach() for each in net.parameters()])
    if dist.get_rank():
        return None
    assert net is not None
    present = [each for each in weights if each is not None]
    return {
        "link": "loopback", "kind": KIND, "network": NETWORK, "method": method, "seed": seed,
        "value": accuracy(net, setting), "encoded": None, "sent_share": sent_share,
        "start": accuracy(nn.Sequential(*setting.net(seed)), setting) if method == BASE else None,
        "replicas_equal": all(all(map(torch.equal, present[0], each)) for each in present),
        "seconds": round(time.monotonic() - began, 2),
    }  # fmt: skip


def run_rank(rank: int, place: str, setting: Setting, todo: list[Any], record: Any, folder: Path) -> None:
    """Run trials one after another; rank 0 saves each."""
    logging.getLogger("thinwire").disabled = True
    torch.set_num_threads(1)
    dist.init_process_group("gloo", store=dist.FileStore(place, RANKS), rank=rank, world_size=RANKS)
    for number, (method, seed) in enumerate(todo, start=1):
        row = trial(setting, method, seed)
        if row is not None:
            record["rows"].append({**row, "date": machine.now(), "commit": record["commit"]})
            machine.save(record, folder, NAME)
            print(f"{number} of {len(todo)}: {method}, seed {seed}: {row['value']:.2%}", flush=True)
    dist.destroy_process_group()


def run(folder: Path, setting: Setting, seeds: int) -> dict[str, Any]:
    """Run the trials that the folder's file lacks, one seed after another; return the record."""
    facts = {"settings": {NETWORK: asdict(setting)}, "margins": MARGINS}
    path = folder / f"{NAME}.json"
    before = json.loads(path.read_text()) if path.exists() else {**facts, "rows": []}
    assert facts.items() <= before.items(), f"{path} is of other settings: name another folder"
    done = {(row["method"], row["seed"]) for row in before["rows"]}
    todo = [(method, seed) for seed in range(seeds) for method in ARMS if (method, seed) not in done]
    record = machine.record({**facts, "rows": before["rows"]})
    if todo:
        examples(setting.data)  # raises here if the set is absent
        with tempfile.TemporaryDirectory() as place:
            spawn(run_rank, (f"{place}/store", setting, todo, record, folder), RANKS)
    return json.loads(path.read_text())


def tables(record: dict[str, Any]) -> list[tuple[str, tuple[str, ...], list[list[str]]]]:
    """Return the differences from one device that updates as often, as `parallel_accuracy_tables`."""
    found = []
    for base, updates in ((BASE, False), (ONE_BY_ONE, True)):
        kept = [row for row in record["rows"] if ARMS[row["method"]].updates == updates]
        rows = [{**row, "method": BASE if row["method"] == base else row["method"]} for row in kept]
        for title, header, lines in parallel_accuracy_tables.tables({**record, "rows": rows}):
            shown = [i for i, name in enumerate(header) if name != "encoded"]
            names = tuple(header[i].replace(BASE, "one device") for i in shown)
            cells = [[line[i].replace(f"`{BASE}`", "one device").strip("`") for i in shown] for line in lines]
            title += ", an update after each sub-batch" if updates else ", one update in a step"
            found.append((title, names, cells))
    return found


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--save", type=Path, default=Path("benchmarks/results"), help="folder of the results")
    parser.add_argument("--seeds", type=int, default=SEEDS)
    parser.add_argument("--data", default=Setting.data, help="an image set of thinwire.data")
    parser.add_argument("--steps", type=int, default=Setting.steps)
    parser.add_argument("--lr", type=float, default=Setting.lr)
    args = parser.parse_args()
    chosen = replace(Setting(), data=args.data, steps=args.steps, lr=args.lr)
    for title, header, lines in tables(run(args.save, chosen, args.seeds)):
        print(title, header, *lines, sep="\n")
