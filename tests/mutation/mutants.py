"""Puts bugs into a copy of the package, one at a time, and counts those that the tests notice.

    python tests/mutation/mutants.py map                        which test runs which line: once, 15 minutes
    python tests/mutation/mutants.py run --count 60 --seed 7    draw 60 bugs; those that survive are printed
    python tests/mutation/mutants.py run --only cli,report      in these folders or files

A bug is a small change of the syntax tree that a tired person could have made: a comparison or a sign turned
around, a bound off by one, a condition negated, a keyword argument or a statement forgotten, two arguments
swapped. Functions are drawn at random, each with the same chance; then a place in it, and a change. Only
tests that run the changed line are run, those of several processes by folder (see GROUPS), until one fails.
A bug that no test notices is a survivor: a test is missing, or the change means nothing.

It needs pytest-cov: pip install pytest-cov.
"""

import argparse
import ast
import copy
import json
import os
import queue
import random
import shutil
import subprocess
import sys
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parents[2]
SOURCE = ROOT / "src" / "thinwire"
MAP = ROOT / ".mutation.json"
#: Tests of several processes, which no map sees, by folder or file of the package that they are about.
GROUPS = {
    "runtimes/mpi": ["tests/groups/test_mpi.py"],
    "runtimes": ["tests/groups/test_gloo.py", "tests/groups/test_ddp.py", "tests/groups/test_faults.py"],
    "integrations/launch": ["tests/launch"],
    "integrations/job_status": ["tests/launch"],
    "integrations/dcp": ["tests/groups/test_dcp.py"],
    "integrations": ["tests/groups/test_ddp.py"],
    "collectives": ["tests/groups/test_gloo.py"],
    "lab": ["tests/lab"],
    "study": ["tests/groups/test_study.py"],
    "bench/training": ["tests/unit/test_bench_training.py"],
}
MOST_TESTS = 60  #: of one line; the quickest are run
PATIENCE_S = 420
SKIPPED = (
    "_triton.py",
    "_numba.py",
    "__main__.py",
)  # compiled: changes there take minutes, and bits are compared
QUIET = {"log", "logging", "warnings"}


# Bugs

COMPARISONS = {
    ast.Lt: ast.LtE, ast.LtE: ast.Lt, ast.Gt: ast.GtE, ast.GtE: ast.Gt, ast.Eq: ast.NotEq, ast.NotEq: ast.Eq,
    ast.In: ast.NotIn, ast.NotIn: ast.In, ast.Is: ast.IsNot, ast.IsNot: ast.Is,
}  # fmt: skip
OPERATORS = {
    ast.Add: ast.Sub, ast.Sub: ast.Add, ast.Mult: ast.Div, ast.Div: ast.Mult, ast.FloorDiv: ast.Mult,
    ast.Mod: ast.FloorDiv, ast.LShift: ast.RShift, ast.RShift: ast.LShift,
}  # fmt: skip
NAMES = {"min": "max", "max": "min", "any": "all", "all": "any"}


@dataclass(frozen=True)
class Bug:
    """A place in a file, and what is done there."""

    path: str
    function: str
    line: int
    kind: str
    before: str
    after: str
    text: str  #: of the whole file with the bug


Change = tuple[ast.AST, str, ast.AST]  # a node, a name for what is done, and the node in its place


def changes_of(function: ast.FunctionDef) -> list[Change]:
    """Every change that could be made in a function."""
    body = function.body[1:] if ast.get_docstring(function) is not None else function.body
    return [
        (node, kind, other)
        for statement in body
        for node in ast.walk(statement)
        for make in (operator_changes, constant_changes, statement_changes, call_changes)
        for kind, other in make(node)
    ]


def operator_changes(node: ast.AST) -> list[tuple[str, ast.AST]]:
    if isinstance(node, ast.Compare) and type(node.ops[0]) in COMPARISONS:
        other = copy.deepcopy(node)
        other.ops[0] = COMPARISONS[type(node.ops[0])]()
        return [("comparison", other)]
    if isinstance(node, ast.BinOp) and type(node.op) in OPERATORS and not _is_text(node):
        return [("operator", ast.BinOp(node.left, OPERATORS[type(node.op)](), node.right))]
    if isinstance(node, ast.BoolOp):
        return [("and/or", ast.BoolOp(ast.And() if isinstance(node.op, ast.Or) else ast.Or(), node.values))]
    if isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.Not):
        return [("not dropped", node.operand)]
    if isinstance(node, ast.Name) and node.id in NAMES and isinstance(node.ctx, ast.Load):
        return [("min/max", ast.Name(NAMES[node.id], ast.Load()))]
    return []


def constant_changes(node: ast.AST) -> list[tuple[str, ast.AST]]:
    if not isinstance(node, ast.Constant):
        return []
    if type(node.value) is int:
        return [("off by one", ast.Constant(node.value + 1))]
    if type(node.value) is bool:
        return [("flag", ast.Constant(not node.value))]
    if type(node.value) is float and node.value:
        return [("number", ast.Constant(node.value * 2))]
    return []


def statement_changes(node: ast.AST) -> list[tuple[str, ast.AST]]:
    if isinstance(node, ast.If | ast.IfExp):
        other = copy.deepcopy(node)
        other.test = ast.UnaryOp(ast.Not(), other.test)
        return [("condition negated", other)]
    if isinstance(node, ast.AugAssign | ast.Expr) and not _is_quiet(node):
        return [("statement forgotten", ast.Pass())]
    if isinstance(node, ast.Slice) and node.lower and node.upper:
        return [("slice", ast.Slice(None, node.upper, node.step))]
    return []


def call_changes(node: ast.AST) -> list[tuple[str, ast.AST]]:
    made: list[tuple[str, ast.AST]] = []
    if not isinstance(node, ast.Call):
        return made
    if node.keywords and all(each.arg for each in node.keywords):
        other = copy.deepcopy(node)
        other.keywords = other.keywords[:-1]
        made.append(("keyword forgotten", other))
    starred = any(isinstance(each, ast.Starred) for each in node.args)
    if not starred and len(node.args) >= 2 and ast.dump(node.args[0]) != ast.dump(node.args[1]):
        other = copy.deepcopy(node)
        other.args[0], other.args[1] = other.args[1], other.args[0]
        made.append(("arguments swapped", other))
    return made


def _is_text(node: ast.BinOp) -> bool:
    parts = [each for each in ast.walk(node) if isinstance(each, ast.JoinedStr | ast.Constant)]
    return any(isinstance(each, ast.JoinedStr) or isinstance(each.value, str) for each in parts)


def _is_quiet(node: ast.AST) -> bool:
    """A docstring, or a line for a log."""
    if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant):
        return True
    names = {each.id for each in ast.walk(node) if isinstance(each, ast.Name)}
    return bool(names & QUIET)


def draw(count: int, seed: int, only: list[str]) -> list[Bug]:
    """So many bugs in functions drawn at random."""
    rng, places = random.Random(seed), []
    for path in sorted(SOURCE.rglob("*.py")):
        name = str(path.relative_to(SOURCE))
        if path.name.endswith(SKIPPED) or (only and not name.startswith(tuple(only))):
            continue
        tree = ast.parse(path.read_text())
        for node in ast.walk(tree):
            if isinstance(node, ast.FunctionDef) and node.name != "__repr__":
                places.append((path, node.lineno))
    rng.shuffle(places)
    bugs: list[Bug] = []
    for path, line in places:
        if len(bugs) == count:
            break
        bug = bug_in(path, line, rng)
        if bug is not None:
            bugs.append(bug)
    return bugs


def bug_in(path: Path, line: int, rng: random.Random) -> Bug | None:
    """One bug in the function that begins at a line; None where there is nothing to change."""
    text = path.read_text()
    tree = ast.parse(text)
    functions = (node for node in ast.walk(tree) if isinstance(node, ast.FunctionDef))
    function = next(node for node in functions if node.lineno == line)
    possible = changes_of(function)
    if not possible:
        return None
    node, kind, other = rng.choice(possible)
    assert isinstance(node, ast.expr | ast.stmt | ast.Slice)
    after = ast.unparse(ast.fix_missing_locations(ast.copy_location(other, node)))
    if isinstance(other, ast.Compare | ast.BinOp | ast.BoolOp | ast.UnaryOp | ast.IfExp):
        after = f"({after})"
    if isinstance(node, ast.If):
        after = _indented(after, node.col_offset)
    lines = [each.encode() for each in text.splitlines(keepends=True)]
    start = len(b"".join(lines[: node.lineno - 1])) + node.col_offset
    stop = len(b"".join(lines[: (node.end_lineno or 1) - 1])) + (node.end_col_offset or 0)
    changed = text.encode()[:start] + after.encode() + text.encode()[stop:]
    try:
        same = ast.dump(ast.parse(changed)) == ast.dump(tree)
    except SyntaxError:
        return None
    before = ast.get_source_segment(text, node) or ""
    name = str(path.relative_to(ROOT))
    return None if same else Bug(name, function.name, node.lineno, kind, before, after, changed.decode())


def _indented(text: str, column: int) -> str:
    first, *rest = text.splitlines()
    return "\n".join([first, *(" " * column + each for each in rest)])


# Tests


def make_map() -> None:
    """Run the quick tests of one process with coverage, and write which test runs which line."""
    from coverage import CoverageData

    with tempfile.TemporaryDirectory() as folder:
        data, config = Path(folder) / "coverage", Path(folder) / "rc"
        config.write_text(f"[run]\nsource = {SOURCE}\ndata_file = {data}\nparallel = true\n")
        several = [f"--ignore=tests/{each}" for each in ("groups", "launch", "lab", "device", "report")]
        covered = ["--cov", f"--cov-config={config}", "--cov-context=test", "--cov-report="]
        options = ["-q", "-m", "not rest", "-n", "2", "--timeout=600", "-p", "no:cacheprovider"]
        environment = {**os.environ, "OMP_NUM_THREADS": "1", "COVERAGE_FILE": str(data)}
        subprocess.run(
            [sys.executable, "-m", "pytest", *options, *several, *covered], cwd=ROOT, env=environment
        )
        tests: dict[str, dict[str, set[str]]] = {}
        for path in Path(folder).glob("coverage*"):
            held = CoverageData(basename=str(path))
            held.read()
            for file in held.measured_files():
                lines = tests.setdefault(str(Path(file).resolve().relative_to(ROOT)), {})
                for line, contexts in held.contexts_by_lineno(file).items():
                    lines.setdefault(str(line), set()).update(each.split("|")[0] for each in contexts if each)
        found = {file: {line: sorted(each) for line, each in lines.items()} for file, lines in tests.items()}
        MAP.write_text(json.dumps(found))


def tests_of(bug: Bug, known: dict[str, dict[str, list[str]]]) -> list[str]:
    """Tests that run the line, or the nearest before it; then those of several processes."""
    lines = known.get(bug.path, {})
    at = next((str(line) for line in range(bug.line, max(0, bug.line - 6), -1) if str(line) in lines), "")
    single = lines.get(at, [])
    files: dict[str, list[str]] = {}
    for each in single:
        files.setdefault(each.split("::")[0], []).append(each)
    chosen = [each for tests in files.values() for each in tests[: max(1, MOST_TESTS // len(files))]]
    inner = bug.path.removeprefix("src/thinwire/")
    several = next(
        (GROUPS[key] for key in sorted(GROUPS, key=len, reverse=True) if inner.startswith(key)), []
    )
    return [*chosen, *several]


class Slot:
    """A copy of the package that bugs are put into and taken out of; compiled loops are kept beside it."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        shutil.copytree(SOURCE, folder / "thinwire")
        self.environment = {**os.environ, "PYTHONPATH": str(folder), "OMP_NUM_THREADS": "1"}

    def noticed_by(self, bug: Bug, tests: list[str]) -> str:
        """The first test that fails with the bug; "" if all pass."""
        inner = Path(bug.path).relative_to("src")
        (self.folder / inner).write_text(bug.text)
        try:
            single = [each for each in tests if "::" in each]
            for part in ([single] if single else []) + [[each] for each in tests if "::" not in each]:
                failed = self._failed(part)
                if failed:
                    return failed
            return ""
        finally:
            shutil.copy2(ROOT / bug.path, self.folder / inner)

    def _failed(self, tests: list[str]) -> str:
        options = ["-x", "-q", "-p", "no:cacheprovider", "--timeout=200"]
        try:
            done = subprocess.run(
                [sys.executable, "-m", "pytest", *options, *tests],
                cwd=ROOT, env=self.environment, capture_output=True, text=True, timeout=PATIENCE_S,
            )  # fmt: skip
        except subprocess.TimeoutExpired:
            return f"{tests[0]} (time-out)"
        if done.returncode in (0, 5):
            return ""
        failed = [line for line in done.stdout.splitlines() if line.startswith(("FAILED", "ERROR"))]
        return failed[0] if failed else (done.stdout + done.stderr)[-200:]


def run(count: int, seed: int, only: list[str], jobs: int) -> int:
    """Put bugs in, one at a time; the number of survivors."""
    known = json.loads(MAP.read_text()) if MAP.exists() else {}
    bugs = draw(count, seed, only)
    with tempfile.TemporaryDirectory() as folder, ThreadPoolExecutor(jobs) as pool:
        free: queue.SimpleQueue[Slot] = queue.SimpleQueue()
        for number in range(jobs):
            free.put(Slot(Path(folder) / str(number)))

        def one(bug: Bug) -> tuple[list[str], str, float]:
            slot, began, tests = free.get(), time.monotonic(), tests_of(bug, known)
            try:
                return tests, slot.noticed_by(bug, tests) if tests else "", time.monotonic() - began
            finally:
                free.put(slot)

        survivors = 0
        for number, (bug, (tests, by, seconds)) in enumerate(zip(bugs, pool.map(one, bugs), strict=True), 1):
            survivors += not by
            verdict = f"caught by {by}" if by else f"SURVIVED {len(tests)} tests"
            what = f"{bug.path}:{bug.line} {bug.function}, {bug.kind}: {bug.before!r} -> {bug.after!r}"
            say(f"{number:3} {what}: {verdict} ({seconds:.0f} s)")
    say(f"{len(bugs) - survivors} of {len(bugs)} caught")
    return survivors


def say(line: str) -> None:
    sys.stdout.write(f"{line}\n")
    sys.stdout.flush()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("verb", choices=("map", "run"))
    parser.add_argument("--count", type=int, default=60)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--only", default="")
    parser.add_argument("--jobs", type=int, default=2)
    asked = parser.parse_args()
    if asked.verb == "map":
        make_map()
    else:
        run(asked.count, asked.seed, [each for each in asked.only.split(",") if each], asked.jobs)


if __name__ == "__main__":
    main()
