# ruff: noqa: T201
"""Do FSDP2, tensor parallelism and pipelines learn as with float32? Equal seeds, differences and intervals.

    python benchmarks/parallel_accuracy.py --save benchmarks/results

Two ranks on this machine, over gloo. All arms of a kind train the same network from the same weights on the
same batches; "fp32" is torch without thinwire. Held-out data are evaluated without codecs, with the weights
of a checkpoint; with encoded weights of FSDP2 also as in training. docs/parallel/accuracy.md has the tables.
"""

import argparse
import json
import logging
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.tensor.parallel as plain
from parallel_accuracy_tables import BASE, MARGINS
from torch import Tensor, nn
from torch.distributed import pipelining
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.multiprocessing import spawn
from torch.nn.functional import cross_entropy, linear

import thinwire
from thinwire import data, machine, parallel
from thinwire.data.texts import LENGTH, Text
from thinwire.policy import Policy
from thinwire.policy.recipes import usual
from thinwire.zoo import small
from thinwire.zoo.transformer import GPT2

NAME, RANKS, SEEDS, MICRO = "parallel-accuracy", 2, 5, 4  #: the last: micro-batches of a pipeline
Wire = str | Policy | None
WEIGHTS4 = usual("int4 without feedback", "int4/128")  #: weights have no error feedback
#: By arm: what encodes weights or activations, and what encodes gradients.
ACTIVATIONS: dict[str, tuple[Wire, Wire]] = {BASE: (None, None)}
ACTIVATIONS |= {name: (name, name) for name in ("bf16", "int8", "int4")}
SHARDED: dict[str, tuple[Wire, Wire]] = {
    **{name: ACTIVATIONS[name] for name in (BASE, "bf16", "int8")},
    "int8 weights, int4 gradients": ("int8", "int4"),
    "int4": (WEIGHTS4, "int4"),
    "int4 weights": (WEIGHTS4, "fp32"),
    "int4 gradients": ("fp32", "int4"),
    "onebit gradients": ("fp32", "onebit"),
}
ARMS = {
    **{("fsdp", network): SHARDED for network in ("gpt", "cnn")},
    **{(kind, "gpt"): ACTIVATIONS for kind in ("tensor", "pipeline")},
}


@dataclass(frozen=True)
class Setting:
    """A network, and how all arms train it."""

    network: str
    data: str  #: a set of `thinwire.data`, or a file of text
    steps: int
    batch: int  #: examples of a step, on all ranks together
    lr: float
    tests: int  #: held-out examples
    width: int = 128  #: of a GPT, as the next two
    depth: int = 2
    heads: int = 4

    def net(self, seed: int) -> Any:
        """Return the network with the weights of a seed, without dropout."""
        torch.manual_seed(seed)
        if self.network == "cnn":
            return small.get("cnn", self.examples()[0].shape, self.examples()[0].classes)
        net = GPT2(256, LENGTH, self.width, self.depth, self.heads)
        nn.init.normal_(net.tokens.weight, std=0.1)  # with 0.02, the last bits of weights decide on the loss
        for module in (net, *net.blocks):
            module.dropout.p = 0.0
        return net

    def examples(self) -> Any:
        """Return what is trained on, and the held-out rest."""
        if not Path(self.data).is_file():
            return data.examples(self.data)
        text = torch.tensor(list(Path(self.data).read_bytes()))
        windows = Text(text[:-1].unfold(0, LENGTH, LENGTH), text[1:].unfold(0, LENGTH, LENGTH), 256)
        return tuple(Text(*windows.batch(at), 256) for at in (slice(self.tests, None), slice(self.tests)))


SETTINGS = {
    "gpt": Setting("gpt", "sotu", 170, 8, 1e-3, 311),
    "cnn": Setting("cnn", "fashion-mnist", 120, 64, 0.05, 10_000),
}
#: Of a rank: whole tensors, bytes sent as a share of torch's (None: not counted), a net with encoded weights.
Trained = tuple[dict[str, Tensor], float | None, nn.Module | None]


def loss_of(logits: Tensor, wanted: Tensor) -> Tensor:
    return cross_entropy(logits.flatten(0, -2), wanted.flatten())


def learn(setting: Setting, seed: int, parameters: list[nn.Parameter], step: Callable[..., None]) -> None:
    """Call `step(x, y)`, which leaves gradients, and update; a seed has the same batches for all kinds."""
    optimizer = small.optimizer(setting.network, parameters, setting.lr)
    train, order = setting.examples()[0], torch.Generator().manual_seed(seed)
    for number in range(1, setting.steps + 1):
        for group in optimizer.param_groups:
            group["lr"] = setting.lr * small.rate(setting.network, number, setting.steps)
        optimizer.zero_grad()
        step(*train.batch(torch.randint(len(train), (setting.batch,), generator=order)))
        optimizer.step()


def whole(net: nn.Module) -> dict[str, Tensor]:
    found = {name: each.detach() for name, each in net.named_parameters()}
    return {name: each.full_tensor() if isinstance(each, DTensor) else each for name, each in found.items()}


def share(counts: Sequence[dict[str, int]]) -> float:
    return sum(each["sent_nbytes"] for each in counts) / sum(each["plain_nbytes"] for each in counts)


def fsdp(setting: Setting, seed: int, weights: Wire, gradients: Wire) -> Trained:
    """Every rank has a half of each batch, and of each parameter."""
    net, mesh = setting.net(seed), init_device_mesh("cpu", (RANKS,))
    for block in net.blocks if isinstance(net, GPT2) else ():
        fully_shard(block, mesh=mesh)
    fully_shard(net, mesh=mesh)
    handle = None if gradients is None else thinwire.attach(net, gradients, weights=weights, seed=seed)
    mine = slice(dist.get_rank(), None, RANKS)
    learn(setting, seed, list(net.parameters()), lambda x, y: loss_of(net(x[mine]), y[mine]).backward())
    sent = 1.0 if handle is None else share(list(handle.stats()["directions"].values()))
    return whole(net), sent, net if weights not in (None, "fp32") else None


def tensor(setting: Setting, seed: int, forward: Wire, backward: Wire) -> Trained:
    """Between layers every rank has a half of the sequence; inside, a half of the heads and columns."""
    net = setting.net(seed)
    torches = forward == backward is None
    styles: Any = plain if torches else parallel
    wires = {} if torches else {"forward": forward, "backward": backward}
    everything, part = (Replicate(),), (Shard(1),)
    by_style = {
        styles.SequenceParallel(use_local_output=True, **wires): ("norm1", "norm2"),
        styles.ColwiseParallel(input_layouts=Shard(1), **wires): ("attention.qkv", "mlp.fc1"),
        styles.RowwiseParallel(output_layouts=Shard(1), **wires): ("attention.out", "mlp.fc2"),
    }
    plan = {f"blocks.*.{name}": style for style, names in by_style.items() for name in names}
    plan["blocks"] = styles.PrepareModuleInputOutput(
        input_layouts=everything, desired_input_layouts=part, use_local_input=True,
        output_layouts=part, desired_output_layouts=everything, **wires,
    )  # fmt: skip
    # Rows of the fused matrix are queries, keys, values; a rank needs those of its heads next to each other.
    order = torch.arange(3 * setting.width).view(3, RANKS, -1).transpose(0, 1).flatten()
    for block in net.blocks:
        block.attention.heads //= RANKS
        for each in block.attention.qkv.parameters():
            each.data = each.data[order]
    plain.parallelize_module(net, init_device_mesh("cpu", (RANKS,)), plan)

    def step(x: Tensor, y: Tensor) -> None:
        loss_of(net(x), y).backward()
        for each in net.parameters():  # norms: every rank has the gradient of its part of the sequence
            if isinstance(each.grad, DTensor) and each.grad.placements != each.placements:
                each.grad = each.grad.redistribute(placements=each.placements)

    learn(setting, seed, list(net.parameters()), step)
    found = whole(net).items()
    return {name: each[order.argsort()] if ".qkv." in name else each for name, each in found}, None, None


class Stage(nn.Module):
    """Half a block; the first stage also embeds, the last also predicts, with the same matrix."""

    def __init__(self, net: Any, index: int) -> None:
        super().__init__()
        block = net.blocks[index // 2]
        self.index, self.first, self.last = index, index == 0, index == 2 * len(net.blocks) - 1
        self.before, self.inner = (block.norm2, block.mlp) if index % 2 else (block.norm1, block.attention)
        if self.first:
            self.tokens, self.positions = net.tokens, net.positions
        if self.last:
            self.tokens, self.norm = net.tokens, net.norm

    def forward(self, x: Tensor) -> Tensor:
        if self.first:
            x = self.tokens(x) + self.positions(torch.arange(x.shape[1]))
        x = x + self.inner(self.before(x))
        return linear(self.norm(x), self.tokens.weight) if self.last else x


def pipeline(setting: Setting, seed: int, forward: Wire, backward: Wire) -> Trained:
    """Halves of blocks are stages, in turn on either rank."""
    net, rank, count = setting.net(seed), dist.get_rank(), 2 * setting.depth
    torches = forward == backward is None
    make: Any = pipelining.PipelineStage if torches else parallel.PipelineStage
    wires = {} if torches else {"codec": None, "forward": forward, "backward": backward, "seed": seed}
    modules = [Stage(net, index) for index in range(rank, count, RANKS)]
    stages = [make(each, each.index, count, torch.device("cpu"), **wires) for each in modules]
    schedule = pipelining.ScheduleInterleaved1F1B(stages, MICRO, loss_fn=loss_of)

    def step(x: Tensor, y: Tensor) -> None:
        schedule.step(*((x,) if modules[0].first else ()), **({"target": y} if modules[-1].last else {}))
        dist.all_reduce(net.tokens.weight.grad)  # the first and the last stage share it

    mine = {id(each) for module in modules for each in module.parameters()}
    trained = {name: each for name, each in net.named_parameters() if id(each) in mine}
    learn(setting, seed, list(trained.values()), step)
    state = {name: each.detach() for name, each in trained.items()}
    if torches:
        return state, 1.0, None
    counts = [each for stage in stages for each in stage.handle.stats()["stages"].values()]
    return state, share([each[way] for each in counts for way in ("forward", "backward")]), None


KINDS = {"fsdp": fsdp, "tensor": tensor, "pipeline": pipeline}


def held_out(setting: Setting, net: nn.Module) -> float:
    """Return the loss of a text, or the accuracy on images; every rank computes a half."""
    test = setting.examples()[1]
    total, apart = torch.zeros(2, dtype=torch.float64), max(1, len(test) // setting.tests)
    chosen = torch.arange(len(test))[::apart][: setting.tests].tensor_split(RANKS)[dist.get_rank()]
    with torch.no_grad():
        for picked in chosen.split(250):
            x, y = test.batch(picked)
            found = net(x)
            value = loss_of(found, y) if setting.network == "gpt" else (found.argmax(-1) == y).double().mean()
            total += torch.tensor([float(value) * len(picked), len(picked)])
    dist.all_reduce(total)
    return float(total[0] / total[1])


def trial(kind: str, setting: Setting, method: str, seed: int) -> dict[str, Any]:
    """Train one arm with one seed, and return what is saved."""
    began = time.monotonic()
    state, sent_share, encoded = KINDS[kind](setting, seed, *ARMS[kind, setting.network][method])
    states: Any = [{}] * RANKS
    dist.all_gather_object(states, state)
    equal = all(torch.equal(states[0][name], states[1][name]) for name in states[0].keys() & states[1].keys())
    net = setting.net(seed)
    start = held_out(setting, net) if method == BASE else None
    net.load_state_dict({name: each for state in states for name, each in state.items()})
    return {
        "link": "loopback", "kind": kind, "network": setting.network, "method": method, "seed": seed,
        "value": held_out(setting, net), "start": start,
        "encoded": None if encoded is None else held_out(setting, encoded),
        "sent_share": sent_share, "replicas_equal": equal, "seconds": round(time.monotonic() - began, 2),
    }  # fmt: skip


def run_rank(rank: int, place: str, todo: list[Any], record: dict[str, Any], folder: Path) -> None:
    """Run trials one after another; rank 0 saves each."""
    logging.getLogger("thinwire").disabled = True
    torch.set_num_threads(1)
    dist.init_process_group("gloo", store=dist.FileStore(place, RANKS), rank=rank, world_size=RANKS)
    began = time.monotonic()
    for number, (kind, setting, method, seed) in enumerate(todo, start=1):
        row = {**trial(kind, setting, method, seed), "date": machine.now(), "commit": record["commit"]}
        if rank == 0:
            record["rows"].append(row)
            machine.save(record, folder, NAME)
            left = (time.monotonic() - began) / number * (len(todo) - number) / 60
            name = f"{number} of {len(todo)}: {kind}, {setting.network}, {method}, seed {seed}"
            print(f"{name}: {row['value']:.4f}, {left:.1f} min left", flush=True)
    dist.destroy_process_group()


def run(folder: Path, settings: dict[str, Setting], seeds: int, only: Sequence[str] = ()) -> None:
    """Run the trials that the folder's file lacks, one seed after another; `only` has kinds and methods."""
    facts = {"settings": {name: asdict(each) for name, each in settings.items()}, "margins": MARGINS}
    path = folder / f"{NAME}.json"
    before = json.loads(path.read_text()) if path.exists() else {**facts, "rows": []}
    assert facts.items() <= before.items(), f"{path} is of other settings: name another folder"
    record = machine.record({**facts, "rows": before["rows"]})
    done = {(row["kind"], row["network"], row["method"], row["seed"]) for row in before["rows"]}
    todo = [
        (kind, settings[network], method, seed)
        for seed in range(seeds)
        for (kind, network), arms in ARMS.items()
        for method in arms
        if (kind, network, method, seed) not in done and (not only or {kind, method} <= set(only))
    ]
    with tempfile.TemporaryDirectory() as place:
        spawn(run_rank, (f"{place}/store", todo, record, folder), RANKS)


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--save", type=Path, default=Path("benchmarks/results"), help="folder of the results")
    parser.add_argument("--seeds", type=int, default=SEEDS)
    parser.add_argument("--only", nargs="*", default=(), help="kinds and methods")
    args = parser.parse_args()
    run(args.save, SETTINGS, args.seeds, args.only)
