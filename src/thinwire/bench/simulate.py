"""Speed of `simulate`, as ratios measured in one run.

| part | what | beside |
|---|---|---|
| products | matrix products, every step rounded | the same one step at a time, and all in torch |
| quantizer | `Quantizer`, forward and backward, with and without counters | a copy of the same tensor |
| nodes | a step of N nodes with encoded gradients | the same loop in float32, without thinwire |
| recorded | a step of a small network, replayed from a CUDA graph | the same step as usual |
| qtorch | operations that QPyTorch has too | QPyTorch, on a CPU |

"One step at a time" is `kernels.gemm_reference`, which rounds with the formats' own kernels; "all in torch"
rounds by the formats' definition in eager torch (`kernels.reference`). Every step takes the same time, so
some products are timed on fewer steps. Times are medians; compared calls take turns. A CPU runs one thread.
"""

import statistics
import textwrap
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from thinwire import kernels, machine
from thinwire.bench import cuda_graphs, qtorch_peer, timing
from thinwire.bench.formats import Progress
from thinwire.bench.simulate_tables import tables, targets
from thinwire.errors import InputError
from thinwire.formats.base import MODES
from thinwire.kernels import gemm_exact, gemm_reference, reference
from thinwire.kernels.gemm_params import CHUNKED, KAHAN, PAIRWISE, GemmParams
from thinwire.kernels.params import Params
from thinwire.rounding import Rounding, Stream
from thinwire.simulate import gemm
from thinwire.simulate.counters import Counters
from thinwire.simulate.gemm import Arithmetic
from thinwire.simulate.nodes import Nodes
from thinwire.simulate.quantizer import Quantizer
from thinwire.zoo import small

__all__ = ["run", "tables", "targets"]

STREAM = Stream(seed=1)
#: Name of a row, and how its products are computed.
PRODUCTS = {
    "e5m2, e5m10 sequential": Arithmetic("e5m2", "e5m10"),
    "e5m2, e5m10 chunked/64": Arithmetic("e5m2", "e5m10", order="chunked/64"),
    "e5m2, e5m10 pairwise": Arithmetic("e5m2", "e5m10", order="pairwise"),
    "e5m2, e5m10 kahan": Arithmetic("e5m2", "e5m10", order="kahan"),
    "e5m2, e5m10 stochastic": Arithmetic("e5m2", "e5m10", rounding="stochastic"),
    "posit8_1 sequential": Arithmetic("posit8_1", "posit8_1"),
    "mogami, e5m10 sequential": Arithmetic(sum="e5m10", multiply="mogami"),
    "exact, to e5m10": Arithmetic(sum="e5m10", order="exact"),
}
QUANTIZERS = ("e5m2", "e5m2~sr", "posit8_1")
WIRE = "aps/e4m3"
#: Besides accumulation in groups.
SCHEDULES = ("accumulate/sequential", "accumulate/tree", "accumulate/sequential+kahan")
CLASSES = 10
SHORTEST_S = {"cpu": 2e-3, "cuda": 2e-2}  #: calls are timed together until they take this long
MOST_ROUNDS = 15


@dataclass(frozen=True)
class Sizes:
    """Sizes of what is measured."""

    side: int  #: of square matrices
    reference_steps: int  #: of products computed one step at a time
    torch_steps: int  #: of products computed all in torch
    numel: int  #: of the tensor that is rounded
    peer_numel: int  #: of the tensor that QPyTorch rounds too
    network: str
    pixels: int
    nodes: int
    samples: int  #: per node
    group: int  #: nodes whose gradients are summed first
    small_nodes: int  #: nodes of the small network, computed together
    together: tuple[int, ...]
    budget_s: float  #: for timing one row
    least: int = 3  #: fewest rounds


SIZES = {
    ("cpu", False): Sizes(512, 512, 8, 16 << 20, 4 << 20, "resnet18", 32, 8, 4, 4, 64, (8, 64), 0.8),
    ("cpu", True): Sizes(256, 256, 8, 4 << 20, 1 << 20, "resnet8", 32, 8, 4, 4, 16, (16,), 0.1, 2),
    ("cuda", False): Sizes(
        4096, 64, 16, 256 << 20, 0, "resnet18", 32, 256, 16, 16, 256, (16, 64, 256), 0.5, 2
    ),
    ("cuda", True): Sizes(1024, 64, 16, 16 << 20, 0, "resnet18", 32, 32, 4, 16, 64, (64,), 0.2),
}


def run(
    device: str = "cpu", quick: bool = False, progress: Progress = lambda _: None, sizes: Sizes | None = None
) -> dict[str, Any]:
    """Measure everything; return a record for `machine.save` and `tables`."""
    machine.default_numel(device)  # raises if there is no such device
    chosen = sizes or SIZES["cuda" if device.startswith("cuda") else "cpu", quick]
    where = torch.device(device)
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        products = measure_products(where, chosen, progress)
        quantizers = measure_quantizers(where, chosen, progress)
        nodes = measure_nodes(where, chosen, progress)
        together = measure_together(where, chosen, progress)
        taking_turns = partial(in_turns, device=where, sizes=chosen)
        recorded = cuda_graphs.measure(where, taking_turns, progress)
        progress("qtorch")
        peers, absent = measure_peers(where, chosen)
    finally:
        torch.set_num_threads(threads)
    result = {
        "device": device,
        "quick": quick,
        "numel": chosen.numel,
        "sizes": asdict(chosen),
        **products,
        "quantizers": quantizers,
        "nodes": nodes,
        "together": together,
        "recorded": recorded,
        "peers": peers,
        "absent": absent,
    }
    return machine.record({**result, "targets": targets(result)})


def in_turns(calls: Mapping[str, timing.Call], device: torch.device, sizes: Sizes) -> dict[str, float]:
    """Return median times of calls that take turns, after a warm-up. Short calls are timed several at a time.

    A GPU is idle until the first call is launched; it gets enough calls that this no longer counts.
    """
    shortest = SHORTEST_S[device.type]
    times: dict[str, list[float]] = {}
    for name, call in calls.items():
        call()
        times[name] = [timing._timed(call, device, 1)]
    repeats = {name: max(1, min(100, int(shortest / max(once, 1e-6)))) for name, (once,) in times.items()}
    whole = sum(repeats[name] * once for name, (once,) in times.items())
    rounds = min(MOST_ROUNDS, max(sizes.least, int(sizes.budget_s / whole)))
    for number in range(rounds):
        for name, call in calls.items():
            if number or repeats[name] > 1:  # else the time measured above is this round's
                elapsed_s = timing._timed(call, device, repeats[name])
                times[name] = [*times[name], elapsed_s] if number else [elapsed_s]
    return {name: statistics.median(each) for name, each in times.items()}


# Matrix products


def measure_products(device: torch.device, sizes: Sizes, progress: Progress) -> dict[str, Any]:
    """Return a row for each of `PRODUCTS`, and the speed of torch's float32 product."""
    side = sizes.side
    generator = torch.Generator().manual_seed(0)
    a, b = (torch.randn(side, side, generator=generator).to(device) for _ in range(2))
    plain_s = in_turns({"torch": partial(torch.matmul, a, b)}, device, sizes)["torch"]
    rows = []
    for number, (name, how) in enumerate(PRODUCTS.items(), 1):
        progress(f"{name} ({number} of {len(PRODUCTS)})")
        rows.append({"product": name, **measure_product(how, a, b, sizes)})
        rows[-1]["slower_than_torch"] = rows[-1]["seconds"] / plain_s
    return {"torch_macs_per_s": side**3 / plain_s, "products": rows}


def measure_product(how: Arithmetic, a: Tensor, b: Tensor, sizes: Sizes) -> dict[str, Any]:
    """Return multiply-adds per second of `matmul`, of one step at a time, and of all in torch."""
    rng = STREAM if how.rounding == Rounding.STOCHASTIC else None
    steps = {"ours": a.shape[1], "reference": sizes.reference_steps, "torch": sizes.torch_steps}
    out = torch.empty(a.shape[0], b.shape[1], device=a.device)
    calls: dict[str, timing.Call] = {"ours": partial(gemm.matmul, a, b, how, rng=rng, out=out)}
    for name, in_torch in (("reference", False), ("torch", True)):
        some = a[:, : steps[name]].contiguous(), b[: steps[name]].contiguous()
        calls[name] = partial(step_by_step, how, *some, rng, in_torch=in_torch)
    seconds = in_turns(calls, a.device, sizes)
    macs = {name: a.shape[0] * b.shape[1] * steps[name] / seconds[name] for name in calls}
    return {
        "side": a.shape[0],
        "rounded": "once" if how.order == "exact" else "every step",
        "kernel": how.order == "exact" or params(how).quick is not None,
        "seconds": seconds["ours"],
        "macs_per_s": macs["ours"],
        "reference_steps": steps["reference"],
        "reference_macs_per_s": macs["reference"],
        "times_reference": macs["ours"] / macs["reference"],
        "torch_steps": steps["torch"],
        "torch_macs_per_s": macs["torch"],
        "times_torch": macs["ours"] / macs["torch"],
    }


def params(how: Arithmetic) -> GemmParams:
    """Return the kernels' parameters of a product that is not exact."""
    order, chunk = gemm._order(how.order)
    kept = how._params(how.product), how._params(how.sum)
    return GemmParams(*kept, MODES[Rounding(how.rounding)], order, chunk, gemm._offset(how.multiply))


def step_by_step(
    how: Arithmetic, a: Tensor, b: Tensor, rng: Stream | None = None, *, in_torch: bool = False
) -> Tensor:
    """Compute the same product, one step of all sums at a time.

    The formats' kernels round the numbers; with `in_torch`, their definition in eager torch does.
    """
    left, right, out = a[None], b[None], torch.empty(1, a.shape[0], b.shape[1], device=a.device)
    key = None if rng is None else rng.key
    if how.order == "exact":
        total, mode = how._params(how.sum), MODES[Rounding(how.rounding)]
        gemm_exact.gemm(left, right, out, odd=total is not None)
        if total is not None and in_torch:
            return reference.round(total, out.view(-1), mode).view_as(out)[0]
        if total is not None:
            kernels.round(total, out.view(-1).clone(), out.view(-1), mode)
    elif in_torch:
        _in_torch(params(how), left, right, out, key)
    else:
        gemm_reference.gemm(params(how), left, right, out, key)
    return out[0]


def _in_torch(p: GemmParams, a: Tensor, b: Tensor, out: Tensor, key: kernels.Key | None) -> None:
    def rounding(params: Params | None) -> gemm_reference.Round:
        def rounded(x: Tensor, k: int, stage: int) -> Tensor:
            if params is None:
                return x
            words = None
            if key is not None:
                own = gemm_reference.derived(key, gemm_reference.STAGES * k + stage)
                words = kernels.stream_words(own, x.numel(), x.device)
            return reference.round(params, gemm_reference.one_nan(x).view(-1), p.mode, words).view_as(x)

        return rounded

    first, total, zero = rounding(p.product), rounding(p.sum), torch.zeros_like(out)

    def product(k: int) -> Tensor:
        return first(gemm_reference._multiply(a[..., k, None], b[..., k, None, :], p.offset), k, 0)

    steps = a.shape[-1]
    if p.order == PAIRWISE:
        out.copy_(gemm_reference._pairwise(product, total, steps))
    elif p.order == KAHAN:
        out.copy_(gemm_reference._kahan(product, total, steps, zero))
    else:
        chunk = p.chunk if p.order == CHUNKED else 0
        out.copy_(gemm_reference._chunks(product, total, steps, zero, chunk))


# Quantizers


def measure_quantizers(device: torch.device, sizes: Sizes, progress: Progress) -> list[dict[str, Any]]:
    """Measure bytes read and written per second, as a share of a copy into preallocated memory.

    A `Quantizer` allocates its result, as a clone does. The clone's row is the first.
    """
    x = torch.randn(sizes.numel, generator=torch.Generator().manual_seed(0)).to(device)
    target = torch.empty_like(x)
    leaf, gradient = x.detach().requires_grad_(), torch.randn_like(x)
    calls: list[tuple[str, str, bool, int, Callable[[], Any]]] = [("float32", "clone", False, 8, x.clone)]
    for spec in QUANTIZERS:
        for counted in (False, True):
            quantizer = Quantizer(spec, spec, counters=Counters() if counted else None)
            both = partial(qtorch_peer._both, quantizer, leaf, gradient)
            calls.append((spec, "forward", counted, 8, partial(quantizer, x)))
            calls.append((spec, "forward and backward", counted, 16, both))
    rows = []
    for spec, kind, counted, nbytes, call in calls:
        progress(f"quantizer {spec} {kind}{', counted' * counted}")
        times = in_turns({"call": call, "copy": partial(target.copy_, x)}, device, sizes)
        share = nbytes / 8 * times["copy"] / times["call"]
        row = {"format": spec, "way": kind, "counted": counted, "numel": x.numel(), "seconds": times["call"]}
        rows.append({**row, "copy_s": times["copy"], "bandwidth_ratio": share})
    return rows


# Many nodes


def measure_nodes(device: torch.device, sizes: Sizes, progress: Progress) -> list[dict[str, Any]]:
    """Time `Nodes.backward` against the loop that a user would write to sum gradients."""
    model, batch = _job(sizes.network, 3, sizes.pixels, sizes.nodes * sizes.samples, device)
    size = {"network": sizes.network, "pixels": sizes.pixels, "nodes": sizes.nodes, "samples": sizes.samples}
    numbers = sum(parameter.numel() for parameter in model.parameters())
    rows = []
    for schedule in (f"accumulate/{sizes.group}", *SCHEDULES):
        progress(f"{sizes.network}, {sizes.nodes} nodes, {schedule}")
        nodes = Nodes(model, sizes.nodes, WIRE, schedule)
        calls: dict[str, timing.Call] = {
            "plain": partial(plain_step, model, sizes.nodes, *batch),
            "nodes": partial(nodes.backward, _loss, *batch),
        }
        seconds = in_turns(calls, device, sizes)
        row = {"wire": WIRE, "schedule": schedule, "seconds": seconds["nodes"], "plain_s": seconds["plain"]}
        rows.append({**size, "parameters": numbers, **row, "ratio": seconds["nodes"] / seconds["plain"]})
        del nodes, calls
    return rows


def measure_together(device: torch.device, sizes: Sizes, progress: Progress) -> list[dict[str, Any]]:
    """Time a small network's nodes one by one and several at a time."""
    count = sizes.small_nodes
    model, batch = _job("cnn-small", 1, 28, count * sizes.samples, device)
    progress(f"cnn-small, {count} nodes together")
    nodes = Nodes(model, count, WIRE, f"accumulate/{sizes.group}")
    calls: dict[str, timing.Call] = {"plain": partial(plain_step, model, count, *batch)}
    for together in (1, *sizes.together):
        calls[str(together)] = partial(nodes.backward, _loss, *batch, together=together)
    times = in_turns(calls, device, sizes)
    plain_s = times.pop("plain")
    return [
        {"network": "cnn-small", "nodes": count, "samples": sizes.samples, "together": int(together),
         "seconds": seconds, "plain_s": plain_s, "ratio": seconds / plain_s,
         "times_loop": times["1"] / seconds}
        for together, seconds in times.items()
    ]  # fmt: skip


def plain_step(model: nn.Module, nodes: int, x: Tensor, y: Tensor) -> None:
    """Compute the mean gradient of all nodes in float32, with autograd alone."""
    model.zero_grad()
    for part, labels in zip(x.unflatten(0, (nodes, -1)), y.unflatten(0, (nodes, -1)), strict=True):
        (_loss(model, part, labels) / nodes).backward()


def _loss(model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
    return nn.functional.cross_entropy(model(x), y)


def _job(
    network: str, channels: int, pixels: int, samples: int, device: torch.device
) -> tuple[nn.Module, tuple[Tensor, Tensor]]:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        model = small.get(network, (channels, pixels, pixels), CLASSES).to(device)
        x, y = torch.randn(samples, channels, pixels, pixels), torch.randint(CLASSES, (samples,))
    return model, (x.to(device), y.to(device))


# QPyTorch


def measure_peers(device: torch.device, sizes: Sizes) -> tuple[list[dict[str, Any]], dict[str, str]]:
    """Return rows, or the reason why there are none."""
    try:
        if device.type != "cpu":
            raise InputError("measured on the CPU only")
        quant = qtorch_peer.load()
    except (*qtorch_peer.FAILURES, InputError) as error:
        reason = textwrap.shorten(str(error) or type(error).__name__, 160, placeholder=" ...")
        return [], {"qtorch": reason}
    x = torch.randn(sizes.peer_numel, generator=torch.Generator().manual_seed(0))
    rows = []
    for what, ours, their_call, our_call in qtorch_peer.cases(quant, x):
        seconds = in_turns({"qtorch": their_call, "thinwire": our_call}, device, sizes)
        row = {"what": what, "thinwire": ours, "numel": x.numel(), "seconds": seconds["thinwire"]}
        times = seconds["qtorch"] / seconds["thinwire"]
        rows.append({**row, "qtorch_s": seconds["qtorch"], "times_faster": times})
    return rows, {}
