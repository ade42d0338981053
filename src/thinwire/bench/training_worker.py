"""One rank of `thinwire bench training`. The lab starts it; all ranks train, rank 0 prints JSON per network.

Every method has its own model and optimizer, with equal initial values. Methods take turns, because machines
drift: every round trains each method for a few steps, after a barrier, and starts with another method. The
slowest rank's time counts. Only one method runs at a time. A GPU's memory does not hold all models of all
ranks, so there methods form groups, each with plain DDP.

Inputs and labels are random and the same in every step: this measures speed, not learning.
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
from thinwire.integrations import Handle, attach

PLAIN, HALF, BRAIN, POWER = "torch-fp32", "torch-fp16", "torch-bf16", "torch-powersgd"
TORCH = (PLAIN, HALF, BRAIN, POWER)  # torch's bf16 hook refuses CPUs
COMPUTE = "compute only"
AUTO = "auto"
WARMUP = {"cpu": 2, "cuda": 3}  # steps: DDP rebuilds its buckets after the first
RECORDED = 10  # steps on a GPU: then thinwire has recorded its calls, and its first timed steps are over
MODELS = 24  # of all ranks that fit on a GPU, besides those of plain DDP and of compute only
RANK = 4  # of PowerSGD
POWER_WARMUP = 4  # its first two steps send float32
MOST_WARMUP = 300  # steps to wait until auto has settled
FEWEST_ROUNDS = 4
TURN_S = 0.5  # length of a method's turn, if its steps are shorter
TURN_SHARE = 1 / 30  # of the time for all rounds: longest turn, unless it has only the fewest steps
FEWEST_STEPS = {"cpu": 1, "cuda": 4}  # in a turn, if steps are short: a GPU's first step waits for the host
SHORT_S = {"cpu": 0.1, "cuda": 0.2}  # a step that takes less is short
MOST_STEPS = 8  # in a turn
HOST_STEPS = 5  # that measure the host's time
ONE_BUCKET_MB = 4096


# Methods


@dataclass
class Trainee:
    """One method with its own model."""

    method: str
    model: DistributedDataParallel
    optimizer: torch.optim.Optimizer
    handle: Handle | None = None
    power: Any = None  #: the state of torch's PowerSGD
    done: int = 0  #: steps so far
    steps: int = 1  #: in a turn
    times: list[float] = field(default_factory=list)  #: of a step, by round
    host: list[float] = field(default_factory=list)  #: seconds of every step in thinwire's hook
    host_s: float | None = None  #: of a step that starts with no work pending

    def step(self, x: Tensor, labels: Tensor) -> None:
        """Train one step; on a GPU in bfloat16, with parameters and gradients in float32."""
        self.optimizer.zero_grad()
        with self.model.no_sync() if self.method == COMPUTE else nullcontext():
            with torch.autocast("cuda", torch.bfloat16, enabled=x.is_cuda):
                loss = functional.cross_entropy(self.model(x).flatten(0, -2), labels.flatten())
            loss.backward()
        self.optimizer.step()
        self.done += 1

    def turn(self, data: tuple[Tensor, Tensor], steps: int) -> float:
        """Train `steps` steps; return the seconds per step on this rank."""
        dist.barrier()
        synchronize()
        start = time.perf_counter()
        for _ in range(steps):
            self.step(*data)
        synchronize()
        return (time.perf_counter() - start) / steps

    @property
    def settled(self) -> bool:
        """Whether auto has made its choice; true for all other methods."""
        return self.handle is None or self.handle.auto is None or self.handle.auto.settled

    def sent_nbytes(self) -> float:
        """Bytes of gradients that this rank has sent; for torch's methods, what a ring sends."""
        if self.handle is not None:
            return float(self.handle.sent_nbytes)
        world = dist.get_world_size()
        if self.power is not None:
            numel = self.power.total_numel_after_compression
        else:
            numel = self.done * sum(parameter.numel() for parameter in self.model.parameters())
        width = {HALF: 2, BRAIN: 2, COMPUTE: 0}.get(self.method, 4)
        return numel * width * 2 * (world - 1) / world


def prepare(method: str, network: Network, device: torch.device) -> Trainee:
    """Return a model with torch's communication or a policy's.

    On a CPU torch's PowerSGD gets one bucket for the whole model. With several it deadlocks on gloo, because
    it starts its second all-reduce when the first is done.
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
    trainee = Trainee(method, model, optimizer)
    if method == HALF:
        model.register_comm_hook(None, default_hooks.fp16_compress_hook)
    elif method == BRAIN:
        model.register_comm_hook(None, default_hooks.bf16_compress_hook)
    elif method == POWER:
        trainee.power = powerSGD_hook.PowerSGDState(None, RANK, start_powerSGD_iter=2)
        model.register_comm_hook(trainee.power, powerSGD_hook.powerSGD_hook)
    elif method not in (PLAIN, COMPUTE):
        trainee.handle = attach(model, method)
        _watch(trainee.handle, trainee.host)
    return trainee


def _watch(handle: Handle, spent: list[float]) -> None:
    """Append to `spent` the host's seconds in the hook, step by step."""
    inner = handle.reduce

    def reduce(bucket: Any) -> Any:
        began = time.perf_counter()
        try:
            return inner(bucket)
        finally:
            if bucket.index() == 0:
                spent.append(0.0)
            spent[-1] += time.perf_counter() - began

    handle.reduce = reduce  # type: ignore[method-assign]


# Measuring


def main() -> None:
    """Read the task from the command line, measure, print."""
    task = json.loads(sys.argv[1])
    faulthandler.register(signal.SIGTERM, chain=True)  # shows where each thread is when time is up
    torch.set_num_threads(1)
    device = torch.device(task["device"])
    if device.type == "cuda":
        torch.cuda.set_device(0)
    backend = "nccl" if device.type == "cuda" else "gloo"
    dist.init_process_group(backend, timeout=timedelta(seconds=task["patience_s"]))
    for network in task["networks"]:
        cell = measure(network, task["methods"], task["seconds"], device)
        if dist.get_rank() == 0:
            sys.stdout.write("RESULT " + json.dumps(cell) + "\n")
            sys.stdout.flush()
        gc.collect()
        dist.barrier()
    dist.destroy_process_group()


def measure(name: str, methods: list[str], seconds: float, device: torch.device) -> dict[str, Any]:
    """Train one network with all methods: times by round, bytes, and whether replicas end up equal."""
    network = networks(device.type)[name]
    x, labels = network.data(seed=1 + dist.get_rank())
    data = x.to(device), labels.to(device)
    others = [each for each in dict.fromkeys(methods) if each not in (PLAIN, COMPUTE)]
    groups = in_groups(others, MODELS // dist.get_world_size() if device.type == "cuda" else len(others))
    rows: list[dict[str, Any]] = []
    computing: dict[str, Any] = {}
    for group in groups:
        trained = [prepare(each, network, device) for each in (PLAIN, COMPUTE, *group)]
        plain, alone, *more = _rows(trained, data, seconds / len(groups))
        rows += more if rows else [plain, *more]
        computing = computing or alone
        trained.clear()
        gc.collect()  # models and their hooks refer to each other
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


def in_groups(methods: list[str], most: int) -> list[list[str]]:
    """Split into as few groups as possible, of at most `most` methods and nearly equal sizes.

    >>> in_groups(["a", "b", "c", "d", "e"], 3)
    [['a', 'b', 'c'], ['d', 'e']]
    """
    count = -(-len(methods) // max(1, most)) or 1
    size = -(-len(methods) // count)
    return [methods[at : at + size] for at in range(0, len(methods), max(1, size))] or [[]]


def _rows(trainees: list[Trainee], data: tuple[Tensor, Tensor], seconds: float) -> list[dict[str, Any]]:
    """Train a group of methods and return their rows. Plain DDP is the first method."""
    for trainee in trainees:
        warm_up(trainee, data, min(TURN_S, TURN_SHARE * seconds))
    before = [(each.done, each.sent_nbytes()) for each in trainees]
    take_turns(trainees, data, seconds)
    for trainee in trainees:
        time_host(trainee, data)
    times = slowest([each.times for each in trainees])
    return [
        {
            "method": trainee.method,
            "times_s": own_times,
            "plain_times_s": times[0],
            "steps": trainee.done - done,
            "warm_up_steps": done,
            "sent_nbytes": (trainee.sent_nbytes() - sent) / (trainee.done - done),
            "buckets": _buckets(trainee.model),
            "params": sum(each.numel() for each in trainee.model.parameters()),
            **_replicas(trainee.model),
            **_handle(trainee.handle),
            **({"host_s": trainee.host_s} if trainee.host_s is not None else {}),
            **({"auto": trainee.handle.stats()["auto"]} if trainee.handle and trainee.method == AUTO else {}),
        }
        for trainee, own_times, (done, sent) in zip(trainees, times, before, strict=True)
    ]


def warm_up(trainee: Trainee, data: tuple[Tensor, Tensor], turn_s: float) -> None:
    """Train until a method runs at its steady speed, and set how many steps fit into a turn.

    The steps in which auto measures run without a pause. Auto settles on all ranks in the same step.
    """
    usual = WARMUP[data[0].device.type]
    steps = POWER_WARMUP if trainee.method == POWER else usual
    if trainee.handle is not None and data[0].is_cuda and trainee.method != "fp32":
        steps = RECORDED
    trainee.turn(data, steps - 1)
    while trainee.done < MOST_WARMUP and not trainee.settled:
        trainee.step(*data)
    step_s = slowest([[trainee.turn(data, 1)]])[0][0]
    if step_s < turn_s:  # that step may have included one-time work
        step_s = slowest([[trainee.turn(data, usual)]])[0][0]
    kind = data[0].device.type
    fewest = FEWEST_STEPS[kind] if step_s < SHORT_S[kind] else 1
    trainee.steps = max(fewest, min(MOST_STEPS, int(turn_s / step_s)))


def take_turns(trainees: list[Trainee], data: tuple[Tensor, Tensor], seconds: float) -> None:
    """Run rounds until the time is up, and at least `FEWEST_ROUNDS`."""
    begin = time.perf_counter()
    for turn in range(1000):
        first = turn % len(trainees)
        for trainee in trainees[first:] + trainees[:first]:
            trainee.times.append(trainee.turn(data, trainee.steps))
        if first_says(turn + 1 >= FEWEST_ROUNDS and time.perf_counter() - begin > seconds):
            return


def time_host(trainee: Trainee, data: tuple[Tensor, Tensor]) -> None:
    """Measure the host's seconds in thinwire's hook, in steps that start with no work pending.

    In back-to-back steps, a host that is ahead of the GPU waits for it inside some call.
    """
    if trainee.handle is None:
        return
    for _ in range(HOST_STEPS):
        trainee.turn(data, 1)
    trainee.host_s = statistics.median(trainee.host[-HOST_STEPS:])


def synchronize() -> None:
    """Wait for the GPU, if there is one."""
    if torch.cuda.is_available() and dist.get_backend() == "nccl":
        torch.cuda.synchronize()


def _here(values: Any, dtype: torch.dtype) -> Tensor:
    """Return a tensor on the device of the group's backend."""
    return torch.tensor(values, dtype=dtype, device="cuda" if dist.get_backend() == "nccl" else "cpu")


def first_says(yes: bool) -> bool:
    """Return rank 0's value on all ranks."""
    decision = _here([yes], torch.uint8)
    dist.broadcast(decision, 0)
    return bool(decision.item())


def slowest(times: list[list[float]]) -> list[list[float]]:
    """Return the longest time of all ranks, element by element."""
    longest = _here(times, torch.float64)
    dist.all_reduce(longest, op=dist.ReduceOp.MAX)
    return longest.tolist()


def _replicas(model: DistributedDataParallel) -> dict[str, bool]:
    """Whether all ranks have the same parameters, bit for bit, and all of them are finite."""
    parameters = [parameter.detach() for parameter in model.parameters()]
    digest = hashlib.blake2b(digest_size=16)
    for parameter in parameters:
        digest.update(parameter.numpy().tobytes() if parameter.device.type == "cpu" else _sums(parameter))
    own = _here(list(digest.digest()), torch.uint8)
    digests = [torch.empty_like(own) for _ in range(dist.get_world_size())]
    dist.all_gather(digests, own)
    return {
        "replicas_equal": all(torch.equal(each, own) for each in digests),
        "finite": all(bool(parameter.isfinite().all()) for parameter in parameters),
    }


def _sums(parameter: Tensor) -> bytes:
    """Two sums over a tensor's bits, one weighted by position, computed on the GPU."""
    bits = parameter.contiguous().view(torch.int32).view(-1).long()
    places = torch.arange(1, 2 * bits.numel(), 2, device=bits.device)
    return f"{bits.sum().item()} {(bits * places).sum().item()}".encode()


def _handle(handle: Handle | None) -> dict[str, Any]:
    """Return seconds per step by stage, overlap, and bytes of buffers and residuals, from the handle."""
    if handle is None:
        return {}
    stats = handle.stats()
    steps = max(1, stats["steps"])
    return {
        "seconds": {name: each / steps for name, each in stats["seconds"].items()},
        "overlap": stats["overlap"],
        "buffers_nbytes": stats["buffers_nbytes"],
        "residuals_nbytes": stats["residuals_nbytes"],
    }


def _calls(buckets: int, device: torch.device) -> float:
    """Measure the host's seconds in NCCL's own calls for `buckets` buckets; plain DDP makes them as well."""
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
    """How many buckets DDP uses, from its own log."""
    sizes = model._get_ddp_logging_data().get("rebuilt_bucket_sizes", "")
    return len([size for size in str(sizes).split(",") if size.strip()])


if __name__ == "__main__":
    main()
