"""The examples for other frameworks, as their first lines say to run them."""

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
