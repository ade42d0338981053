"""Speed of codecs, as ratios measured in one run.

CPU: one thread; elements per second divided by those of a float32 copy of the same input. GPU: bytes per
second divided by the bandwidth of that copy. Bytes are those that one pass must read and write:

| operation | bytes per element |
|---|---|
| encode | 4 + wire |
| encode with feedback | 4 + 4 + 4 + wire: the input, the residual before and after |
| decode | wire + 4 |
| decode_add | wire + 4 + 4 |
| reduce_encode of 8 | 8 wires in + 1 wire out |

Every time is the median of several runs, which write into preallocated memory; copy and operation take turns.
A slow operation is measured on fewer elements, and its row says how many.
The input is normal with a standard deviation of 0.0005, like a gradient: threshold/0.001 sends 4.6 % of it.
"""

import os
import statistics
import textwrap
import warnings
from collections.abc import Collection, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.autograd import profiler

from thinwire import machine
from thinwire.bench import codec_peers, timing
from thinwire.bench.codec_peers import Prepare
from thinwire.bench.formats import Progress, Table
from thinwire.codecs import CODECS, Codec, get
from thinwire.rounding import Stream

ENCODE, FEEDBACK, DECODE, ADD, REDUCE = OPERATIONS = (
    "encode", "encode with feedback", "decode", "decode_add", "reduce_encode of 8",
)  # fmt: skip
STREAM = Stream(seed=1)
WORLD = 8
DEVIATION = 5e-4
FED_BACK = ("int8/256", "int4/128")  # also measured with feedback, besides codecs whose spec has it
THREADED = ("int8/256", "e4m3fn/128", "int4/128", "qsgd4/512", "onebit/64+ef")
SELECTED = ("topk/0.01+ef", "mstopk/0.01+ef")
SIZED = "int8/256"
TURNS = 3  # alternations of one thread and all threads
BUDGET_S = 0.15  # for one operation
LONGEST_S = {"cpu": 0.12, "cuda": 0.03}  # of one call; an operation makes 8 calls or more, on a GPU 53
SHRINK, SMALLEST = 4, 1 << 16
ALLOCATING_NUMEL, ALLOCATING_CALLS = 1 << 20, 10
FAILURES = (
    ImportError, AttributeError, AssertionError, OSError, RuntimeError, TypeError, ValueError,
)  # fmt: skip


def run(
    device: str = "cpu",
    numel: int | None = None,
    names: Sequence[str] | None = None,
    progress: Progress = lambda _: None,
) -> dict[str, Any]:
    """Measure the registry or the codecs in `names`; return a record for `machine.save` and `tables`."""
    usual = machine.default_numel(device)
    numel = numel or usual
    chosen = [get(name) for name in names or (*CODECS, *codec_peers.NEAREST)]
    specs = [codec.spec for codec in chosen]
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        x = torch.randn(numel, generator=torch.Generator().manual_seed(0)).mul_(DEVIATION).to(device)
        copy_s = timing.seconds(partial(torch.empty_like(x).copy_, x), x.device)
        rows: list[dict[str, Any]] = []
        for number, codec in enumerate(chosen, 1):
            progress(f"{codec.spec} ({number} of {len(chosen)})")
            rows += measure(codec, x)
        progress("allocations")
        allocations = [row for codec in chosen for row in measure_allocations(codec, x)]
        progress("sizes, selection, threads")
        sizes = measure_sizes(device, numel) if SIZED in specs else []
        selection = measure_selection(x, [spec for spec in SELECTED if spec in specs])
        scaling = measure_threads(x, [spec for spec in THREADED if spec in specs], threads)
        progress("other libraries")
        rivals, absent = measure_peers(x, specs)
    finally:
        torch.set_num_threads(threads)
    copy = {"copy_s": copy_s, "copy_elements_per_s": numel / copy_s, "copy_bytes_per_s": 8 * numel / copy_s}
    return machine.record(
        {
            "device": device,
            "numel": numel,
            **copy,
            "rows": rows,
            "peers": rivals,
            "absent": absent,
            "scaling": scaling,
            "allocations": allocations,
            "sizes": sizes,
            "selection": selection,
        }
    )


# Operations


def operations(codec: Codec) -> list[str]:
    """Operations that are measured for a codec."""
    fed_back = codec.feedback or codec.spec in FED_BACK
    return [each for each in OPERATIONS if each != FEEDBACK or fed_back]


def prepare(codec: Codec, operation: str, x: Tensor) -> timing.Call:
    """Return a call of an operation on x that writes into preallocated memory."""
    numel, rng = x.numel(), STREAM if codec.needs_rng else None
    wire, values = codec.encode(x, rng), torch.zeros_like(x)
    if operation == REDUCE:
        return partial(codec.reduce_encode, wire.repeat(WORLD, 1), numel, rng, out=wire)
    return {
        ENCODE: partial(codec.encode, x, rng, out=wire),
        FEEDBACK: partial(codec.encode, x, rng, residual=values, out=wire),
        DECODE: partial(codec.decode, wire, numel, out=values),
        ADD: partial(codec.decode_add, wire, values, 0.5),
    }[operation]


def moved(codec: Codec, operation: str, numel: int) -> float:
    """Bytes per element that one pass reads and writes."""
    wire_nbytes = codec.nbytes(numel) / numel
    return {
        ENCODE: 4 + wire_nbytes,
        FEEDBACK: 12 + wire_nbytes,
        DECODE: wire_nbytes + 4,
        ADD: wire_nbytes + 8,
        REDUCE: (WORLD + 1) * wire_nbytes,
    }[operation]


def measure(codec: Codec, x: Tensor) -> list[dict[str, Any]]:
    """Time each operation of a codec on one input; leave out those that run out of memory."""
    bits = codec.bits_per_element(x.numel())
    rows = []
    for operation in operations(codec):
        try:
            measured = against_copy(partial(prepare, codec, operation), x, moved(codec, operation, x.numel()))
        except torch.OutOfMemoryError:
            continue
        rows.append({"codec": codec.spec, "bits": bits, "operation": operation, **measured})
    return rows


def against_copy(prepare: Prepare, x: Tensor, nbytes: float) -> dict[str, float]:
    """Like `timing.against_copy`, but a slow call gets fewer elements of x. The copy is of all x."""
    part = _bearable(prepare, x)
    call, copy = prepare(part), partial(torch.empty_like(x).copy_, x)
    repeats, rounds = timing._repeats(call, x.device, BUDGET_S)
    copies = 10 if x.device.type == "cuda" else 1
    times = [
        (timing._timed(call, x.device, repeats), timing._timed(copy, x.device, copies)) for _ in range(rounds)
    ]
    elapsed_s, copy_s = (statistics.median(each) for each in zip(*times, strict=True))
    ratio = copy_s / x.numel() / (elapsed_s / part.numel())
    return {
        "numel": part.numel(),
        "seconds": elapsed_s,
        "elements_per_s": part.numel() / elapsed_s,
        "copy_s": copy_s,
        "speed_ratio": ratio,
        "bandwidth_ratio": ratio * nbytes / 8,
    }


def _bearable(prepare: Prepare, x: Tensor) -> Tensor:
    """Return x, or its first 1/4, 1/16, ... if a call on more elements would take too long."""
    sizes = [x.numel()]
    while sizes[0] >= SHRINK * SMALLEST:
        sizes.insert(0, sizes[0] // SHRINK)
    for size in sizes[:-1]:
        call = prepare(x[:size])
        call()
        elapsed_s = min(timing._timed(call, x.device, 1) for _ in range(2))
        if SHRINK * elapsed_s > LONGEST_S[x.device.type]:
            return x[:size]
    return x


def measure_peers(x: Tensor, specs: Collection[str]) -> tuple[list[dict[str, Any]], dict[str, str]]:
    """Return rows like those of codecs, and for each library why its rows are missing or incomplete."""
    rows: list[dict[str, Any]] = []
    absent: dict[str, str] = {}
    for library, cases in codec_peers.PEERS.items():
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                for spec, operation, case in cases(x):
                    if spec in specs:
                        measured = against_copy(case, x, moved(get(spec), operation, x.numel()))
                        rows.append({"library": library, "codec": spec, "operation": operation, **measured})
        except FAILURES as error:  # a peer may fail; the reason is listed
            absent[library] = textwrap.shorten(str(error) or type(error).__name__, 160, placeholder=" ...")
    return sorted(rows, key=lambda row: (row["codec"], OPERATIONS.index(row["operation"]))), absent


# Threads, allocations, sizes, selection


def measure_threads(x: Tensor, specs: Sequence[str], threads: int) -> list[dict[str, Any]]:
    """Time one thread and all of torch's threads in turns, on a CPU. A copy shows the memory's limit."""
    if x.device.type != "cpu" or threads < 2 or not specs:
        return []
    calls: dict[tuple[str, str], timing.Call] = {
        ("float32 copy", "copy"): partial(torch.empty_like(x).copy_, x)
    }
    for spec in specs:
        calls |= {(spec, operation): prepare(get(spec), operation, x) for operation in (ENCODE, DECODE)}
    rows = []
    for (name, operation), call in calls.items():
        times: dict[int, list[float]] = {1: [], threads: []}
        for count in list(times) * TURNS:
            torch.set_num_threads(count)
            times[count].append(timing.seconds(call, x.device, 0.1))
        torch.set_num_threads(1)
        one_s, all_s = (statistics.median(each) for each in times.values())
        row = {"codec": name, "operation": operation, "threads": threads}
        rows.append({**row, "one_s": one_s, "all_s": all_s, "ratio": one_s / all_s})
    return rows


def measure_allocations(codec: Codec, x: Tensor) -> list[dict[str, Any]]:
    """Count tensors that a call allocates although the memory for its result is given."""
    part = x[:ALLOCATING_NUMEL]
    rows = []
    for operation in operations(codec):
        call = prepare(codec, operation, part)
        call()
        count, nbytes = _allocated(call, x.device)
        row = {"codec": codec.spec, "operation": operation, "numel": part.numel()}
        rows.append({**row, "tensors": count, "nbytes_per_element": nbytes / part.numel()})
    return rows


def _allocated(call: timing.Call, device: torch.device) -> tuple[float, float]:
    """How many tensors a call allocates, and how many bytes."""
    if device.type == "cuda":
        names = ("allocation.all.allocated", "allocated_bytes.all.allocated")
        before = [torch.cuda.memory_stats(device)[name] for name in names]
        for _ in range(ALLOCATING_CALLS):
            call()
        after = [torch.cuda.memory_stats(device)[name] for name in names]
        count, nbytes = ((b - a) / ALLOCATING_CALLS for a, b in zip(before, after, strict=True))
        return count, nbytes
    os.environ.setdefault("KINETO_LOG_LEVEL", "9")  # else the profiler reports every start on stderr
    with profiler.profile(profile_memory=True) as profile:
        call()
    results: Any = profile.kineto_results
    sizes = [
        event.nbytes() for event in results.events() if event.name() == "[memory]" and event.nbytes() > 0
    ]
    return float(len(sizes)), float(sum(sizes))


def measure_sizes(device: str, largest: int) -> list[dict[str, Any]]:
    """Time 1024 elements, then 16 times as many, and so on: the cost of a call and its growth."""
    rows = []
    sizes = [1024 * 16**power for power in range(6)]
    for numel in [*(size for size in sizes if size < largest), largest]:
        x = torch.randn(numel, device=device)
        for operation in (ENCODE, DECODE):
            elapsed_s = timing.seconds(prepare(get(SIZED), operation, x), x.device)
            rows.append({"codec": SIZED, "operation": operation, "numel": numel, "seconds": elapsed_s})
    return rows


def measure_selection(x: Tensor, specs: Sequence[str]) -> list[dict[str, Any]]:
    """Time encoding 1 % of the elements, with packing, beside `torch.topk`, which only finds them."""
    if not specs:
        return []
    ((_, _, topk),) = codec_peers.torch_topk(x)
    topk_s = timing.seconds(topk(x), x.device)
    rows = [{"what": "torch.topk(x.abs(), k)", "seconds": topk_s, "times_faster": 1.0}]
    for spec in specs:
        elapsed_s = timing.seconds(prepare(get(spec), ENCODE, x), x.device)
        rows.append({"what": f"{spec} encode", "seconds": elapsed_s, "times_faster": topk_s / elapsed_s})
    return rows


# Tables


def tables(result: dict[str, Any]) -> list[Table]:
    """The record as tables: codecs, other libraries, threads, allocations, sizes, selection."""
    on_gpu = result["device"].startswith("cuda")
    ratio, unit = ("bandwidth_ratio", "of copy bandwidth") if on_gpu else ("speed_ratio", "of copy speed")
    cells = {(row["codec"], row["operation"]): _share(row, ratio, result) for row in result["rows"]}
    names = dict.fromkeys((row["codec"], f"{row['bits']:.2f}") for row in result["rows"])
    speeds: Table = (
        f"{_conditions(result)}, {unit} (* on fewer elements)",
        ("codec", "bits", *OPERATIONS),
        [(name, bits, *(cells.get((name, each), "-") for each in OPERATIONS)) for name, bits in names],
    )
    rivals: Table = (
        f"beside other libraries, {unit}",
        ("operation", "library", "theirs", "thinwire"),
        [
            (f"{row['codec']} {row['operation']}", row["library"], _share(row, ratio, result),
             cells.get((row["codec"], row["operation"]), "-"))
            for row in result["peers"]
        ],
    )  # fmt: skip
    return [table for table in (speeds, rivals, *_other_tables(result)) if table[2]]


def _other_tables(result: dict[str, Any]) -> list[Table]:
    scaling: Table = (
        "threads: how many times as fast as one",
        ("codec", "operation", "threads", "times"),
        [
            (row["codec"], row["operation"], str(row["threads"]), f"{row['ratio']:.2f}")
            for row in result["scaling"]
        ],
    )
    cells = {(row["codec"], row["operation"]): _allocation(row) for row in result["allocations"]}
    allocations: Table = (
        "tensors allocated by a call that has a place for its result (bytes for each element)",
        ("codec", *OPERATIONS),
        [
            (name, *(cells.get((name, operation), "-") for operation in OPERATIONS))
            for name in dict.fromkeys(row["codec"] for row in result["allocations"])
        ],
    )
    times_us = {(row["operation"], row["numel"]): f"{row['seconds'] * 1e6:.1f}" for row in result["sizes"]}
    sizes: Table = (
        f"{SIZED} by size, microseconds",
        ("elements", ENCODE, DECODE),
        [
            (f"{numel:,}", times_us[ENCODE, numel], times_us[DECODE, numel])
            for numel in dict.fromkeys(row["numel"] for row in result["sizes"])
        ],
    )
    selection: Table = (
        "selection of a hundredth",
        ("what", "milliseconds", "times faster"),
        [
            (row["what"], f"{row['seconds'] * 1e3:.2f}", f"{row['times_faster']:.1f}")
            for row in result["selection"]
        ],
    )
    return [scaling, allocations, sizes, selection]


def _conditions(result: dict[str, Any]) -> str:
    numel = result["numel"]
    size = f"{numel >> 20}M" if numel >= 1 << 20 else f"{numel:,}"
    if result["device"].startswith("cuda"):
        return f"{result['device']}, {size} elements, copy {result['copy_bytes_per_s'] / 1e9:.0f} GB/s"
    return f"{result['device']}, {size} elements, copy {result['copy_elements_per_s'] / 1e9:.2f} G elements/s"


def _share(row: dict[str, Any], ratio: str, result: dict[str, Any]) -> str:
    digits = 2 if row[ratio] >= 0.1 else 3
    return f"{row[ratio]:.{digits}f}{'*' if row['numel'] < result['numel'] else ''}"


def _allocation(row: dict[str, Any]) -> str:
    nbytes = row["nbytes_per_element"]
    return f"{row['tensors']:.0f}" + (f" ({nbytes:.1f})" if nbytes >= 0.05 else "")
