"""One rank of `thinwire bench training`: started by the lab, it trains and rank 0 prints JSON.

Every method has a model and an optimizer of its own, alike in the beginning. Methods take turns, because
machines drift: every round trains each for a few steps, after a barrier, and each round begins with another
method. What counts is the slowest rank's time. Nothing of a method runs while others have their turns. On a
GPU, whose memory does not hold all models of all ranks, methods form groups, each with plain DDP among them.

Inputs and labels are random, the same in every step: only speed is measured, not what is learnt.
"""

import faulthandler
import gc
import hashlib
import json
import signal
import statistics
import sys
import time
from contextlib import nullcontext
from dataclasses import dataclass, field
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks, powerSGD_hook
from torch.nn import functional
from torch.nn.parallel import DistributedDataParallel

from thinwire.bench.training_networks import Network, networks
from thinwire.integrations import Wire, attach

PLAIN, HALF, BRAIN, POWER = "torch-fp32", "torch-fp16", "torch-bf16", "torch-powersgd"
TORCH = (PLAIN, HALF, BRAIN, POWER)  # torch's bf16 hook refuses CPUs
COMPUTE = "compute only"
AUTO = "auto"
WARMUP = {"cpu": 2, "cuda": 3}  # steps: DDP makes its buckets anew after the first
RECORDED = 15  # steps on a GPU until what thinwire repeats is recorded, and its first timed steps are past
GROUP = 5  # methods on a GPU at a time, beside plain DDP and computing alone
RANK = 4  # of PowerSGD
POWER_WARMUP = 4  # it sends float32 twice
MOST_WARMUP = 300  # until auto has settled
FEWEST_ROUNDS = 4
TURN_S = 0.5  # of a method in a round, if its steps are shorter
TURN_SHARE = 1 / 30  # of the time for all rounds: a turn is no longer, unless it has as few steps as may be
FEWEST_STEPS = {"cpu": 1, "cuda": 4}  # in a turn, where they are short: a GPU's first step waits for the host
SHORT_S = 0.1
MOST_STEPS = 8  # in a turn
ONE_BUCKET_MB = 4096


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
    host: list[float] = field(default_factory=list)  #: seconds of every step in thinwire's hook

    def step(self, x: Tensor, labels: Tensor) -> None:
        """One step of training; on a GPU in bfloat16, with parameters and gradients in float32."""
        self.optimizer.zero_grad()
        with self.model.no_sync() if self.method == COMPUTE else nullcontext():
            with torch.autocast("cuda", torch.bfloat16, enabled=x.is_cuda):
                loss = functional.cross_entropy(self.model(x).flatten(0, -2), labels.flatten())
            loss.backward()
        self.optimizer.step()
        self.done += 1

    def turn(self, data: tuple[Tensor, Tensor], steps: int) -> float:
        """Seconds that each of so many steps took, on this rank."""
        dist.barrier()
        synchronize()
        start = time.perf_counter()
        for _ in range(steps):
            self.step(*data)
        synchronize()
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
        width = {HALF: 2, BRAIN: 2, COMPUTE: 0}.get(self.method, 4)
        return numel * width * 2 * (world - 1) / world


def prepare(method: str, network: Network, device: torch.device) -> Trainee:
    """A model with its communication: torch's, or a policy's.

    On a CPU torch's PowerSGD gets one bucket, whatever the size of the model: it starts its second exchange
    when the first is done, which deadlocks on gloo when there are several.
    """
    torch.manual_seed(0)
    net = network.build()
    one = method == POWER and device.type == "cpu"
    model = DistributedDataParallel(
        net, init_sync=False, bucket_cap_mb=ONE_BUCKET_MB if one else None, gradient_as_bucket_view=True
    )
    if network.adam:
        optimizer: torch.optim.Optimizer = torch.optim.AdamW(
            model.parameters(), lr=1e-4, fused=device.type == "cuda"
        )
    else:
        optimizer = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9)
    made = Trainee(method, model, optimizer)
    if method == HALF:
        model.register_comm_hook(None, default_hooks.fp16_compress_hook)
    elif method == BRAIN:
        model.register_comm_hook(None, default_hooks.bf16_compress_hook)
    elif method == POWER:
        made.power = powerSGD_hook.PowerSGDState(None, RANK, start_powerSGD_iter=2)
        model.register_comm_hook(made.power, powerSGD_hook.powerSGD_hook)
    elif method not in (PLAIN, COMPUTE):
        made.wire = attach(model, method)
        _watch(made.wire, made.host)
    return made


def _watch(wire: Wire, spent: list[float]) -> None:
    """Note how long the host is in the hook, step by step."""
    inner = wire.reduce

    def reduce(bucket: Any) -> Any:
        began = time.perf_counter()
        try:
            return inner(bucket)
        finally:
            if bucket.index() == 0:
                spent.append(0.0)
            spent[-1] += time.perf_counter() - began

    wire.reduce = reduce  # type: ignore[method-assign]


# Measuring


def main() -> None:
    """Read the task from the command line, measure, print."""
    task = json.loads(sys.argv[1])
    faulthandler.register(signal.SIGTERM, chain=True)  # when time is up: where each thread is
    torch.set_num_threads(1)
    device = torch.device(task["device"])
    if device.type == "cuda":
        torch.cuda.set_device(0)
    backend = "nccl" if device.type == "cuda" else "gloo"
    dist.init_process_group(backend, timeout=timedelta(seconds=task["patience_s"]))
    cell = measure(task["network"], task["methods"], task["seconds"], device)
    if dist.get_rank() == 0:
        sys.stdout.write("RESULT " + json.dumps(cell) + "\n")
        sys.stdout.flush()
    gc.collect()
    dist.barrier()
    dist.destroy_process_group()


def measure(name: str, methods: list[str], seconds: float, device: torch.device) -> dict[str, Any]:
    """All methods on one network: times of every round, bytes, and whether replicas are equal at the end."""
    network = networks(device.type)[name]
    x, labels = network.data(seed=1 + dist.get_rank())
    data = x.to(device), labels.to(device)
    others = [each for each in dict.fromkeys(methods) if each not in (PLAIN, COMPUTE)]
    size = GROUP if device.type == "cuda" else max(1, len(others))
    groups = [others[at : at + size] for at in range(0, len(others), size)] or [[]]
    rows: list[dict[str, Any]] = []
    computing: dict[str, Any] = {}
    for group in groups:
        trained = [prepare(each, network, device) for each in (PLAIN, COMPUTE, *group)]
        plain, alone, *more = _rows(trained, data, seconds / len(groups))
        rows += more if rows else [plain, *more]
        computing = computing or alone
        trained.clear()
        gc.collect()  # models and their hooks know each other
        if device.type == "cuda":
            torch.cuda.empty_cache()
    return {
        "network": name,
        "hosts": dist.get_world_size(),
        "params": rows[0]["params"],
        "batch": network.batch,
        "compute_times_s": computing["times_s"],
        **({"calls_s": _calls(rows[0]["buckets"], device)} if device.type == "cuda" else {}),
        "rows": rows,
    }


def _rows(trainees: list[Trainee], data: tuple[Tensor, Tensor], seconds: float) -> list[dict[str, Any]]:
    """What a group of methods took and did; plain DDP is the first of them."""
    for trainee in trainees:
        warm_up(trainee, data, min(TURN_S, TURN_SHARE * seconds))
    before = [(each.done, each.sent_nbytes()) for each in trainees]
    take_turns(trainees, data, seconds)
    times = _slowest([each.times for each in trainees])
    return [
        {
            "method": trainee.method,
            "times_s": taken,
            "plain_times_s": times[0],
            "steps": trainee.done - done,
            "warm_up_steps": done,
            "sent_nbytes": (trainee.sent_nbytes() - sent) / (trainee.done - done),
            "buckets": _buckets(trainee.model),
            "params": sum(each.numel() for each in trainee.model.parameters()),
            **_replicas(trainee.model),
            **_wire(trainee.wire),
            **({"host_s": statistics.median(trainee.host[-trainee.steps * 2 :])} if trainee.host else {}),
            **({"auto": trainee.wire.stats()["auto"]} if trainee.wire and trainee.method == AUTO else {}),
        }
        for trainee, taken, (done, sent) in zip(trainees, times, before, strict=True)
    ]


def warm_up(trainee: Trainee, data: tuple[Tensor, Tensor], turn_s: float) -> None:
    """Steps until a method runs as it will run, and how many of them fit into a turn.

    Nothing comes between those in which auto measures; it settles on all ranks in the same step.
    """
    usual = WARMUP[data[0].device.type]
    steps = POWER_WARMUP if trainee.method == POWER else usual
    if trainee.wire is not None and data[0].is_cuda:
        steps = RECORDED
    trainee.turn(data, steps - 1)
    while trainee.done < MOST_WARMUP and not trainee.settled:
        trainee.step(*data)
    step_s = _slowest([[trainee.turn(data, 1)]])[0][0]
    if step_s < turn_s:  # it may still have made something for the first time
        step_s = _slowest([[trainee.turn(data, usual)]])[0][0]
    fewest = FEWEST_STEPS[data[0].device.type] if step_s < SHORT_S else 1
    trainee.steps = max(fewest, min(MOST_STEPS, int(turn_s / step_s)))


def take_turns(trainees: list[Trainee], data: tuple[Tensor, Tensor], seconds: float) -> None:
    """Rounds until the time is up, and at least a few."""
    begin = time.perf_counter()
    for turn in range(1000):
        first = turn % len(trainees)
        for trainee in trainees[first:] + trainees[:first]:
            trainee.times.append(trainee.turn(data, trainee.steps))
        if _first_says(turn + 1 >= FEWEST_ROUNDS and time.perf_counter() - begin > seconds):
            return


def synchronize() -> None:
    """Let the host wait for the GPU, if there is one."""
    if torch.cuda.is_available() and dist.get_backend() == "nccl":
        torch.cuda.synchronize()


def _here(values: Any, dtype: torch.dtype) -> Tensor:
    """A tensor where ranks can exchange it."""
    return torch.tensor(values, dtype=dtype, device="cuda" if dist.get_backend() == "nccl" else "cpu")


def _first_says(yes: bool) -> bool:
    """What rank 0 says, on all ranks."""
    said = _here([yes], torch.uint8)
    dist.broadcast(said, 0)
    return bool(said.item())


def _slowest(times: list[list[float]]) -> list[list[float]]:
    found = _here(times, torch.float64)
    dist.all_reduce(found, op=dist.ReduceOp.MAX)
    return found.tolist()


def _replicas(model: DistributedDataParallel) -> dict[str, bool]:
    """Whether all ranks have the same parameters, bit for bit, and all of them are finite."""
    parameters = [parameter.detach() for parameter in model.parameters()]
    digest = hashlib.blake2b(digest_size=16)
    for parameter in parameters:
        digest.update(parameter.numpy().tobytes() if parameter.device.type == "cpu" else _sums(parameter))
    own = _here(list(digest.digest()), torch.uint8)
    found = [torch.empty_like(own) for _ in range(dist.get_world_size())]
    dist.all_gather(found, own)
    return {
        "replicas_equal": all(torch.equal(each, own) for each in found),
        "finite": all(bool(parameter.isfinite().all()) for parameter in parameters),
    }


def _sums(parameter: Tensor) -> bytes:
    """Two sums over the bits of a tensor, one of them weighted by place: made on the GPU."""
    bits = parameter.contiguous().view(torch.int32).view(-1).long()
    places = torch.arange(1, 2 * bits.numel(), 2, device=bits.device)
    return f"{bits.sum().item()} {(bits * places).sum().item()}".encode()


def _wire(wire: Wire | None) -> dict[str, Any]:
    """Where the time of a step goes, and the memory that is kept, as thinwire tells."""
    if wire is None:
        return {}
    stats = wire.stats()
    steps = max(1, stats["steps"])
    return {
        "seconds": {name: each / steps for name, each in stats["seconds"].items()},
        "overlap": stats["overlap"],
        "buffers_nbytes": stats["buffers_nbytes"],
        "residuals_nbytes": stats["residuals_nbytes"],
    }


def _calls(buckets: int, device: torch.device) -> float:
    """How long the host is in NCCL's own calls for so many buckets, which plain DDP makes as well."""
    x, spent = torch.zeros(1 << 20, device=device), []
    for _ in range(9):
        torch.cuda.synchronize()
        began = time.perf_counter()
        works = [dist.all_reduce(x, async_op=True) for _ in range(buckets)]
        spent.append(time.perf_counter() - began)
        for work in works:
            assert work is not None
            work.wait()
    return statistics.median(spent)


def _buckets(model: DistributedDataParallel) -> int:
    """How many buckets DDP makes, as it says itself."""
    sizes = model._get_ddp_logging_data().get("rebuilt_bucket_sizes", "")
    return len([size for size in str(sizes).split(",") if size.strip()])


if __name__ == "__main__":
    main()
