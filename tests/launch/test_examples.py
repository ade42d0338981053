"""The examples for other frameworks, as their first lines say to run them."""

import json
import re
from pathlib import Path

import pytest

EXAMPLES = Path(__file__).parents[2] / "examples"
pytestmark = pytest.mark.timeout(200)


@pytest.mark.parametrize(
    "command",
    [
        ("-m", "torch.distributed.run", "--nproc-per-node", "2", EXAMPLES / "accelerate_ddp.py"),
        (EXAMPLES / "lightning_ddp.py",),
    ],
    ids=["accelerate", "lightning"],
)
@pytest.mark.rest
def test_replicas_stay_equal_and_learn(command, begin, finish):
    ended = finish(begin(*command))
    assert ended.code == 0, ended.err[-3000:]
    weights = re.findall(r"rank \d weights ([0-9a-f]{16})", ended.out)
    losses = [float(each) for each in re.findall(r"loss ([0-9.]+)", ended.out)]
    assert len(weights) == 2
    assert weights[0] == weights[1]
    assert losses[-1] < losses[0]
    assert float(re.search(r"ratio ([0-9.]+)", ended.out)[1]) > 2


@pytest.mark.rest
def test_layers_split_by_columns_learn_as_on_one_device(begin, finish):
    name = EXAMPLES / "dettmers_model_parallel.py"
    ended = finish(begin("-m", "torch.distributed.run", "--nproc-per-node", "2", name))
    assert ended.code == 0, ended.err[-3000:]
    for bits in (32, 8):
        weights = re.findall(rf"rank \d {bits} bits weights ([0-9a-f]{{16}})", ended.out)
        assert len(weights) == 2
        assert weights[0] == weights[1]
    away = [float(each) for each in re.findall(r"weights differ by (\S+)", ended.out)]
    assert away[0] < 1e-3 < away[1] < 0.1
    split, alone = re.search(r"8 bits: loss ([0-9.]+), one device ([0-9.]+)", ended.out).groups()
    assert abs(float(split) - float(alone)) < 0.02
    assert float(re.search(r"8 bits: accuracy ([0-9.]+)", ended.out)[1]) > 0.85
    assert float(re.search(r"ratio ([0-9.]+)", ended.out)[1]) > 3.9


@pytest.mark.parametrize("updates", [(), ("--update-each",)], ids=["once", "each"])
@pytest.mark.rest
def test_sub_batches_learn_as_on_one_device(updates, begin, finish, tmp_path):
    words = ("--data", "digits", "--width", "256", "--trace", tmp_path / "trace.json", *updates)
    name = EXAMPLES / "sub_batches.py"
    ended = finish(begin("-m", "torch.distributed.run", "--nproc-per-node", "2", name, *words))
    assert ended.code == 0, ended.err[-3000:]
    for bits in (32, 8):
        weights = re.findall(rf"rank \d {bits} bits weights ([0-9a-f]{{16}})", ended.out)
        assert len(weights) == 2
        assert weights[0] == weights[1]
    away = [float(each) for each in re.findall(r"weights differ by ([0-9.e+-]+)", ended.out)]
    assert away[0] < 1e-4 < away[1] < 0.1
    assert ended.out.count("equal within rounding") == 1
    alone, *split = (float(each) for each in re.findall(r"accuracy ([0-9.]+)", ended.out))
    assert min(alone, *split) > 0.8
    assert float(re.findall(r"ratio ([0-9.]+)", ended.out)[1]) > 3.5
    kinds = {each["cat"] for each in json.loads((tmp_path / "trace-8.json").read_text())}
    assert kinds == {"compute", "transfer", "wait"}


@pytest.mark.parametrize(
    ("kind", "ranks"),
    [
        *(("replicate+shard", 4), ("replicate+tensor", 4), ("replicate+placed", 4), ("tensor+pipeline", 4)),
        *(("shard", 2), ("tensor", 2), ("placed", 2), ("pipeline", 2)),
    ],
)
@pytest.mark.rest
def test_the_gpt_learns_as_on_one_device(kind, ranks, begin, finish):
    name = EXAMPLES / "gpt.py"
    torchrun = ("-m", "torch.distributed.run", "--nproc-per-node", str(ranks))
    ended = finish(begin(*torchrun, name, "--kind", kind, "--steps", "4", "--check"))
    assert ended.code == 0, ended.err[-3000:]
    weights = re.findall(r"rank \d: weights ([0-9a-f]{16})", ended.out)
    assert len(weights) == ranks
    assert len(set(weights)) == 1
    assert float(re.search(r"weights differ by ([0-9.e+-]+)", ended.out)[1]) < 1e-5


@pytest.mark.parametrize("kind", ["diloco", "sparseloco", "localsgd", "demo", "onebit-adam"])
@pytest.mark.rest
def test_the_gpt_learns_with_little_communication(kind, begin, finish):
    torchrun = ("-m", "torch.distributed.run", "--nproc-per-node", "2")
    ended = finish(begin(*torchrun, EXAMPLES / "gpt.py", "--kind", kind, "--steps", "20"))
    assert ended.code == 0, ended.err[-3000:]
    weights = re.findall(r"rank \d: weights ([0-9a-f]{16})", ended.out)
    assert len(weights) == 2
    assert weights[0] == weights[1]
    assert float(re.search(r"loss ([0-9.]+) after 20 steps", ended.out)[1]) < 3.5  # it begins at ln 128 = 4.9
