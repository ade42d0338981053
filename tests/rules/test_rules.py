"""Rules of the project that a machine can check."""

import ast
import doctest
import importlib
import json
import pkgutil
import re
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest
import torch

import thinwire
from thinwire import codecs, formats, hybrids, outer, parallel, policy, simulate, zoo
from thinwire.codecs import CODECS
from thinwire.formats import FORMATS

ROOT = Path(__file__).parents[2]
README = (ROOT / "README.md").read_text()
SOURCES = sorted((ROOT / "src").rglob("*.py"))
LONGEST = 400


def test_public_names_are_pinned():
    assert sorted(thinwire.__all__) == [
        "Channel", "CodecError", "CommError", "DataError", "Disagreement", "FormatError", "InputError",
        "LabError", "MissingDependencyError", "NotFiniteError", "Policy", "PolicyError", "Rounding",
        "ScheduleError", "Stream", "ThinwireError",
        "UnknownCodecError", "UnknownFormatError", "WireError", "__version__", "all_gather", "all_reduce",
        "all_to_all", "attach", "broadcast", "codecs", "collectives", "data", "explain", "formats",
        "functional", "hooks", "hybrids", "integrations", "irecv", "isend", "lab", "outer", "parallel",
        "policy", "recv",
        "reduce_scatter", "schedules", "send", "simulate", "testing", "zoo",
    ]  # fmt: skip
    assert sorted(formats.__all__) == [
        "Dettmers", "E8M0", "FORMATS", "Fixed", "Float", "Format", "Int", "Posit", "Table", "Uniform",
        "accuracy", "describe", "exponential", "get", "normal_quantiles", "picture",
    ]  # fmt: skip
    assert sorted(codecs.__all__) == [
        "Block", "CODECS", "Cast", "Codec", "DctTopK", "MSTopK", "MaxMin", "OneBit", "OneBitColumn",
        "RandomK", "Section", "Threshold", "TopK", "accuracy", "describe", "footprint", "get",
        "picture",
    ]  # fmt: skip
    assert sorted(zoo.__all__) == ["Entry", "MODELS", "get", "shapes"]
    assert sorted(simulate.__all__) == [
        "Adam", "Arithmetic", "Counters", "LossScale", "Nodes", "Plan", "Point", "Precision", "Quantizer",
        "RMSprop", "Recipe", "Rule", "SGD", "Stages", "Trained", "assignment", "convert", "describe",
        "evaluate", "functional", "ladder", "layers", "matmul", "recipes", "round_trip", "train",
    ]  # fmt: skip
    assert sorted(parallel.__all__) == [
        "ColwiseParallel", "PipelineStage", "Placed", "PrepareModuleInput", "PrepareModuleInputOutput",
        "PrepareModuleOutput", "RowwiseParallel", "SequenceParallel", "SubBatches", "Timeline", "all_to_all",
    ]  # fmt: skip
    assert sorted(hybrids.__all__) == [
        "Hybrid", "JobPlan", "PlacedAxis", "Predicted", "ReplicateAxis", "ShardAxis", "Split", "TensorAxis",
        "apply", "part_of_batch", "schema",
    ]  # fmt: skip
    assert sorted(outer.__all__) == [
        "DeMo", "DiLoCo", "LoCo", "LocalSGD", "OneBitAdam", "Outer", "SparseLoCo", "ZeroOneAdam", "reshard",
    ]  # fmt: skip
    for module in (thinwire, formats, codecs, zoo, simulate, parallel, hybrids, outer):
        assert all(hasattr(module, name) for name in module.__all__)


def test_imports_point_down():
    done = subprocess.run(
        [Path(sys.executable).parent / "lint-imports", "--no-cache"], cwd=ROOT, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stdout + done.stderr


def test_the_layer_contract_names_every_module():
    contract = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["importlinter"]["contracts"][0]
    modules = {f"thinwire.{each.name}" for each in pkgutil.iter_modules(thinwire.__path__)} - {
        "thinwire.__main__"
    }
    assert modules == {name.strip() for layer in contract["layers"] for name in layer.split("|")}


#: What sends or receives in torch.distributed; asking for ranks, groups and backends is no communication.
COMMUNICATES = re.compile(
    r"(all_|batch_isend_|)(reduce|gather|to_all|scatter|broadcast|irecv)\w*|reduce_scatter\w*|gather\w*"
    r"|scatter\w*|broadcast\w*|i?send\w*|i?recv\w*|(monitored_)?barrier|P2POp"
)
#: Programs that a lab starts on every host, to time torch's own calls beside thinwire's: not library code.
PROGRAMS = {
    "bench/training_worker.py",
    "bench/collective_worker.py",
    "bench/parallel_worker.py",
    "bench/parallel_kinds.py",
    "bench/outer_worker.py",
    "study/worker.py",
}
#: Code that encodes the messages of torch's pipelines, which torch sends.
ENCODERS = {"parallel/pipeline_direction.py", "parallel/pipeline_wire.py"}


def communication(text):
    """The calls of torch.distributed's communication in a module."""
    tree, names, direct = ast.parse(text), {"torch.distributed"}, set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            names |= {each.asname for each in node.names if each.name == "torch.distributed" and each.asname}
        elif isinstance(node, ast.ImportFrom) and node.module == "torch":
            names |= {each.asname or each.name for each in node.names if each.name == "distributed"}
        elif isinstance(node, ast.ImportFrom) and node.module == "torch.distributed":
            direct |= {each.name for each in node.names if COMMUNICATES.fullmatch(each.name)}
    used = {
        node.attr
        for node in ast.walk(tree)
        if isinstance(node, ast.Attribute) and ast.unparse(node.value) in names
    }
    return direct | {name for name in used if COMMUNICATES.fullmatch(name)}


def test_only_runtimes_communicate():
    package = ROOT / "src" / "thinwire"
    by_file = {str(path.relative_to(package)): communication(path.read_text()) for path in SOURCES}
    users = {name for name, calls in by_file.items() if calls}
    assert {name for name in users if not name.startswith("runtimes/")} == PROGRAMS | ENCODERS
    assert all(by_file[name] == {"P2POp"} for name in ENCODERS)
    assert by_file["runtimes/gloo_transport.py"] | by_file["runtimes/process_group.py"]
    assert communication("import torch.distributed as d\nd.all_reduce(x)") == {"all_reduce"}
    assert communication("from torch.distributed import isend, get_rank") == {"isend"}
    assert communication("from torch import distributed\ndistributed.get_world_size()") == set()


@pytest.mark.parametrize("path", SOURCES, ids=lambda path: str(path.relative_to(ROOT)))
def test_files_are_short_and_say_what_they_are(path):
    text = path.read_text()
    assert text.count("\n") <= LONGEST
    assert text.startswith('"""')


def test_readme_commands_exist():
    targets = set(re.findall(r"^([a-z]+):", (ROOT / "Makefile").read_text(), re.M))
    named = set(re.findall(r"\bmake ([a-z]+)", README))
    assert named
    assert named <= targets
    from typer.main import get_command

    from thinwire.cli import app

    command = get_command(app)
    lines = re.findall(
        r"^(?:\$ )?thinwire ([a-z]+(?: [a-z]+)?)", (ROOT / "docs" / "cli.md").read_text(), re.M
    )
    assert {line.split()[0] for line in lines} == command.commands.keys(), "docs/cli.md has every verb"
    for line in lines:
        words, here = line.split(), command
        for word in words:
            if not getattr(here, "commands", None):
                break
            assert word in here.commands, line
            here = here.commands[word]


def test_tables_in_the_docs_are_those_the_results_give():
    done = subprocess.run(
        [sys.executable, ROOT / "docs" / "generate.py", "--check"], capture_output=True, text=True
    )
    assert done.returncode == 0, done.stdout + done.stderr


@pytest.mark.parametrize(
    "path", sorted((ROOT / "benchmarks" / "results").glob("*.json")), ids=lambda path: path.stem
)
def test_results_say_where_they_come_from(path):
    record = json.loads(path.read_text())
    for key in ("date", "commit", "machine", "package", "kernels"):
        assert record[key]
    assert "dirty" not in record["commit"]
    if path.stem.startswith("formats"):
        assert {row["format"] for row in record["rows"]} <= set(FORMATS)
    elif path.stem.startswith("codecs"):
        assert {row["codec"] for row in record["rows"]} >= set(CODECS)
    elif path.stem.startswith(("simulate", "reproduce")):
        assert record.get("products") or [row["accuracies"] for row in record["tables"][0]["rows"]]
    else:
        assert {row.get("link") for row in record.get("rows") or record["cells"]} - {None}


def modules_with_examples():
    for each in pkgutil.walk_packages(thinwire.__path__, "thinwire."):
        if each.name.endswith(
            ("__main__", "triton", "kernels.cuda", "block_cuda", "gemm_cuda", "tally_cuda")
        ):
            continue
        yield each.name


@pytest.mark.parametrize("name", sorted(modules_with_examples()))
def test_examples_in_docstrings_run(name):
    module = importlib.import_module(name)
    result = doctest.testmod(module, extraglobs={"torch": torch}, optionflags=doctest.ELLIPSIS)
    assert result.failed == 0


def test_every_python_block_of_the_documents_runs_when_it_is_pasted():
    """Alone, in a process of its own; those that cannot be run say so, and why, in their first line."""
    paths = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").rglob("*.md"))]
    done = subprocess.run(
        [sys.executable, "-W", "error", Path(__file__).with_name("snippets_program.py"), *paths],
        capture_output=True, text=True, timeout=120,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    outcomes = [json.loads(line) for line in done.stdout.splitlines()]
    fenced = sum(len(re.findall(r"^```python", path.read_text(), re.M)) for path in paths)
    assert len(outcomes) == fenced > 15
    assert {each["block"]: each["wrong"] for each in outcomes if each.get("wrong")} == {}
    assert {each["block"].partition(":")[0] for each in outcomes if "why" in each} == {"data.md", "lab.md"}


def test_the_version_is_the_same_everywhere():
    import thinwire

    assert f"\nversion: {thinwire.__version__}\n" in (ROOT / "CITATION.cff").read_text()


def test_the_table_of_recipes_names_all_of_them():
    rows = re.findall(r"^\| (`.*?) \|", (ROOT / "docs" / "ddp.md").read_text(), re.M)
    named = {name for row in rows for name in re.findall(r"`(.*?)`", row)}
    assert named == {*policy.RECIPES, "auto", "noop"}


def test_readme_is_one_screen():
    assert README.count("\n") <= 120
