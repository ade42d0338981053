"""One rank of `thinwire bench collectives`. The lab starts it; all ranks measure, and rank 0 prints JSON.

Methods take turns, because machines drift: every round times each method once, after a barrier. The slowest
rank's time counts. The error compares the mean with the exact mean, as a relative L2 norm.
"""

import json
import resource
import statistics
import sys
import time
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks, powerSGD_hook
from torch.nn.parallel import DistributedDataParallel

from thinwire import Channel, codecs, collectives
from thinwire.bench import timing
from thinwire.runtimes.process_group import runtime_of
from thinwire.runtimes.trace import trace

Method = Callable[[Tensor], None]
FP32, FP16 = "torch fp32", "torch fp16"
DEVIATION = 5e-4
LARGEST_CHECKED = 1 << 25  # elements
HOOKS = "DDP"


def main() -> None:
    """Read the task from the command line, measure, print."""
    task = json.loads(sys.argv[1])
    torch.set_num_threads(1)
    device = torch.device(task["device"])
    if device.type == "cuda":
        torch.cuda.set_device(0)
    dist.init_process_group("nccl" if device.type == "cuda" else "gloo")
    rows = [row for numel in task["numels"] for row in measure(numel, task["specs"], task["seconds"], device)]
    rows += [row for numel in task["stages"] for row in measure_stages(numel, task["specs"], device)]
    rows += [row for numel in task["hooks"] for row in measure_hooks(numel, task["seconds"])]
    if dist.get_rank() == 0:
        sys.stdout.write("RESULT " + json.dumps(rows) + "\n")
        sys.stdout.flush()
    dist.barrier()
    dist.destroy_process_group()


def measure(numel: int, specs: list[str], seconds: float, device: torch.device) -> list[dict[str, Any]]:
    """Time all methods on one tensor size."""
    generator = torch.Generator().manual_seed(dist.get_rank())
    source = (torch.randn(numel, generator=generator) * DEVIATION).to(device)
    exact = _exact(source)
    methods: dict[str, Method] = {FP32: _torch_fp32, FP16: _torch_fp16}
    for spec in specs:
        methods[spec] = _thinwire(spec)
    x = torch.empty_like(source)
    errors = {name: _error(method, x, source, exact) for name, method in methods.items()}
    before = runtime_of(None, device).nbytes
    times = _take_turns(methods, x, source, seconds)
    after = runtime_of(None, device).nbytes
    more = {"device": device.type, "buffers_nbytes": after, "buffers_grown_nbytes": after - before}
    return [{**_row(name, numel, times, errors[name]), **more} for name in methods]


def _exact(source: Tensor) -> Tensor:
    """Return the mean over ranks in float64, or an empty tensor if that would take too much memory."""
    if source.numel() > LARGEST_CHECKED:
        return torch.empty(0, dtype=torch.float64, device=source.device)
    exact = source.double()
    dist.all_reduce(exact)
    return exact / dist.get_world_size()


def _torch_fp32(x: Tensor) -> None:
    dist.all_reduce(x)
    x /= dist.get_world_size()


def _torch_fp16(x: Tensor) -> None:
    half = (x / dist.get_world_size()).half()
    dist.all_reduce(half)
    x.copy_(half)


def _thinwire(spec: str) -> Method:
    spec, _, schedule = spec.partition("@")
    channel = Channel(spec)

    def method(x: Tensor) -> None:
        collectives.all_reduce(x, channel, "avg", schedule=schedule or "auto")

    return method


def _error(method: Method, x: Tensor, source: Tensor, exact: Tensor) -> float | None:
    x.copy_(source)
    method(x)
    if not exact.numel():
        return None
    norm = exact.norm().item()
    return (x.double() - exact).norm().item() / norm if norm else 0.0


def _take_turns(
    methods: dict[str, Method], x: Tensor, source: Tensor, seconds: float
) -> dict[str, list[float]]:
    """Return the slowest rank's times of every method, measured for `seconds` and three rounds or more."""
    times: dict[str, list[float]] = {name: [] for name in methods}
    begin = time.perf_counter()
    for turn in range(1000):
        for name, method in methods.items():
            x.copy_(source)
            dist.barrier()
            if x.is_cuda:
                torch.cuda.synchronize()
            start = time.perf_counter()
            method(x)
            if x.is_cuda:
                torch.cuda.synchronize()
            times[name].append(time.perf_counter() - start)
        done = turn >= 2 and time.perf_counter() - begin > seconds
        enough = torch.tensor([done], dtype=torch.uint8, device=x.device)
        dist.broadcast(enough, 0)
        if enough.item():
            break
    slowest = torch.tensor([times[name] for name in methods], dtype=torch.float64, device=x.device)
    dist.all_reduce(slowest, op=dist.ReduceOp.MAX)
    return dict(zip(methods, slowest.tolist(), strict=True))


def _row(name: str, numel: int, times: dict[str, list[float]], error: float | None) -> dict[str, Any]:
    world = dist.get_world_size()
    spec, _, schedule = name.partition("@")
    traced = trace(numel, spec, world, schedule or "auto") if name not in (FP32, FP16) else None
    median_s = statistics.median(times[name])
    ratios = [fp32 / own for fp32, own in zip(times[FP32], times[name], strict=True)]
    return {
        "method": name,
        "schedule": traced.schedule if traced else "torch",
        "world": world,
        "numel": numel,
        "rounds": len(times[name]),
        "seconds": median_s,
        "best_s": min(times[name]),
        "algbw_bytes_per_s": 4 * numel / median_s,
        "busbw_bytes_per_s": 4 * numel / median_s * 2 * (world - 1) / world,
        "ratio_to_fp32": statistics.median(ratios),
        "error": error,
        "sent_nbytes": traced.sent_nbytes if traced else None,
        "peak_rss_nbytes": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024,
    }


# Stages on a GPU


def measure_stages(numel: int, specs: list[str], device: torch.device) -> list[dict[str, Any]]:
    """Time each stage of a piece on one rank: encode, copy to the host, copy back, decode."""
    x = torch.randn(numel, device=device) * DEVIATION
    rows = []
    for codec in dict.fromkeys(codecs.get(spec.partition("@")[0]) for spec in specs):
        if codec.agreement(numel) or codec.needs_rng:
            continue
        wire = codec.encode(x)
        host = torch.empty(wire.shape, dtype=torch.uint8, pin_memory=device.type == "cuda")
        stages: dict[str, timing.Call] = {
            "encode": partial(codec.encode, x, out=wire),
            "to the host": partial(host.copy_, wire, non_blocking=True),
            "from the host": partial(wire.copy_, host, non_blocking=True),
            "decode": partial(codec.decode, wire, numel, out=x),
            "decode and add": partial(codec.decode_add, wire, x),
        }
        seconds = {name: timing.seconds(call, device) for name, call in stages.items()}
        rows.append(
            {"method": codec.spec, "schedule": "stages", "numel": numel, "world": 1, "stages_s": seconds}
        )
    return rows


# Through DDP


def _hook(spec: str) -> Any:
    channel = Channel(spec)

    def hook(  # DDP reads these annotations
        state: object,
        bucket: dist.GradBucket,  # type: ignore[name-defined]
    ) -> torch.futures.Future[torch.Tensor]:
        del state
        gradient = bucket.buffer()
        work = collectives.all_reduce(gradient, channel, "avg", name=str(bucket.index()), async_op=True)
        assert work is not None
        return work.get_future().then(lambda _: gradient)

    return hook


def measure_hooks(numel: int, seconds: float) -> list[dict[str, Any]]:
    """Time backward passes of a layer with `numel` parameters, by communication hook.

    One layer makes one bucket. With several, torch's PowerSGD deadlocks on gloo, because it starts its second
    all-reduce when the first is done.
    """
    side = max(2, int(numel**0.5))
    hooks: dict[str, Callable[[DistributedDataParallel], None]] = {
        f"{HOOKS} fp32": lambda _: None,
        f"{HOOKS} fp16_compress_hook": lambda model: model.register_comm_hook(
            None, default_hooks.fp16_compress_hook
        ),
        f"{HOOKS} powerSGD_hook rank 4": _power_sgd,
        f"{HOOKS} thinwire int8/256": lambda model: model.register_comm_hook(None, _hook("int8/256")),
        f"{HOOKS} thinwire int4/128": lambda model: model.register_comm_hook(None, _hook("int4/128")),
    }
    steps: dict[str, Method] = {}
    for name, register in hooks.items():
        torch.manual_seed(0)
        model = DistributedDataParallel(torch.nn.Linear(side, side, bias=False))
        register(model)
        steps[name] = _backward(model, side)
    times = _take_turns(steps, torch.empty(0), torch.empty(0), seconds)
    fp32 = times[f"{HOOKS} fp32"]
    return [
        {
            "method": name,
            "schedule": "hook",
            "world": dist.get_world_size(),
            "numel": side * side,
            "rounds": len(hook_times),
            "seconds": statistics.median(hook_times),
            "best_s": min(hook_times),
            "ratio_to_fp32": statistics.median(a / b for a, b in zip(fp32, hook_times, strict=True)),
        }
        for name, hook_times in times.items()
    ]


def _power_sgd(model: DistributedDataParallel) -> None:
    state = powerSGD_hook.PowerSGDState(None, matrix_approximation_rank=4, start_powerSGD_iter=2)
    model.register_comm_hook(state, powerSGD_hook.powerSGD_hook)


def _backward(model: DistributedDataParallel, side: int) -> Method:
    x = torch.randn(1, side)

    def step(_: Tensor) -> None:
        model.zero_grad()
        model(x).sum().backward()

    for _ in range(4):
        step(x)
    return step


if __name__ == "__main__":
    main()
