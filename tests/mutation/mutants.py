"""Puts bugs into a copy of the package, one at a time, and counts those that the tests notice.

    python tests/mutation/mutants.py map                        which test runs which line: once, 15 minutes
    python tests/mutation/mutants.py map tests/unit/test_x.py   the same for new tests, added to what is known
    python tests/mutation/mutants.py run --count 60 --seed 7    draw 60 bugs; those that survive are printed
    python tests/mutation/mutants.py run --only cli,report      in these folders or files
    python tests/mutation/mutants.py run --seed 7 --bugs 3,14   these of a sample, again
    python tests/mutation/mutants.py run --quick                without tests of several processes

A bug is a small change of the syntax tree that a tired person could have made: a comparison or a sign turned
around, a bound off by one, a condition negated, a keyword argument or a statement forgotten, two arguments
swapped. Functions are drawn at random, each with the same chance; then a place in it, and a change. Only
tests that run the changed line are run (a sample of them where there are very many), and those of several
processes by file (see GROUPS), until one fails.
A bug that no test notices is a survivor: a test is missing, or the change means nothing. Tests that take too
long notice a bug only if they are in time without it: on a busy machine that is tried, and said if not so.

It needs pytest-cov: pip install pytest-cov.
"""

import argparse
import ast
import copy
import itertools
import json
import multiprocessing
import os
import queue
import random
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parents[2]
SOURCE = ROOT / "src" / "thinwire"
MAP = ROOT / ".mutation.json"
GLOO, DDP, FAULTS = (f"tests/groups/test_{each}.py" for each in ("gloo", "ddp", "faults"))
PIPELINE, SHARDED, TENSOR = (f"tests/groups/test_{each}.py" for each in ("pipeline", "sharded", "tensor"))
BLOCKS, SEGMENTS, GEMM = (f"tests/device/test_{each}.py" for each in ("blocks", "segments", "gemm"))
#: Tests that the map does not see, by the beginning of the file that they are about: those of several
#: processes, and those of GPU programs, which run in Triton's interpreter where there is no GPU.
GROUPS = {
    "bench/collective": ["tests/unit/test_bench_collectives.py"],
    "bench/parallel_": ["tests/groups/test_bench_parallel.py"],
    "bench/training": ["tests/unit/test_bench_training.py"],
    "cli/watch": ["tests/launch/test_status.py"],
    "cli/demo": ["tests/groups/test_study.py"],
    "cli/progress": ["tests/groups/test_study.py"],
    "cli/study": ["tests/groups/test_study.py", "tests/groups/test_convergence.py"],
    "clock": [DDP],
    "collectives": [GLOO, "tests/groups/test_programs.py"],
    "integrations": [DDP],
    "integrations/dcp": ["tests/groups/test_dcp.py"],
    "integrations/fsdp": [SHARDED],
    "integrations/job_status": ["tests/launch/test_status.py", "tests/launch/test_launch.py"],
    "integrations/launch": ["tests/launch/test_launch.py"],
    "integrations/metrics_": [DDP, "tests/launch/test_launch.py"],
    "integrations/pipeline": [PIPELINE],
    "integrations/sharded": [SHARDED, "tests/groups/test_dcp.py"],
    "kernels/__init__": [SEGMENTS],
    "kernels/block_cuda": [BLOCKS],
    "kernels/cast_cuda": ["tests/device/test_casts.py"],
    "kernels/cuda": ["tests/device/test_kernels.py"],
    "kernels/gemm_": [GEMM],
    "kernels/segment_": [SEGMENTS],
    "kernels/select_cuda": ["tests/device/test_select.py"],
    "kernels/selftest": [BLOCKS],
    "kernels/tally": ["tests/device/test_tally.py"],
    "lab": ["tests/lab"],
    "parallel": [TENSOR],
    "parallel/pipeline": [PIPELINE],
    "report": ["tests/report"],
    "runtimes": [GLOO, DDP, FAULTS],
    "runtimes/mpi": ["tests/groups/test_mpi.py"],
    "runtimes/nccl": ["tests/device/test_nccl.py"],
    "runtimes/process_group": [GLOO, FAULTS, "tests/groups/test_exit.py"],
    "runtimes/worker": [GLOO, FAULTS, "tests/groups/test_exit.py"],
    "schedules/collectives": [GLOO, "tests/groups/test_programs.py"],
    "study": ["tests/groups/test_study.py", "tests/groups/test_convergence.py"],
    "testing": ["tests/rules/test_contributing.py"],
}
FIRST_TESTS, MOST_TESTS = 50, 250  #: of one line: those that are run first, and in all
FEW = 10  #: tests of one line; then others of its file are run too
PATIENCE_S = 420
LATE = ("(time-out)", "Timeout")  #: said of tests that took too long
USAGE = 4  #: what pytest returns if a test that was asked for does not exist
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
    commutes = isinstance(node.func, ast.Name) and node.func.id in NAMES
    if not (starred or commutes) and len(node.args) >= 2 and ast.dump(node.args[0]) != ast.dump(node.args[1]):
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


def make_map(paths: list[str]) -> None:
    """Run the quick tests of one process with coverage, and write which test runs which line.

    With paths only these tests are run, and added to what is known.
    """
    from coverage import CoverageData

    with tempfile.TemporaryDirectory() as folder:
        data, config = Path(folder) / "coverage", Path(folder) / "rc"
        config.write_text(f"[run]\nsource = {SOURCE}\ndata_file = {data}\nparallel = true\n")
        several = [f"--ignore=tests/{each}" for each in ("groups", "launch", "lab", "device", "report")]
        covered = ["--cov", f"--cov-config={config}", "--cov-context=test", "--cov-report="]
        options = ["-q", "-m", "not rest", "-n", "2", "--timeout=600", "-p", "no:cacheprovider"]
        environment = {**os.environ, "OMP_NUM_THREADS": "1", "COVERAGE_FILE": str(data)}
        elsewhere = [each for each in os.environ.get("PYTHONPATH", "").split(os.pathsep) if each]
        environment["PYTHONPATH"] = os.pathsep.join([str(SOURCE.parent), *elsewhere])  # this checkout first
        subprocess.run(
            [sys.executable, "-m", "pytest", *options, *several, *covered, *paths], cwd=ROOT, env=environment
        )
        known = read_map() if paths else Known([], {})
        numbers = {name: number for number, name in enumerate(known.tests)}
        tests = {
            file: {line: set(each) for line, each in lines.items()} for file, lines in known.lines.items()
        }
        for path in Path(folder).glob("coverage*"):
            held = CoverageData(basename=str(path))
            held.read()
            for file in held.measured_files():
                lines = tests.setdefault(str(Path(file).resolve().relative_to(ROOT)), {})
                for line, contexts in held.contexts_by_lineno(file).items():
                    names = [each.split("|")[0] for each in contexts if each]
                    lines.setdefault(str(line), set()).update(
                        numbers.setdefault(each, len(numbers)) for each in names
                    )
        found = {file: {line: sorted(each) for line, each in lines.items()} for file, lines in tests.items()}
        MAP.write_text(json.dumps({"tests": list(numbers), "lines": found}))


@dataclass(frozen=True)
class Known:
    """Names of tests, and for every line of every file the numbers of those that run it."""

    tests: list[str]
    lines: dict[str, dict[str, list[int]]]


def read_map() -> Known:
    return Known(**json.loads(MAP.read_text())) if MAP.exists() else Known([], {})


def tests_of(bug: Bug, known: Known) -> list[str]:
    """Tests that run the line, or the nearest before it, or else the file; then those that the map misses."""
    lines = known.lines.get(bug.path, {})
    at = next((str(line) for line in range(bug.line, max(0, bug.line - 6), -1) if str(line) in lines), "")
    single = [known.tests[each] for each in lines.get(at, [])]
    random.Random(0).shuffle(single)
    if len(single) < FEW:  # what is kept, or runs on import, is run by more tests than the map says
        others = sorted({each for found in lines.values() for each in found} - set(lines.get(at, [])))
        single += random.Random(0).sample(
            [known.tests[each] for each in others], min(FIRST_TESTS, len(others))
        )
    functions: dict[str, list[str]] = {}
    for each in single:
        functions.setdefault(each.split("[")[0], []).append(each)
    turns = itertools.zip_longest(*functions.values())  # every test once before one with other parameters
    chosen = [each for turn in turns for each in turn if each is not None][:MOST_TESTS]
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

    def noticed_by(self, bug: Bug, tests: list[str]) -> str:
        """The first test that fails with the bug; "" if all pass."""
        inner = Path(bug.path).relative_to("src")
        (self.folder / inner).write_text(bug.text)
        single = [each for each in tests if "::" in each]
        files = [each for each in tests if "::" not in each]
        parts = [part for part in (single[:FIRST_TESTS], single[FIRST_TESTS:]) if part]
        parts += [["-m", which, each] for which in ("not rest", "rest") for each in files]
        try:
            part, failed = next(
                ((part, failed) for part in parts if (failed := self._failed(part))), ([], "")
            )
        finally:
            shutil.copy2(ROOT / bug.path, self.folder / inner)
        if any(each in failed for each in LATE) and self._failed(part):
            return f"NOBODY KNOWS: too late without it as well: {failed}"
        return failed

    def _failed(self, tests: list[str]) -> str:
        said = self.folder / "said"
        child = WARM.Process(target=_pytest, args=(str(self.folder), str(said), tests))
        child.start()
        child.join(PATIENCE_S)
        if child.exitcode is None:
            with suppress(ProcessLookupError):
                os.killpg(child.pid or 0, signal.SIGKILL)
            child.join()
            return f"{tests[-1]} (time-out)"
        if child.exitcode in (0, 5):
            return ""
        text = said.read_text(errors="replace")
        whole = list(dict.fromkeys(each.split("[")[0] for each in tests))
        if child.exitcode == USAGE and whole != tests:  # the bug changed the parameters of a test
            return self._failed(whole)
        failed = [line for line in text.splitlines() if line.startswith(("FAILED", "ERROR"))]
        return failed[0] if failed else text[-200:]


#: Starts processes that have torch loaded, which takes longer than most tests.
WARM = multiprocessing.get_context("forkserver")


def _pytest(folder: str, said: str, tests: list[str]) -> None:
    """Run tests with the package in a folder; in a process, and a group of processes, of its own."""
    os.setsid()
    with Path(said).open("w") as file:
        os.dup2(file.fileno(), 1)
        os.dup2(file.fileno(), 2)
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
    os.chdir(ROOT)
    os.environ |= {"PYTHONPATH": folder, "OMP_NUM_THREADS": "1"}
    sys.path[:] = [folder, *(each for each in sys.path if each != str(SOURCE.parent))]
    sys.argv = ["pytest"]
    import pytest
    import torch

    torch.set_num_threads(1)
    found = pytest.main(["-x", "-q", "-p", "no:cacheprovider", "-p", "no:cov", "--timeout=200", *tests])
    sys.stdout.flush()
    os._exit(int(found))


def run(bugs: dict[int, Bug], jobs: int, quick: bool) -> int:
    """Put bugs in, one at a time; the number of survivors."""
    known = read_map()
    WARM.set_forkserver_preload(["torch", "numba", "pytest", "scipy.stats"])
    with tempfile.TemporaryDirectory() as folder, ThreadPoolExecutor(jobs) as pool:
        free: queue.SimpleQueue[Slot] = queue.SimpleQueue()
        for number in range(jobs):
            free.put(Slot(Path(folder) / str(number)))

        def one(bug: Bug) -> tuple[list[str], str, float]:
            slot, began, tests = free.get(), time.monotonic(), tests_of(bug, known)
            tests = [each for each in tests if "::" in each or not quick]
            try:
                return tests, slot.noticed_by(bug, tests) if tests else "", time.monotonic() - began
            finally:
                free.put(slot)

        survivors = 0
        found = pool.map(one, bugs.values())
        for (number, bug), (tests, by, seconds) in zip(bugs.items(), found, strict=True):
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
    parser.add_argument("paths", nargs="*", help="with map: only these tests, added to the map")
    parser.add_argument("--count", type=int, default=60)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--only", default="")
    parser.add_argument("--bugs", default="", help="numbers of those that are put in; default: all")
    parser.add_argument("--jobs", type=int, default=2)
    parser.add_argument("--quick", action="store_true")
    asked = parser.parse_args()
    if asked.verb == "map":
        make_map(asked.paths)
    else:
        drawn = draw(asked.count, asked.seed, [each for each in asked.only.split(",") if each])
        numbers = [int(each) for each in asked.bugs.split(",") if each] or range(1, len(drawn) + 1)
        run({number: drawn[number - 1] for number in numbers}, asked.jobs, asked.quick)


if __name__ == "__main__":
    main()
