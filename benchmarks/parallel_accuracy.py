# ruff: noqa: T201
"""Do FSDP2, tensor parallelism and pipelines learn as with float32? Equal seeds, differences and intervals.

    python benchmarks/parallel_accuracy.py --save benchmarks/results

Trials that the file has are not repeated. Two ranks on this machine, over gloo. All arms of a kind train the
same network from the same weights on the same batches with the same hyper-parameters; "fp32" is torch without
thinwire. What is compared is measured on held-out data, without codecs, with the weights that a checkpoint
would hold. With encoded weights of FSDP2 it is also measured as the network computes in training.

Verdicts are those of `thinwire.study.convergence`, with "worse" for "lower", since a worse loss is higher.
The margins were fixed before the runs. docs/parallel/accuracy.md has the tables.
"""

import argparse
import json
import logging
import multiprocessing
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.tensor.parallel as plain
from torch import Tensor, nn
from torch.distributed import pipelining
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.nn.functional import cross_entropy, linear

import thinwire
from thinwire import data, machine, parallel
from thinwire.data.images import Images
from thinwire.data.texts import LENGTH, Text
from thinwire.policy import Policy
from thinwire.policy.recipes import usual
from thinwire.study.convergence import MARGIN, decide
from thinwire.study.statistics import Estimate, differences, estimate
from thinwire.zoo import small
from thinwire.zoo.transformer import GPT2

NAME, BASE, RANKS, SEEDS = "parallel-accuracy", "fp32", 2, 5
MARGINS = {"gpt": 0.02, "cnn": MARGIN}  #: nats of held-out loss, and one point of accuracy, that may be lost
CHUNKS = 4  #: micro-batches of a step of a pipeline
Wire = str | Policy | None
WEIGHTS4 = usual("int4 without feedback", "int4/128")  #: weights have no error feedback
#: By kind and name: what encodes weights or activations, and what encodes gradients.
SHARDED: dict[str, tuple[Wire, Wire]] = {
    BASE: (None, None),
    "bf16": ("bf16", "bf16"),
    "int8": ("int8", "int8"),
    "int8 weights, int4 gradients": ("int8", "int4"),
    "int4": (WEIGHTS4, "int4"),
    "int4 weights": (WEIGHTS4, "fp32"),
    "int4 gradients": ("fp32", "int4"),
    "onebit gradients": ("fp32", "onebit"),
}
ACTIVATIONS: dict[str, tuple[Wire, Wire]] = {
    BASE: (None, None),
    "bf16": ("bf16", "bf16"),
    "int8": ("int8", "int8"),
    "int4": ("int4", "int4"),
}
ARMS = {
    ("fsdp", "gpt"): SHARDED,
    ("fsdp", "cnn"): SHARDED,
    ("tensor", "gpt"): ACTIVATIONS,
    ("pipeline", "gpt"): ACTIVATIONS,
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
    width: int = 128
    depth: int = 2
    heads: int = 4

    def net(self, seed: int) -> nn.Module:
        """Return the network with the weights of a seed, without dropout."""
        torch.manual_seed(seed)
        if self.network == "cnn":
            found = self.examples()[0]
            return small.get("cnn", found.shape, found.classes)
        net = GPT2(256, LENGTH, self.width, self.depth, self.heads)
        # With GPT-2's 0.02, loss stays for long where only the shares of bytes are known; when it leaves that
        # place depends on the last bit, with float32 too.
        nn.init.normal_(net.tokens.weight, std=0.1)
        for module in net.modules():
            if isinstance(module, nn.Dropout):
                module.p = 0.0
        return net

    def examples(self) -> tuple[Images | Text, Images | Text]:
        """Return what is trained on, and the held-out rest."""
        if not Path(self.data).is_file():
            return data.examples(self.data)
        text = torch.tensor(list(Path(self.data).read_bytes()))
        whole = (len(text) - 1) // LENGTH * LENGTH
        x, y = text[:whole].view(-1, LENGTH), text[1 : whole + 1].view(-1, LENGTH)
        return Text(x[: -self.tests], y[: -self.tests], 256), Text(x[-self.tests :], y[-self.tests :], 256)

    def batches(self, seed: int) -> Iterator[tuple[Tensor, Tensor]]:
        """Yield the batches of a seed, the same for all kinds."""
        train, order = self.examples()[0], torch.Generator().manual_seed(seed)
        for _ in range(self.steps):
            yield train.batch(torch.randint(len(train), (self.batch,), generator=order))


SETTINGS = {
    "gpt": Setting("gpt", "sotu", 170, 8, 1e-3, 311),
    "cnn": Setting("cnn", "fashion-mnist", 120, 64, 0.05, 10_000),
}


@dataclass
class Trained:
    """What a rank holds after training."""

    state: dict[str, Tensor]  #: whole tensors; ranks may hold different ones
    sent_share: float | None = None  #: bytes sent, of those that torch sends; None: not counted
    encoded: nn.Module | None = None  #: the network that computes with encoded weights


def loss_of(logits: Tensor, wanted: Tensor) -> Tensor:
    return cross_entropy(logits.flatten(0, -2), wanted.flatten())


def learn(setting: Setting, seed: int, parameters: list[nn.Parameter], step: Callable[..., None]) -> None:
    """Call `step(x, y)`, which leaves gradients, and update, for all batches."""
    optimizer = small.optimizer(setting.network, parameters, setting.lr)
    for number, (x, y) in enumerate(setting.batches(seed), start=1):
        for group in optimizer.param_groups:
            group["lr"] = setting.lr * small.rate(setting.network, number, setting.steps)
        optimizer.zero_grad()
        step(x, y)
        optimizer.step()


def whole(net: nn.Module) -> dict[str, Tensor]:
    found = {name: each.detach() for name, each in net.named_parameters()}
    return {name: each.full_tensor() if isinstance(each, DTensor) else each for name, each in found.items()}


def share(counts: Sequence[dict[str, int]]) -> float:
    return sum(each["sent_nbytes"] for each in counts) / sum(each["plain_nbytes"] for each in counts)


def fsdp(setting: Setting, seed: int, weights: Wire, gradients: Wire) -> Trained:
    """Every rank has a half of each batch, and of each parameter."""
    net = setting.net(seed)
    mesh = init_device_mesh("cpu", (RANKS,))
    for block in net.blocks if isinstance(net, GPT2) else ():
        fully_shard(block, mesh=mesh)
    fully_shard(net, mesh=mesh)
    handle = None if gradients is None else thinwire.attach(net, gradients, weights=weights, seed=seed)
    mine = slice(dist.get_rank(), None, RANKS)
    learn(setting, seed, list(net.parameters()), lambda x, y: loss_of(net(x[mine]), y[mine]).backward())
    if handle is None:
        return Trained(whole(net), 1.0)
    sent = share(list(handle.stats()["directions"].values()))
    return Trained(whole(net), sent, None if weights == "fp32" else net)


def tensor(setting: Setting, seed: int, forward: Wire, backward: Wire) -> Trained:
    """Between layers every rank has a half of the sequence; inside, a half of the heads and columns."""
    net = setting.net(seed)
    assert isinstance(net, GPT2)
    torches = forward == backward is None
    styles: Any = plain if torches else parallel
    wires = {} if torches else {"forward": forward, "backward": backward}
    columns = styles.ColwiseParallel(input_layouts=Shard(1), **wires)
    rows = styles.RowwiseParallel(output_layouts=Shard(1), **wires)
    norm = styles.SequenceParallel(use_local_output=True, **wires)
    plan = {
        "blocks": styles.PrepareModuleInputOutput(
            input_layouts=(Replicate(),),
            desired_input_layouts=(Shard(1),),
            use_local_input=True,
            output_layouts=(Shard(1),),
            desired_output_layouts=(Replicate(),),
            **wires,
        ),
        "blocks.*.norm1": norm,
        "blocks.*.attention.qkv": columns,
        "blocks.*.attention.out": rows,
        "blocks.*.norm2": norm,
        "blocks.*.mlp.fc1": columns,
        "blocks.*.mlp.fc2": rows,
    }
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
    back = order.argsort()
    return Trained({name: each[back] if ".qkv." in name else each for name, each in whole(net).items()})


class Stage(nn.Module):
    """Half a block; the first stage also embeds, the last also predicts, with the same matrix."""

    def __init__(self, net: GPT2, index: int) -> None:
        super().__init__()
        block = net.blocks[index // 2]
        self.index, self.first, self.last = index, index == 0, index == 2 * len(net.blocks) - 1
        self.before, self.inner = (block.norm2, block.mlp) if index % 2 else (block.norm1, block.attention)
        self.tokens = net.tokens if self.first or self.last else None
        self.positions = net.positions if self.first else None
        self.norm = net.norm if self.last else None

    def forward(self, x: Tensor) -> Tensor:
        if self.tokens is not None and self.positions is not None:
            x = self.tokens(x) + self.positions(torch.arange(x.shape[1]))
        x = x + self.inner(self.before(x))
        return x if self.norm is None or self.tokens is None else linear(self.norm(x), self.tokens.weight)


def pipeline(setting: Setting, seed: int, forward: Wire, backward: Wire) -> Trained:
    """Halves of blocks are stages, in turn on either rank."""
    net, rank, count = setting.net(seed), dist.get_rank(), 2 * setting.depth
    assert isinstance(net, GPT2)
    torches = forward == backward is None
    make: Any = pipelining.PipelineStage if torches else parallel.PipelineStage
    wires = {} if torches else {"codec": None, "forward": forward, "backward": backward, "seed": seed}
    modules = [Stage(net, index) for index in range(rank, count, RANKS)]
    stages = [make(each, each.index, count, torch.device("cpu"), **wires) for each in modules]
    schedule = pipelining.ScheduleInterleaved1F1B(stages, CHUNKS, loss_fn=loss_of)

    def step(x: Tensor, y: Tensor) -> None:
        schedule.step(*((x,) if modules[0].first else ()), **({"target": y} if modules[-1].last else {}))
        dist.all_reduce(net.tokens.weight.grad)  # the first and the last stage share it

    mine = {id(each) for module in modules for each in module.parameters()}
    trained = {name: each for name, each in net.named_parameters() if id(each) in mine}
    learn(setting, seed, list(trained.values()), step)
    state = {name: each.detach() for name, each in trained.items()}
    handles = [] if torches else [stage.handle for stage in stages]
    counts = [each for handle in handles for each in handle.stats()["stages"].values()]
    sent = [each[direction] for each in counts for direction in ("forward", "backward")]
    return Trained(state, share(sent) if sent else 1.0)


KINDS = {"fsdp": fsdp, "tensor": tensor, "pipeline": pipeline}


def held_out(setting: Setting, net: nn.Module) -> float:
    """Return the loss of a text, or the accuracy on images; every rank computes a half."""
    test = setting.examples()[1]
    total, at = torch.zeros(2, dtype=torch.float64), torch.arange(len(test))
    apart = max(1, len(test) // setting.tests)
    with torch.no_grad():
        for picked in at[::apart][: setting.tests].tensor_split(RANKS)[dist.get_rank()].split(250):
            x, y = test.batch(picked)
            logits = net(x)
            right = (logits.argmax(-1) == y).double().mean()
            value = loss_of(logits, y) if setting.network == "gpt" else right
            total += torch.tensor([float(value) * len(picked), len(picked)])
    dist.all_reduce(total)
    return float(total[0] / total[1])


def trial(kind: str, setting: Setting, method: str, seed: int) -> dict[str, Any]:
    """Train one arm with one seed, and return what is saved."""
    began = time.monotonic()
    found = KINDS[kind](setting, seed, *ARMS[kind, setting.network][method])
    states: list[dict[str, Tensor]] = [{}] * RANKS
    dist.all_gather_object(states, found.state)
    equal = all(torch.equal(states[0][name], states[1][name]) for name in states[0].keys() & states[1].keys())
    net = setting.net(seed)
    start = held_out(setting, net) if method == BASE else None
    net.load_state_dict({name: each for state in states for name, each in state.items()})
    return {
        "link": "loopback",
        "kind": kind,
        "network": setting.network,
        "method": method,
        "seed": seed,
        "value": held_out(setting, net),
        "start": start,
        "encoded": None if found.encoded is None else held_out(setting, found.encoded),
        "sent_share": found.sent_share,
        "replicas_equal": equal,
        "seconds": round(time.monotonic() - began, 2),
    }


def key(row: dict[str, Any]) -> tuple[str, str, str, int]:
    return row["kind"], row["network"], row["method"], row["seed"]


Todo = Sequence[tuple[str, Setting, str, int]]


def run_rank(rank: int, place: str, todo: Todo, record: dict[str, Any], folder: Path) -> None:
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
            print(f"{name}: {row['value']:.4f}, {row['seconds']:.1f} s; {left:.1f} min left", flush=True)
    dist.destroy_process_group()


def run(folder: Path, settings: dict[str, Setting], seeds: int, only: Sequence[str] = ()) -> None:
    """Run the trials that the folder's file lacks, one seed after another; `only` has kinds and methods."""
    path = folder / f"{NAME}.json"
    rows = json.loads(path.read_text())["rows"] if path.exists() else []
    facts = {"settings": {name: asdict(each) for name, each in settings.items()}, "margins": MARGINS}
    record = machine.record({**facts, "rows": rows})
    todo = [
        (kind, settings[network], method, seed)
        for seed in range(seeds)
        for (kind, network), arms in ARMS.items()
        for method in arms
        if not only or {kind, method} <= set(only)
    ]
    done = {key(row) for row in rows}
    todo = [each for each in todo if (each[0], each[1].network, *each[2:]) not in done]
    context = multiprocessing.get_context("spawn")
    with tempfile.TemporaryDirectory() as place:
        given = f"{place}/store", todo, record, folder
        ranks = [context.Process(target=run_rank, args=(rank, *given), daemon=True) for rank in range(RANKS)]
        for each in ranks:
            each.start()
        for each in ranks:
            each.join()
    if any(each.exitcode for each in ranks):
        raise SystemExit("a rank failed; run the same command to continue")


def verdict(network: str, difference: Estimate) -> str:
    """Return a word for a difference from fp32: same, near, worse or unknown."""
    better = -difference.mean if network == "gpt" else difference.mean
    word = decide(replace(difference, mean=better), MARGINS[network])
    return "worse" if word == "lower" else word


def cells(network: str, rows: Sequence[dict[str, Any]], base: dict[int, float]) -> list[str]:
    """Return the line of a method: bytes, what was measured, and the difference from fp32."""
    values = {row["seed"]: row["value"] for row in rows}
    unit, digits = (1, 3) if network == "gpt" else (100, 2)
    found, difference = estimate(values.values()), differences(values, base)
    assert found is not None
    sent, encoded = rows[0]["sent_share"], [row["encoded"] for row in rows if row["encoded"] is not None]
    line = [
        "" if sent is None else f"{sent:.1%}",
        f"{unit * found.mean:.{digits}f} ± {unit * (found.deviation or 0):.{digits}f}",
        f"{unit * sum(encoded) / len(encoded):.{digits}f}" if encoded else "",
    ]
    if rows[0]["method"] == BASE or difference is None:
        return [*line, "", "", ""]
    low, high = difference.interval or (float("nan"), float("nan"))
    interval = f"{unit * low:+.{digits}f} to {unit * high:+.{digits}f}"
    return [*line, f"{unit * difference.mean:+.{digits}f}", interval, verdict(network, difference)]


def tables(record: dict[str, Any]) -> list[tuple[str, tuple[str, ...], list[list[str]]]]:
    """Return a title, a header and lines for each kind and network."""
    found = []
    for kind, network in dict.fromkeys((row["kind"], row["network"]) for row in record["rows"]):
        rows = [row for row in record["rows"] if (row["kind"], row["network"]) == (kind, network)]
        bases = [row for row in rows if row["method"] == BASE]
        base = {row["seed"]: row["value"] for row in bases}
        measured, name = ("loss", "nats") if network == "gpt" else ("accuracy %", "points")
        header = ("method", "bytes", measured, "encoded", f"{name} from fp32", "95 % interval", "verdict")
        lines = [
            [f"`{method}`", *cells(network, [row for row in rows if row["method"] == method], base)]
            for method in dict.fromkeys(row["method"] for row in rows)
        ]
        how = record["settings"][network]
        trained = f"{how['steps']} steps of {how['batch']} examples, {len(base)} seeds"
        found.append((f"{kind}: {network} on {how['data']}, {trained}", header, lines))
    return found


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--save", type=Path, default=Path("benchmarks/results"), help="folder of the results")
    parser.add_argument("--seeds", type=int, default=SEEDS)
    parser.add_argument("--only", nargs="*", default=(), help="kinds and methods")
    args = parser.parse_args()
    run(args.save, SETTINGS, args.seeds, args.only)
