"""What `attach` loads before the first step: which loops, and the line that says so if it takes long.

That no step has to load any is checked on real ranks, by every recipe in `tests/groups/ddp_program.py`.
"""

import threading
from types import SimpleNamespace

import pytest
import torch
from torch import nn

from thinwire import policy
from thinwire.integrations import ddp, warm
from thinwire.integrations.routes import Route
from thinwire.policy import LADDER, Ladder, Policy, Rule, TensorInfo

CPU = torch.device("cpu")
TENSORS = [TensorInfo("w", "weight", (300, 400)), TensorInfo("b", "bias", (400,))]


def test_every_way_in_which_a_tensor_travels_is_used_once():
    assert warm.routes([policy.get("int8")], TENSORS, 4) == {Route("int8/256", "two_shot")}
    assert warm.routes([policy.get("fp32")], TENSORS, 4) == set()
    several = warm.routes([policy.get(name) for name in ("int8", "powersgd")], TENSORS, 4)
    assert several == {Route("int8/256", "two_shot"), Route("fp32+ef", "low_rank/4")}


def test_all_levels_of_a_ladder_and_schedules_of_two_levels_are_among_them():
    climbing = Policy("climbs", (Rule(LADDER, "hierarchical/8"),), Ladder(("int4/128+ef", "int8/256+ef")))
    assert warm.routes([climbing], TENSORS, 64) == {
        Route("int4/128+ef", "two_shot"),
        Route("int8/256+ef", "two_shot"),
    }


@pytest.mark.parametrize("slow", [True, False])
def test_a_line_says_so_if_it_takes_long(slow, monkeypatch):
    said, told = [], threading.Event()
    monkeypatch.setattr(warm, "PATIENCE_S", 0.0 if slow else 60.0)

    def say(line):
        said.append(line)
        told.set()

    with warm.patience(say, CPU):
        assert not slow or told.wait(30)
    assert [line.startswith("thinwire: loading loops, or compiling") for line in said] == [True] * slow


def test_what_auto_looks_at_is_used_too(monkeypatch):
    seen = []
    monkeypatch.setattr(warm.Auditor, "see", lambda self, tensors: seen.append((self.recipes, len(tensors))))
    warm.warm([], CPU, seen.append, audit=("int8", "onebit"))
    assert seen == [(("int8", "onebit"), 1)] * 2


def test_attach_warms_up_before_it_returns(monkeypatch):
    """Without that the first step compiles, and stands still without a word."""
    warmed = []
    monkeypatch.setattr(ddp.warm, "warm", lambda routes, *_, **__: warmed.append(list(routes)))
    handle = SimpleNamespace(world=2, policy=policy.get("int8"), auto=None, rank=0, trained=TENSORS)
    ddp._prepare(handle, nn.Linear(300, 400))
    assert warmed == [[Route("int8/256", "one_shot")]]


@pytest.mark.parametrize(
    ("recipe", "shape", "said"),
    [
        ("int8", (300, 300), "thinwire: int8: compressing 1 of 1 tensors, 25."),
        ("int8", (10, 3), "all 1 tensors stay in fp32 (too small"),
        ("noop", (300, 300), "noop: nothing is sent and replicas drift apart"),
    ],
)
def test_the_first_line_says_what_is_compressed(recipe, shape, said):
    handle = SimpleNamespace(policy=policy.get(recipe), auto=None)
    assert said in ddp._first_line(handle, [TensorInfo("w", "weight", shape)])
