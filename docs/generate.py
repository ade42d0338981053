"""Writes the generated tables into README.md and docs/; with --check, fails if they are out of date.

A generated part stands between `<!-- begin NAME -->` and `<!-- end NAME -->`.
"""

import argparse
import inspect
import json
import re
import sys
from collections import Counter
from functools import partial
from pathlib import Path
from typing import Any

from thinwire import codecs, zoo
from thinwire.bench import codecs as codec_bench
from thinwire.bench import collectives as collective_bench
from thinwire.bench import formats as format_bench
from thinwire.bench import outer as outer_bench
from thinwire.bench import parallel as parallel_bench
from thinwire.bench import simulate as bench_simulate
from thinwire.bench import training as training_bench
from thinwire.cli.codecs import STUDY_NETS
from thinwire.codecs import CODECS, footprint
from thinwire.codecs import describe as codec_facts
from thinwire.formats import FORMATS
from thinwire.formats.describe import describe
from thinwire.report import reproductions as report
from thinwire.schedules import SCHEDULES
from thinwire.study import convergence, reproduce
from thinwire.study.reproduce import judge

ROOT = Path(__file__).parents[1]
sys.path.append(str(ROOT / "benchmarks"))
RESULTS = ROOT / "benchmarks" / "results"
#: What the README shows of the benchmarks; docs/training.md has all of it.
SHOWN_METHODS = ("torch-bf16", "torch-powersgd", "int8", "int4", "onebit", "powersgd", "auto")
SHOWN_LINK = "10gbit"
SHOWN_COLUMNS = ("codec", "speed-up", "final accuracy", "points from fp32", "bytes per step", "whole run")


def table(header: list[str], rows: list[list[Any]]) -> str:
    lines = ["| " + " | ".join(header) + " |", "|" + "---|" * len(header)]
    return "\n".join(lines + ["| " + " | ".join(str(cell) for cell in row) + " |" for row in rows])


def format_list() -> str:
    rows = []
    for each in map(describe, FORMATS.values()):
        levels = each["levels"] or f"2^{each['bits']}"
        limits = [f"{each['max']:.6g}", f"{each['smallest']:.4g}"]
        rows.append([f"`{each['name']}`", each["bits"], levels, *limits, each["rules"]])
    return table(["name", "bits", "values", "largest", "smallest", "NaN, infinities, -0"], rows)


def codec_list() -> str:
    rows = []
    for each in map(codec_facts.describe, CODECS.values()):
        marks = [name for name, key in (("unbiased", "unbiased"), ("random", "needs_rng")) if each[key]]
        marks += ["zeros do not stay zero"] * (not each["keeps_zeros"])
        marks += ["ranks agree on its scale first"] * bool(each["needs_agreement"])
        size = [f"{each['bits_per_element']:.3f}", f"{each['ratio']:.2f}"]
        rows.append([f"`{each['spec']}`", *size, ", ".join(marks), each["nonfinite"]])
    return table(["spec", "bits/element", "smaller by", "notes", "NaN and infinities"], rows)


#: For every class of codecs, the wires that are drawn.
DRAWN = {
    "Cast": ["fp16"],
    "Block": ["int8/256", "int4/128", "mxfp4", "mxfp6", "nvfp4", "aps/e5m2"],
    "MaxMin": ["maxmin4/1024"],
    "OneBit": ["onebit/64", "sign/512"],
    "OneBitColumn": ["onebit/column"],
    "TopK": ["topk/0.01", "topk/0.01~int8/256"],
    "MSTopK": ["mstopk/0.01"],
    "RandomK": ["randomk/0.01"],
    "Threshold": ["threshold/0.001~cap0.1"],
    "DctTopK": ["dct/64:8"],
}


def wire_formats() -> str:
    parts = []
    for name, specs in DRAWN.items():
        kind = getattr(codecs, name)
        text = inspect.cleandoc(kind.__doc__).split(">>>")[0].strip()
        if "Wire:" not in text:
            module = inspect.cleandoc(sys.modules[kind.__module__].__doc__ or "")
            text = module
        parts.append(f"## {name}\n\n" + text)
        for spec in specs:
            drawing = "\n".join(codec_facts.draw(codecs.get(spec), 4096))
            parts.append(f"`{spec}`, 4096 elements:\n\n```\n{drawing}\n```")
    return "\n\n".join(parts)


def result(kind: str, device: str) -> dict[str, Any]:
    return json.loads((RESULTS / f"{kind}-{device}.json").read_text())


def where(record: dict[str, Any]) -> str:
    machine = record["machine"]
    name = machine["gpu"] if record["device"] == "cuda" else machine["processor"] + ", one thread"
    return f"{name}, {record['numel'] >> 20}M values, {record['date'][:10]}, commit `{record['commit']}`"


def speed_tables(kind: str, device: str) -> str:
    record = result(kind, device)
    bench = {"formats": format_bench, "codecs": codec_bench}[kind]
    parts = [where(record) + "."]
    for title, header, rows in bench.tables(record):
        parts.append(f"### {title}\n\n" + table(list(header), [[f"`{row[0]}`", *row[1:]] for row in rows]))
    if record["absent"]:
        reasons = "; ".join(f"{name} ({reason})" for name, reason in record["absent"].items())
        parts.append(f"Not measured: {reasons}.")
    return "\n\n".join(parts)


def byte_table() -> str:
    rows = []
    for name in STUDY_NETS:
        shapes = zoo.shapes(name)
        footprints = [footprint.footprint(shapes, codecs.get(spec)) for spec in footprint.STUDY.values()]
        cells = [f"{each['wire_nbytes'] / 1e6:.1f}" for each in footprints]
        rows.append([f"`{name}`", f"{footprints[0]['params'] / 1e6:.2f}M", *cells])
    return table(["network", "parameters", *(f"{name} MB" for name in footprint.STUDY)], rows)


def schedule_list() -> str:
    facts = {
        "native": ("what the network sends", "the network adds fp32, fp16 or bf16 itself"),
        "one_shot": ("(N - 1) b", "everyone sends everything to everyone; QSGD's own algorithm"),
        "two_shot": (
            "2 (N - 1) / N b",
            "owners add up shards and send the sums; CNTK's reduce and broadcast",
        ),
        "ring": ("2 (N - 1) / N b", "sums travel around, encoded again at every hop"),
        "tree": ("up to log2(N) b", "sums climb a binomial tree, encoded at every step"),
        "hierarchical/2": ("fp32 inside, b between", "nodes add up inside, encode between"),
        "low_rank/2": ("r (rows + columns) numbers", "PowerSGD: two thin matrices"),
        "accumulate/sequential": (
            "(N - 1) b",
            "rounds after every addition, in rank order; also /ring, /tree, /16, +kahan",
        ),
    }
    rows = []
    for spec, (sent, what) in facts.items():
        served = sum(not SCHEDULES[spec].refuses(codec) for codec in CODECS.values())
        rows.append([f"`{spec}`", sent, f"{served} of {len(CODECS)}", what])
    assert {spec.partition("/")[0] for spec in SCHEDULES} == {spec.partition("/")[0] for spec in facts}
    return table(["schedule", "a rank sends (b: a wire, N ranks)", "codecs served", "how"], rows)


def collective_tables(device: str) -> str:
    record = result("collectives", device)
    machine = record["machine"]
    name = machine["gpu"] if device == "cuda" else machine["processor"]
    parts = [f"{name}, {record['date'][:10]}, commit `{record['commit']}`."]
    for title, header, rows in collective_bench.tables(record):
        parts.append(f"#### {title}\n\n" + table(list(header), [list(row) for row in rows]))
    return "\n\n".join(parts)


def made(record: dict[str, Any]) -> str:
    where, when = record["machine"]["processor"], record["date"][:10]
    return f"{where}, two cores for all hosts, {when}, commit `{record['commit']}`"


def demo_table() -> str:
    record = result("demo", "cpu")
    rows = [[f"`{codec}`", *cells] for codec, *cells in (row["cells"] for row in record["rows"])]
    head = f"**{record['headline']}** {record['rows'][0]['title']}; {made(record)}:"
    return f"{head}\n\n{table(record['header'], rows)}\n\n{record['note']}"


def demo_summary() -> str:
    """The columns that matter most, for the README."""
    record = result("demo", "cpu")
    kept = [record["header"].index(name) for name in SHOWN_COLUMNS]
    rows = [[f"`{row['cells'][0]}`", *(row["cells"][i] for i in kept[1:])] for row in record["rows"]]
    head = f"**{record['headline']}** {record['rows'][0]['title']}; {made(record)}:"
    return f"{head}\n\n{table(list(SHOWN_COLUMNS), rows)}"


def convergence_table() -> str:
    record = result("convergence", "cpu")
    rows = [[f"`{codec}`", *cells] for codec, *cells in convergence.table(record)]
    head = f"{convergence.title(record)}; {made(record)}:"
    return f"{head}\n\n{table(list(convergence.HEADER), rows)}\n\n{convergence.NOTE}"


def training_tables(device: str) -> str:
    record = result("training", device)
    parts = [f"{made(record)}."]
    if device == "cuda":
        parts = [f"{where_trained(record)}."]
    for title, header, rows in training_bench.tables(record):
        parts.append(f"#### {title}\n\n" + table(list(header), [list(row) for row in rows]))
    return "\n\n".join(parts)


def parallel_tables(device: str) -> str:
    record = result("parallel", device)
    parts = [f"{where_trained(record) if device == 'cuda' else made(record)}."]
    for title, header, rows in parallel_bench.tables(record):
        parts.append(f"#### {title}\n\n" + table(list(header), [list(row) for row in rows]))
    return "\n\n".join(parts)


def sharded_summary() -> str:
    """One sentence on FSDP2 on a GPU, for its page and the README."""
    record = result("parallel", "cuda")
    cell = next(each for each in record["cells"] if each["kind"] == "fsdp" and each["hosts"] == 2)
    ms = {row["method"]: f"{row['step_s'] * 1e3:.0f} ms" for row in cell["rows"]}
    where = f"on {cell['hosts']} hosts at {cell['link']}"
    return (
        f"With FSDP2, GPT-2 small {where} takes {ms['fp32']} a step if torch reduces in float32, and\n"
        f"{ms['bf16']} if it reduces in bfloat16. With `int8` weights and gradients it takes {ms['int8']},\n"
        f"and with `int4` gradients {ms['int8+int4']} ({where_trained(record)})."
    )


def where_trained(record: dict[str, Any]) -> str:
    """The GPU that all hosts share, and when and by which commits cells were measured."""
    return f"one {record['machine']['gpu']} for all hosts, {record['date'][:10]}, commit {commits(record)}"


def commits(record: dict[str, Any]) -> str:
    """The commits by which cells were measured."""
    return ", ".join(f"`{each}`" for each in dict.fromkeys(cell["commit"] for cell in record["cells"]))


def training_summary() -> str:
    """How much faster than plain DDP, on hosts that share a GPU and have slow links."""
    record = result("training", "cuda")
    rows = []
    for cell in record["cells"]:
        if cell["link"] != SHOWN_LINK:
            continue
        faster = {row["method"]: f"{row['ratio_to_plain']:.1f}x" for row in cell["rows"]}
        plain = next(row for row in cell["rows"] if row["method"] == training_bench.PLAIN)
        place = f"{cell['network']}, {cell['hosts']} hosts, {cell['link']}"
        rows.append([place, f"{plain['step_s'] * 1e3:.0f} ms", *(faster[method] for method in SHOWN_METHODS)])
    header = ["faster than plain DDP", "its step", *(f"`{method}`" for method in SHOWN_METHODS)]
    return f"Over NCCL, {where_trained(record)}:\n\n{table(header, rows)}"


def reproduction(name: str) -> str:
    """The claims and the tables of a paper, where its full length has been run."""
    paper = reproduce.get(name)
    parts = [f"**{paper.question}** {paper.source}."]
    path = RESULTS / f"reproduce-{name}.json"
    if not path.exists():
        return "\n\n".join((*parts, f"Not run at full length yet; `thinwire reproduce {name}` does."))
    record = json.loads(path.read_text())
    parts.append(f"`{report.command(record)}`")
    done = {part["title"] for part in record["tables"]}
    missing = [each.title for each in paper.sized(reproduce.FULL) if each.title not in done]
    if missing:
        parts.append(f"Not run yet: {'; '.join(missing)}.")
    for part in record["tables"]:
        lines = judge.cells(part)
        kept = judge.columns(lines)
        rows = [[f"`{row[0]}`", *(row[number] for number in kept[1:])] for row in lines]
        parts.append(f"#### {part['title']}\n\n{report.setting(part)} {report.origin(part)}")
        if said := judge.claims(record, part["title"]):
            parts.append(table(list(judge.CLAIMS), [list(row) for row in said]))
        parts.append(table([judge.HEADER[number] for number in kept], rows))
    parts.append("\n".join(f"- {note}" for note in record["notes"]))
    return "\n\n".join(filter(None, parts))


def reproduction_count() -> str:
    """How many claims of papers came out how."""
    records = [json.loads((RESULTS / f"reproduce-{name}.json").read_text()) for name in reproduce.PAPERS]
    said = Counter(
        each["verdict"] for record in records for each in record["claims"] if each["by"] == "paper"
    )
    return (
        f"Of {said.total()} claims of the papers {said[judge.AGREES]} agree, {said[judge.UNDECIDED]} are "
        f"undecided, and {said[judge.DISAGREES]} disagree."
    )


def simulate_tables() -> str:
    """Of every device that was measured."""
    parts = []
    for device in ("cpu", "cuda"):
        if not (RESULTS / f"simulate-{device}.json").exists():
            continue
        record = result("simulate", device)
        name = (
            record["machine"]["gpu"] if device == "cuda" else record["machine"]["processor"] + ", one thread"
        )
        parts.append(f"### {name}\n\n{record['date'][:10]}, commit `{record['commit']}`.")
        for title, header, rows in bench_simulate.tables(record):
            parts.append(f"#### {title}\n\n" + table(list(header), [list(row) for row in rows]))
        parts += [f"Not measured: {library} ({reason})." for library, reason in record["absent"].items()]
    return "\n\n".join(parts) or "Not measured yet: `thinwire bench simulate --save benchmarks/results`."


def outer_table() -> str:
    record = result("outer", "cpu")
    [(title, header, rows)] = outer_bench.tables(record)
    where = f"{record['machine']['processor']}, {record['date'][:10]}, commit {commits(record)}"
    return f"{title}; {where}.\n\n{table(list(header), [list(row) for row in rows])}"


def parallel_accuracy() -> str:
    """Of every kind of parallelism and network."""
    import parallel_accuracy_tables

    record = json.loads((RESULTS / "parallel-accuracy.json").read_text())
    parts = [f"{record['machine']['processor']}, {record['date'][:10]}, commit `{record['commit']}`."]
    for title, header, rows in parallel_accuracy_tables.tables(record):
        parts.append(f"### {title}\n\n" + table(list(header), rows))
    return "\n\n".join(parts)


PARTS = {
    "demo": demo_table,
    "demo-short": demo_summary,
    "simulate-bench": simulate_tables,
    "convergence": convergence_table,
    "training": partial(training_tables, "cpu"),
    "training-cuda": partial(training_tables, "cuda"),
    "training-summary": training_summary,
    "fsdp-summary": sharded_summary,
    "parallel-cpu": partial(parallel_tables, "cpu"),
    "parallel-cuda": partial(parallel_tables, "cuda"),
    "outer-cpu": outer_table,
    "parallel-accuracy": parallel_accuracy,
    "schedules": schedule_list,
    "collective-speed": lambda: collective_tables("cpu"),
    "collective-speed-cuda": lambda: collective_tables("cuda"),
    "formats": format_list,
    "speed-cpu": lambda: speed_tables("formats", "cpu"),
    "speed-cuda": lambda: speed_tables("formats", "cuda"),
    "codecs": codec_list,
    "wires": wire_formats,
    "bytes": byte_table,
    "codec-speed-cpu": lambda: speed_tables("codecs", "cpu"),
    "codec-speed-cuda": lambda: speed_tables("codecs", "cuda"),
    **{f"reproduction-{name}": partial(reproduction, name) for name in reproduce.PAPERS},
    "reproduction-count": reproduction_count,
}


def filled(text: str) -> str:
    def fill(marks: re.Match[str]) -> str:
        name = marks.group(1)
        return f"<!-- begin {name} -->\n{PARTS[name]()}\n<!-- end {name} -->"

    return re.sub(r"<!-- begin ([\w-]+) -->.*?<!-- end \1 -->", fill, text, flags=re.S)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--check", action="store_true", help="change nothing; fail if a table is out of date")
    check = parser.parse_args().check
    stale = []
    for path in [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]:
        text = path.read_text()
        if filled(text) != text:
            stale.append(path.relative_to(ROOT))
            if not check:
                path.write_text(filled(text))
    for path in stale:
        sys.stdout.write(f"{path} {'is out of date: run make docs' if check else 'written'}\n")
    return int(check and bool(stale))


if __name__ == "__main__":
    sys.exit(main())
