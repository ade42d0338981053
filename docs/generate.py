"""Writes the generated tables into README.md and docs/; with --check, fails if they are out of date.

A generated part stands between `<!-- begin NAME -->` and `<!-- end NAME -->`.
"""

import argparse
import json
import re
import sys
from pathlib import Path
from typing import Any

from thinwire.bench import formats as bench
from thinwire.formats import FORMATS
from thinwire.formats.describe import describe

ROOT = Path(__file__).parents[1]
RESULTS = ROOT / "benchmarks" / "results"
#: What the README shows of the benchmark; docs/benchmarks.md has all of it.
SHOWN = ("float8_e4m3fn", "float8_e5m2", "int8", "posit8_1", "dynamic_tree", "bnb_dynamic", "nf4")


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


def result(device: str) -> dict[str, Any]:
    return json.loads((RESULTS / f"formats-{device}.json").read_text())


def where(record: dict[str, Any]) -> str:
    machine = record["machine"]
    name = machine["gpu"] if record["device"] == "cuda" else machine["processor"] + ", one thread"
    return f"{name}, {record['numel'] >> 20}M values, {record['date'][:10]}, commit `{record['commit']}`"


def speed_summary() -> str:
    parts = []
    units = {"cpu": "elements/s, as a share of a float32 copy", "cuda": "bytes/s, as a share of that copy"}
    for device, unit in units.items():
        record = result(device)
        (title, header, rows), *_ = bench.tables(record)
        del title
        shown = [[f"`{row[0]}`", *row[2:]] for row in rows if row[0] in SHOWN]
        parts.append(f"{where(record)}; {unit}:\n\n" + table(["format", *header[2:]], shown))
    return "\n\n".join(parts)


def speed_tables(device: str) -> str:
    record = result(device)
    parts = [where(record) + "."]
    for title, header, rows in bench.tables(record):
        parts.append(f"### {title}\n\n" + table(list(header), [[f"`{row[0]}`", *row[1:]] for row in rows]))
    if record["absent"]:
        reasons = "; ".join(f"{name} ({reason})" for name, reason in record["absent"].items())
        parts.append(f"Not measured: {reasons}.")
    return "\n\n".join(parts)


PARTS = {
    "formats": format_list,
    "speed": speed_summary,
    "speed-cpu": lambda: speed_tables("cpu"),
    "speed-cuda": lambda: speed_tables("cuda"),
}


def filled(text: str) -> str:
    def fill(found: re.Match[str]) -> str:
        name = found.group(1)
        return f"<!-- begin {name} -->\n{PARTS[name]()}\n<!-- end {name} -->"

    return re.sub(r"<!-- begin ([\w-]+) -->.*?<!-- end \1 -->", fill, text, flags=re.S)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--check", action="store_true", help="change nothing; fail if a table is out of date")
    check = parser.parse_args().check
    stale = []
    for path in [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]:
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
