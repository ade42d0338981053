"""Selection and products rounded at random on a GPU, beside torch and beside the plain torch definitions.

    python benchmarks/sweep_select.py [--short]

Under a minute on an H200: the k largest of 16 and 256 million elements (1 %), the time of each program,
launches and time of an encode and a decode, products of matrices with every sum rounded at random. Bits are
compared.
"""

import statistics
import sys
import time
from collections import Counter
from collections.abc import Callable
from typing import Any

import torch
from torch.profiler import ProfilerActivity, profile

from thinwire import Stream, codecs, formats, simulate
from thinwire.kernels import gemm_cuda, gemm_reference, select, select_cuda
from thinwire.kernels.gemm_params import CHUNKED, KAHAN, PAIRWISE, SEQUENTIAL, GemmParams
from thinwire.kernels.params import STOCHASTIC
from thinwire.simulate import Arithmetic

BEGUN = time.perf_counter()
ORDERS = {"sequential": SEQUENTIAL, "chunked/64": CHUNKED, "pairwise": PAIRWISE, "kahan": KAHAN}


def say(text: str) -> None:
    sys.stdout.write(f"{text}\n")
    sys.stdout.flush()


def milliseconds(call: Callable[[], Any], times: int = 10) -> float:
    """The median on the device's clock."""
    for _ in range(2):
        call()
    taken = []
    for _ in range(times):
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        begin.record()
        call()
        end.record()
        end.synchronize()
        taken.append(begin.elapsed_time(end))
    return statistics.median(taken)


def kernels(call: Callable[[], Any]) -> Counter[str]:
    """Microseconds on the device by kernel, and "launches"."""
    call()
    torch.cuda.synchronize()
    with profile(activities=[ProfilerActivity.CPU, ProfilerActivity.CUDA]) as seen:
        call()
        torch.cuda.synchronize()
    found: Counter[str] = Counter()
    for event in seen.events():
        if event.device_type == torch.autograd.DeviceType.CUDA:
            found[event.name[:40]] += round(event.device_time)
            found["launches"] += 1
    return found


def same(one: Any, other: Any) -> str:
    pairs = zip(one, other, strict=True) if isinstance(one, tuple) else ((one, other),)
    equal = all(torch.equal(left.view(torch.int32), right.view(torch.int32)) for left, right in pairs)
    return "same bits" if equal else "DIFFERENT BITS"


def selection(numel: int) -> None:
    k = -(-numel // 100)
    x = torch.randn(1, numel, device="cuda")
    sizes = x.abs()
    times = 10 if numel < 1 << 26 else 4
    peers = {
        "torch.topk(|x|), not sorted": lambda: x.abs().topk(k, sorted=False),
        "torch.topk alone, not sorted": lambda: sizes.topk(k, sorted=False),
        "torch.topk alone, sorted": lambda: sizes.topk(k),
    }
    say(f"\n{numel >> 20}M elements, k = {k}")
    for name, call in peers.items():
        say(f"  {name:32} {milliseconds(call, times):9.3f} ms")
    ours = {
        "largest": (lambda: select_cuda.largest(x, k), lambda: select.largest_reference(x, k)),
        "bisected": (lambda: select_cuda.bisected(x, k, 30), lambda: select.bisected_reference(x, k, 30)),
        "reaching": (lambda: select_cuda.reaching(x, 2.5, k), lambda: select.reaching_reference(x, 2.5, k)),
    }
    for name, (call, definition) in ours.items():
        taken, before = milliseconds(call, times), milliseconds(definition, 2)
        found = same(call(), definition())
        say(f"  {name:32} {taken:9.3f} ms, the definition {before:9.3f} ms, {found}")
    for name in ("largest", "bisected"):
        spent = kernels(ours[name][0])
        say(f"  {name}: {', '.join(f'{key} {value}' for key, value in spent.items())} us")
    nearly_zero = x * (torch.rand(1, numel, device="cuda") < 0.004)
    taken = milliseconds(lambda: select_cuda.largest(nearly_zero, k), times)
    found = same(select_cuda.largest(nearly_zero, k), select.largest_reference(nearly_zero, k))
    say(f"  largest, 99.6 % zeros            {taken:9.3f} ms, {found}")


def wires(numel: int) -> None:
    x, residual = torch.randn(numel, device="cuda"), torch.zeros(numel, device="cuda")
    out = torch.empty(numel, device="cuda")
    programs = select.gpu
    for spec in ("topk/0.01", "mstopk/0.01", "threshold/2.5~cap0.1", "topk/0.01~int8/256", "dct/64:8"):
        codec = codecs.get(spec)
        made, row = {}, []
        for name, chosen in (("plain torch", lambda _device, _numel: None), ("programs", programs)):
            select.gpu = chosen  # type: ignore[assignment]
            held = residual.clone()
            wire = codec.encode(x, residual=held)
            made[name] = wire, held, codec.decode(wire, numel)
            row += [kernels(lambda: codec.encode(x, residual=held))["launches"]]  # noqa: B023
            row += [kernels(lambda: codec.decode(wire, numel, out=out))["launches"]]  # noqa: B023
            row += [milliseconds(lambda: codec.encode(x, residual=held))]  # noqa: B023
            row += [milliseconds(lambda: codec.decode(wire, numel, out=out))]  # noqa: B023
        select.gpu = programs
        found = same(tuple(made["programs"][1:]), tuple(made["plain torch"][1:]))
        found = found if torch.equal(made["programs"][0], made["plain torch"][0]) else "DIFFERENT WIRES"
        say(
            f"  {spec:22} {numel:9} launches {row[0]:4} + {row[1]:3} -> {row[4]:3} + {row[5]:2}, "
            f"ms {row[2]:.3f} + {row[3]:.3f} -> {row[6]:.3f} + {row[7]:.3f}, {found}"
        )


def products(size: int) -> None:
    a, b = torch.randn(1, size, size, device="cuda"), torch.randn(1, size, size, device="cuda")
    key = Stream(seed=1, step=2).key
    for pair in (("e4m3", "e5m10"), (None, "int8"), ("posit8_1", "nf4"), ("e3m0", "tf32")):
        params = [name and formats.get(name)._prepared(STOCHASTIC) for name in pair]
        for name, order in ORDERS.items():
            if order != SEQUENTIAL and pair[0] != "e4m3":
                continue
            p = GemmParams(*params, STOCHASTIC, order, 64 if order == CHUNKED else 0)
            found, wanted = torch.empty_like(a), torch.empty_like(a)
            taken = milliseconds(lambda: gemm_cuda.gemm(p, a, b, found, key), 5)  # noqa: B023
            text = f"  {pair[0]!s:9} {pair[1]:10} {name:11} {taken:9.2f} ms"
            if order in (SEQUENTIAL, PAIRWISE):
                begun = time.perf_counter()
                gemm_reference.gemm(p, a, b, wanted, key)
                torch.cuda.synchronize()
                before = 1000 * (time.perf_counter() - begun)
                text += f", the definition {before:9.1f} ms, {same(found, wanted)}"
            say(text)
    for order in ("sequential", "pairwise"):
        for multiply in ("exact", "mogami"):
            how = Arithmetic("e4m3", "e5m10", order, multiply)
            taken = milliseconds(lambda: simulate.matmul(a[0], b[0], how), 5)  # noqa: B023
            say(f"  to nearest: {order} {multiply:8} {taken:9.2f} ms")


def main() -> None:
    say(f"torch {torch.__version__}, {torch.cuda.get_device_name()}")
    for numel in (1 << 24,) if "--short" in sys.argv else (1 << 24, 1 << 28):
        selection(numel)
        torch.cuda.empty_cache()
    say("\nEncode + decode, plain torch -> programs")
    for numel in (3000, (1 << 24) + 3):
        wires(numel)
    say("\nProducts of 1024 x 1024 x 1024 rounded at random")
    products(1024)
    say(f"\n{time.perf_counter() - BEGUN:.0f} s in all")


if __name__ == "__main__":
    main()
