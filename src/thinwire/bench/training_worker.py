"""One rank of `thinwire bench training`: started by the lab, it trains and rank 0 prints JSON.

Every method has a model and an optimizer of its own, alike in the beginning. Methods take turns, because
machines drift: every round trains each for a few steps, after a barrier, and each round begins with another
method. What counts is the slowest rank's time. Nothing of a method runs while others have their turns.

Inputs and labels are random, the same in every step: only speed is measured, not what is learnt.
"""

import faulthandler
import gc
import hashlib
import json
import signal
import sys
import time
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass, field
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks, powerSGD_hook
from torch.nn import functional
from torch.nn.parallel import DistributedDataParallel

from thinwire.integrations import Wire, attach
from thinwire.zoo.layers import chain, conv_bn, he_init
from thinwire.zoo.resnet import Residual
from thinwire.zoo.transformer import GPT2

PLAIN, HALF, POWER = "torch-fp32", "torch-fp16", "torch-powersgd"
TORCH = (PLAIN, HALF, POWER)
COMPUTE = "compute only"
AUTO = "auto"
WARMUP = 2  # steps: DDP makes its buckets anew after the first
RANK = 4  # of PowerSGD
POWER_WARMUP = 4  # it sends float32 twice
MOST_WARMUP = 300  # until auto has settled
FEWEST_ROUNDS = 4
TURN_S = 0.5  # of a method in a round, if its steps are shorter
TURN_SHARE = 1 / 30  # of the time for all rounds: a turn is no longer, unless it is one step
MOST_STEPS = 8  # in a turn
ONE_BUCKET_MB = 4096


# Networks


@dataclass(frozen=True)
class Network:
    """What is trained: a network, and how a batch for it looks."""

    build: Callable[[], nn.Module]
    batch: int
    classes: int
    tokens: int = 0  #: in a sequence; none means images of 32 x 32

    def data(self, seed: int) -> tuple[Tensor, Tensor]:
        """Random inputs and labels."""
        generator = torch.Generator().manual_seed(seed)
        shape = (self.batch, self.tokens) if self.tokens else (self.batch,)
        labels = torch.randint(self.classes, shape, generator=generator)
        if self.tokens:
            return torch.randint(self.classes, shape, generator=generator), labels
        return torch.randn(self.batch, 3, 32, 32, generator=generator), labels


def vgg() -> nn.Sequential:
    """Convolutions of few parameters, then fully connected layers of nearly all of them."""
    stages: dict[str, nn.Module] = {}
    inputs = 3
    for stage, width in enumerate((32, 64, 128), start=1):
        stages[f"conv{stage}"] = nn.Conv2d(inputs, width, 3, padding=1)
        stages[f"relu{stage}"] = nn.ReLU()
        stages[f"pool{stage}"] = nn.MaxPool2d(2)
        inputs = width
    return chain(
        **stages,
        flatten=nn.Flatten(),
        fc6=nn.Linear(inputs * 4 * 4, 1280),
        relu6=nn.ReLU(),
        fc7=nn.Linear(1280, 1024),
        relu7=nn.ReLU(),
        fc8=nn.Linear(1024, 10),
    )


def resnet() -> nn.Sequential:
    """ResNet-20 for images of 32 x 32: three stages of three blocks."""
    net = nn.Sequential(conv_bn(3, 16, 3))
    inputs = 16
    for outputs in (16, 32, 64):
        for _ in range(3):
            net += nn.Sequential(_block(inputs, outputs), nn.ReLU())
            inputs = outputs
    return he_init(net + nn.Sequential(nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(inputs, 10)))


def _block(inputs: int, outputs: int) -> Residual:
    stride = 1 if inputs == outputs else 2
    body = chain(
        conv1=conv_bn(inputs, outputs, 3, stride=stride), conv2=conv_bn(outputs, outputs, 3, relu=False)
    )
    short = nn.Identity() if stride == 1 else conv_bn(inputs, outputs, 1, stride=stride, relu=False)
    return Residual(body, short)


class LSTM(nn.Module):
    """A language model: an embedding, two layers and a decoder. Takes word numbers (batch, time)."""

    def __init__(self, vocabulary: int, width: int) -> None:
        super().__init__()
        self.embedding = nn.Embedding(vocabulary, width)
        self.layers = nn.LSTM(width, width, num_layers=2, batch_first=True)
        self.decoder = nn.Linear(width, vocabulary)

    def forward(self, words: Tensor) -> Tensor:
        return self.decoder(self.layers(self.embedding(words))[0])


WORDS = 4000

NETWORKS: dict[str, Network] = {
    "vgg": Network(vgg, batch=16, classes=10),
    "resnet": Network(resnet, batch=40, classes=10),
    "lstm": Network(lambda: LSTM(WORDS, 320), batch=8, classes=WORDS, tokens=16),
    "transformer": Network(lambda: GPT2(WORDS, 64, 256, 4, 4), batch=8, classes=WORDS, tokens=16),
}


# Methods


@dataclass
class Trainee:
    """One method, with a model of its own."""

    method: str
    model: DistributedDataParallel
    optimizer: torch.optim.Optimizer
    wire: Wire | None = None
    power: Any = None  #: the state of torch's PowerSGD
    done: int = 0  #: steps so far
    steps: int = 1  #: in a turn
    times: list[float] = field(default_factory=list)  #: of a step, by round

    def step(self, x: Tensor, labels: Tensor) -> None:
        """One step of training."""
        self.optimizer.zero_grad()
        with self.model.no_sync() if self.method == COMPUTE else nullcontext():
            functional.cross_entropy(self.model(x).flatten(0, -2), labels.flatten()).backward()
        self.optimizer.step()
        self.done += 1

    def turn(self, data: tuple[Tensor, Tensor], steps: int) -> float:
        """Seconds that each of so many steps took, on this rank."""
        dist.barrier()
        start = time.perf_counter()
        for _ in range(steps):
            self.step(*data)
        return (time.perf_counter() - start) / steps

    @property
    def settled(self) -> bool:
        """Whether auto, if this is auto, has made its choice."""
        return self.wire is None or self.wire.pilot is None or self.wire.pilot.settled

    def sent_nbytes(self) -> float:
        """By this rank so far, for gradients; of torch's methods, what a ring sends."""
        if self.wire is not None:
            return float(self.wire.sent_nbytes)
        world = dist.get_world_size()
        if self.power is not None:
            numel = self.power.total_numel_after_compression
        else:
            numel = self.done * sum(parameter.numel() for parameter in self.model.parameters())
        width = {HALF: 2, COMPUTE: 0}.get(self.method, 4)
        return numel * width * 2 * (world - 1) / world


def prepare(method: str, network: Network) -> Trainee:
    """A model with its communication: torch's, or a policy's.

    Torch's PowerSGD gets one bucket, whatever the size of the model: it starts its second exchange when the
    first is done, which deadlocks on gloo when there are several.
    """
    torch.manual_seed(0)
    net = network.build()
    model = DistributedDataParallel(
        net, init_sync=False, bucket_cap_mb=ONE_BUCKET_MB if method == POWER else None
    )
    made = Trainee(method, model, torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9))
    if method == HALF:
        model.register_comm_hook(None, default_hooks.fp16_compress_hook)
    elif method == POWER:
        made.power = powerSGD_hook.PowerSGDState(None, RANK, start_powerSGD_iter=2)
        model.register_comm_hook(made.power, powerSGD_hook.powerSGD_hook)
    elif method not in (PLAIN, COMPUTE):
        made.wire = attach(model, method)
    return made


# Measuring


def main() -> None:
    """Read the task from the command line, measure, print."""
    task = json.loads(sys.argv[1])
    faulthandler.register(signal.SIGTERM, chain=True)  # when time is up: where each thread is
    torch.set_num_threads(1)
    dist.init_process_group("gloo", timeout=timedelta(seconds=task["patience_s"]))
    cell = measure(task["network"], task["methods"], task["seconds"])
    if dist.get_rank() == 0:
        sys.stdout.write("RESULT " + json.dumps(cell) + "\n")
        sys.stdout.flush()
    gc.collect()
    dist.barrier()
    dist.destroy_process_group()


def measure(name: str, methods: list[str], seconds: float) -> dict[str, Any]:
    """All methods on one network: times of every round, bytes, and whether replicas are equal at the end."""
    network = NETWORKS[name]
    data = network.data(seed=1 + dist.get_rank())
    trainees = [prepare(method, network) for method in dict.fromkeys((PLAIN, COMPUTE, *methods))]
    for trainee in trainees:
        warm_up(trainee, data, min(TURN_S, TURN_SHARE * seconds))
    before = [(each.done, each.sent_nbytes()) for each in trainees]
    take_turns(trainees, data, seconds)
    times = _slowest([each.times for each in trainees])
    rows = [
        {
            "method": trainee.method,
            "times_s": taken,
            "steps": trainee.done - done,
            "warm_up_steps": done,
            "sent_nbytes": (trainee.sent_nbytes() - sent) / (trainee.done - done),
            "buckets": _buckets(trainee.model),
            **_replicas(trainee.model),
            **({"auto": trainee.wire.stats()["auto"]} if trainee.wire and trainee.method == AUTO else {}),
        }
        for trainee, taken, (done, sent) in zip(trainees, times, before, strict=True)
    ]
    return {
        "network": name,
        "hosts": dist.get_world_size(),
        "params": sum(parameter.numel() for parameter in trainees[0].model.parameters()),
        "batch": network.batch,
        "compute_times_s": next(row["times_s"] for row in rows if row["method"] == COMPUTE),
        "rows": [row for row in rows if row["method"] != COMPUTE],
    }


def warm_up(trainee: Trainee, data: tuple[Tensor, Tensor], turn_s: float) -> None:
    """Steps until a method runs as it will run, and how many of them fit into a turn.

    Nothing comes between those in which auto measures; it settles on all ranks in the same step.
    """
    trainee.turn(data, (POWER_WARMUP if trainee.method == POWER else WARMUP) - 1)
    while trainee.done < MOST_WARMUP and not trainee.settled:
        trainee.step(*data)
    step_s = _slowest([[trainee.turn(data, 1)]])[0][0]
    if step_s < turn_s:  # it may still have made something for the first time
        step_s = _slowest([[trainee.turn(data, WARMUP)]])[0][0]
    trainee.steps = max(1, min(MOST_STEPS, int(turn_s / step_s)))


def take_turns(trainees: list[Trainee], data: tuple[Tensor, Tensor], seconds: float) -> None:
    """Rounds until the time is up, and at least a few."""
    begin = time.perf_counter()
    for turn in range(1000):
        first = turn % len(trainees)
        for trainee in trainees[first:] + trainees[:first]:
            trainee.times.append(trainee.turn(data, trainee.steps))
        if _first_says(turn + 1 >= FEWEST_ROUNDS and time.perf_counter() - begin > seconds):
            return


def _first_says(yes: bool) -> bool:
    """What rank 0 says, on all ranks."""
    said = torch.tensor([yes], dtype=torch.uint8)
    dist.broadcast(said, 0)
    return bool(said.item())


def _slowest(times: list[list[float]]) -> list[list[float]]:
    found = torch.tensor(times, dtype=torch.float64)
    dist.all_reduce(found, op=dist.ReduceOp.MAX)
    return found.tolist()


def _replicas(model: DistributedDataParallel) -> dict[str, bool]:
    """Whether all ranks have the same parameters, bit for bit, and all of them are finite."""
    parameters = [parameter.detach() for parameter in model.parameters()]
    digest = hashlib.blake2b(digest_size=16)
    for parameter in parameters:
        digest.update(parameter.numpy().tobytes())
    own = torch.frombuffer(bytearray(digest.digest()), dtype=torch.uint8)
    found = [torch.empty_like(own) for _ in range(dist.get_world_size())]
    dist.all_gather(found, own)
    return {
        "replicas_equal": all(torch.equal(each, own) for each in found),
        "finite": all(bool(parameter.isfinite().all()) for parameter in parameters),
    }


def _buckets(model: DistributedDataParallel) -> int:
    """How many buckets DDP makes, as it says itself."""
    sizes = model._get_ddp_logging_data().get("rebuilt_bucket_sizes", "")
    return len([size for size in str(sizes).split(",") if size.strip()])


if __name__ == "__main__":
    main()
