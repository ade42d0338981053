"""CONTRIBUTING's examples, followed to the letter in a copy of the package; and the public checks."""

import os
import re
import shutil
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

import pytest

from thinwire import testing
from thinwire.codecs import CODECS, Cast
from thinwire.formats import FORMATS, Table
from thinwire.schedules import Schedule

ROOT = Path(__file__).parents[2]
TEXT = (ROOT / "CONTRIBUTING.md").read_text()
#: What a contributor would try next, with what the examples made.
AFTERWARDS = """
import sys
import torch
import thinwire
from thinwire import codecs, formats, policy, schedules, testing
from thinwire.runtimes import local
from thinwire.cli import app
from typer.testing import CliRunner

assert thinwire.__file__.startswith(sys.argv[1]), thinwire.__file__
for name in ("five", "powers4"):
    assert name in formats.FORMATS
    testing.check_format(name)
    testing.check_codec(f"{name}/64+ef")
assert "upper" in codecs.CODECS
for spec in ("upper", "upper+ef", "upper+ef:8bit", "topk/0.1~upper"):
    assert codecs.get(spec).spec == spec
    testing.check_codec(spec)
ranks = [torch.full((300,), 1.0 + rank) for rank in range(4)]
local.all_reduce(ranks, "upper", "avg")
assert all(torch.equal(each, torch.full((300,), 2.5)) for each in ranks)
assert policy.get("five").rules[-1].codec == "five/64+ef"
assert "around" in schedules.SCHEDULES
testing.check_schedule("around")
one, other = ([torch.randn(99, generator=torch.Generator().manual_seed(i)) for i in range(3)] for _ in "ab")
local.all_reduce(one, "int8/256", "avg", "around")
local.all_reduce(other, "int8/256", "avg", "one_shot")
assert torch.equal(one[0], other[0])
for words in (["codecs", "show", "upper"], ["formats", "show", "five"], ["tag", "upper", "9"]):
    done = CliRunner().invoke(app, words)
    assert done.exit_code == 0, done.output
"""


def patched(text, lines):
    """A file with the lines of a diff: those with a plus go behind the one before them."""
    held, at = text.splitlines(), 0
    for line in lines:
        if line.startswith("+"):
            held.insert(at, line[1:])
        else:
            at = next(i for i in range(at, len(held)) if held[i].startswith(line[1:]))
        at += 1
    return "\n".join(held) + "\n"


def test_the_examples_of_contributing_work_when_they_are_followed(tmp_path):
    package, source = tmp_path / "thinwire", ROOT / "src" / "thinwire"
    shutil.copytree(source, package)  # with loops that are compiled already
    blocks = re.findall(r"^```(python|diff)\n# src/(thinwire/\S+)\n(.*?)^```$", TEXT, re.M | re.S)
    assert len(blocks) == TEXT.count("```python") + TEXT.count("```diff") == 10
    for kind, name, text in blocks:
        path = tmp_path / name
        assert path.exists() == (kind == "diff"), name
        path.write_text(text if kind == "python" else patched(path.read_text(), text.splitlines()))
    done = subprocess.run(
        [sys.executable, "-c", AFTERWARDS, tmp_path], capture_output=True, text=True,
        env={**os.environ, "PYTHONPATH": str(tmp_path)},
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-3000:]


def test_examples_of_contributing_keep_the_rules_of_the_project(tmp_path):
    for _, name, text in re.findall(r"^```(python)\n# src/(thinwire/\S+)\n(.*?)^```$", TEXT, re.M | re.S):
        path = tmp_path / Path(name).name
        path.write_text(text)
        for words in (["check"], ["format", "--check"]):
            ruff = [Path(sys.executable).parent / "ruff", *words, "--config", ROOT / "pyproject.toml", path]
            done = subprocess.run(ruff, capture_output=True, text=True)
            assert done.returncode == 0, done.stdout


@pytest.mark.parametrize("codec", CODECS.values(), ids=list(CODECS))
def test_every_codec_passes_the_public_check(codec):
    testing.check_codec(codec)


@pytest.mark.parametrize("name", [each for each in FORMATS if "legacy" not in each and each != "tf32"])
def test_every_format_passes_the_public_check(name):
    testing.check_format(name)


@pytest.mark.parametrize("name", ["native", "ring", "hierarchical/2", "low_rank/2"])
def test_schedules_pass_the_public_check(name):
    testing.check_schedule(name)


@dataclass(frozen=True)
class Forgetful(Cast):
    """Keeps no residual, and hides NaN."""

    fault: str = ""

    @property
    def name(self):
        return f"forgetful-{self.fault}"

    def _encode(self, x, wire, rng, residual, shared):
        if self.fault == "residual":
            residual = None
        x = x.nan_to_num(0.0, 0.0, 0.0) if self.fault == "hides" else x
        super()._encode(x, wire, rng, residual, shared)

    def _decode(self, wire, out, weight, *, add):
        super()._decode(wire, out, weight, add=add and self.fault != "add")


@pytest.mark.parametrize(
    ("fault", "said"),
    [
        ("residual", "the residual is not what was lost"),
        ("hides", "became a finite number"),
        ("add", "decode_add"),
    ],
)
def test_the_check_of_codecs_finds(fault, said):
    with pytest.raises(AssertionError, match=said):
        testing.check_codec(Forgetful("fp16", fault=fault))
    testing.check_codec(Forgetful("fp16"))


class Wrong(Table):
    def from_codes(self, codes, out=None):
        return super().from_codes(codes, out) * 1.5


def test_the_check_of_formats_finds_a_code_that_leads_elsewhere():
    with pytest.raises(AssertionError, match="does not lead back"):
        testing.check_format(Wrong((-1.0, 0.0, 1.0), label="wrong"))


def test_the_check_of_schedules_finds_replicas_that_differ_and_sums_that_are_none():
    def alone(use):
        yield from ()
        for vector in use.vectors:
            vector.mul_(2.0)

    def any_codec(codec):
        return "" if codec.spec == "fp32" else "no"

    with pytest.raises(AssertionError, match="replicas differ"):
        testing.check_schedule(Schedule("alone", alone, any_codec))
