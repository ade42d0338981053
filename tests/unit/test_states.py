"""States: what `state_dict` gives stays as it is, and a state that does not fit changes nothing."""

import ast
import copy
from pathlib import Path

import pytest
import torch
from torch import nn

import thinwire
from thinwire import Channel
from thinwire.integrations.auto import Candidate, Choice
from thinwire.integrations.futures import ready
from thinwire.integrations.ladder import Climber
from thinwire.integrations.pilot import Pilot
from thinwire.integrations.routes import Route, schedule_of
from thinwire.integrations.wire import Wire
from thinwire.policy import LADDER, Ladder, Policy, Rule, Tensorlike
from thinwire.runtimes import local
from thinwire.simulate import SGD, Adam, LossScale, Nodes, RMSprop
from thinwire.simulate.ladder import Climb

SOURCES = Path(thinwire.__file__).parent
WORLD = 2
LEVELS = Ladder(("int4/128+ef", "int8/256+ef"), every=1, window=3)
POLICY = Policy(
    "mixed",
    (
        Rule("fp32", "two_shot", max_ndim=1),
        Rule("topk/0.1+ef", name="sparse"),
        Rule("onebit/column+ef", "two_shot", name="column"),
        Rule("int8/256+ef", "ring", name="round"),
        Rule("fp32+ef", "low_rank/2", name="thin"),
        Rule(LADDER),
    ),
    LEVELS,
)
SHAPES = {
    "a": (40, 33), "b": (7,), "sparse": (20, 30), "column": (16, 24), "round": (9, 100), "thin": (30, 40),
}  # fmt: skip


def gauss(*shape, seed=0):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


class Wires:
    """The handles of two ranks, without their process group: what the hook would do to them."""

    def __init__(self, rules=POLICY, pilots=(None, None)):
        self.ranks = [Wire(rules, double_buffer=True, pilot=pilot) for pilot in pilots]
        parameters = {name: nn.Parameter(torch.zeros(shape)) for name, shape in SHAPES.items()}
        for rank, wire in enumerate(self.ranks):
            wire.rank, wire.world = rank, WORLD
            for name, each in parameters.items():
                wire.tensors[id(each)] = each, Tensorlike(name, "weight", SHAPES[name])

    def step(self, seed):
        for tensor in self.ranks[0].trained:
            given = [gauss(*tensor.shape, seed=97 * seed + rank) for rank in range(WORLD)]
            for wire, gradient in zip(self.ranks, given, strict=True):
                rule = wire.policy.route(tensor, seed, 0, wire.router.level)
                wire.routes[tensor.name] = Route(rule.codec, schedule_of(rule, tensor.numel, WORLD))
                if tensor.name in wire.debts:
                    wire.debts[tensor.name].add_(gradient)
                if wire.climber is not None:
                    wire.climber.see(tensor.name, gradient)
            codec, schedule = self.ranks[0].routes[tensor.name]
            channels = [wire.channel(codec) for wire in self.ranks]
            local.all_reduce(given, channels, "avg", schedule, name=tensor.name)
            for wire, gradient in zip(self.ranks, given, strict=True):
                held = wire._stale.get(tensor.name, (None, torch.zeros(tensor.shape)))[1]
                wire._stale[tensor.name] = ready(held), held.copy_(gradient)
        for wire in self.ranks:
            wire.step += 1

    def run(self, steps=2):
        for step in range(steps):
            self.step(step)
        for wire in self.ranks:
            wire.debts["a"] = gauss(*SHAPES["a"])
        return self.ranks[0]


def settled():
    rows = [Candidate(name, 1.0, 10, 0.0, True, "fits") for name in ("fp32", "int8")]
    return Choice(rows=rows, chosen="int8", settled=True, tried={"int8": 0.5}, fp32_step_s=1.0)


# Everything that has a state: how it is made, and what a step does to it


def a_channel():
    channels = [Channel("onebit/64+ef") for _ in range(WORLD)]

    def step(seed):
        channels[0].encode(gauss(100, seed=seed), "alone")
        given = [gauss(300, seed=seed + rank) for rank in range(WORLD)]
        local.all_reduce(given, channels, schedule="two_shot", name="held")

    return channels[0], step


def some_nodes():
    torch.manual_seed(0)
    model = nn.Linear(30, 5)
    nodes = Nodes(model, WORLD, "onebit/64+ef", "two_shot")
    return nodes, lambda seed: nodes.backward(lambda m, x: m(x).square().mean(), gauss(8, 30, seed=seed))


def an_optimizer(make):
    weight = nn.Parameter(gauss(50))
    optimizer = make([weight])

    def step(seed):
        weight.grad = gauss(50, seed=seed)
        optimizer.step()

    return optimizer, step


def a_climber():
    climber = Climber(LEVELS)

    def step(seed):
        climber.see("w", gauss(20, seed=seed))
        climber.end_look(lambda found: found)

    return climber, step


def a_climb():
    climb = Climb()
    return climb, lambda seed: climb.look({"w": gauss(20, seed=seed)}, seed)


def a_choice():
    choice = settled()

    def step(seed):
        choice.tried[f"again{seed}"] = 1.0 + seed
        choice.rows.append(choice.rows[0])

    return choice, step


def a_pilot():
    choice, step = a_choice()
    return Pilot(choice), step


def a_scale():
    scale = LossScale("dynamic", interval=2)
    return scale, lambda seed: scale.update(bool(seed % 3))


def a_wire():
    wires = Wires()
    return wires.run(1), wires.step


MAKERS = {
    "Channel": [a_channel],
    "Nodes": [some_nodes],
    "Rounded": [
        lambda: an_optimizer(lambda p: SGD(p, 0.1, 0.9, keep="float16", update="kahan")),
        lambda: an_optimizer(lambda p: Adam(p, 0.1, keep="bfloat16~sr")),
        lambda: an_optimizer(lambda p: RMSprop(p, 0.1, momentum=0.9)),
    ],
    "Climber": [a_climber],
    "Climb": [a_climb],
    "Choice": [a_choice],
    "Pilot": [a_pilot],
    "LossScale": [a_scale],
    "Wire": [a_wire],
}


def same(one, other):
    """Whether two states are the same, bit for bit."""
    if isinstance(one, torch.Tensor):
        alike = isinstance(other, torch.Tensor) and one.dtype == other.dtype and one.shape == other.shape
        return alike and torch.equal(one.nan_to_num(7.0), other.nan_to_num(7.0))
    if isinstance(one, dict):
        return one.keys() == other.keys() and all(same(one[key], other[key]) for key in one)
    if isinstance(one, list | tuple):
        return len(one) == len(other) and all(map(same, one, other))
    return one == other or (one != one and other != other)


def test_everything_with_a_state_is_tried_here():
    found = {
        each.name
        for path in SOURCES.rglob("*.py")
        for each in ast.walk(ast.parse(path.read_text()))
        if isinstance(each, ast.ClassDef)
        and any(isinstance(part, ast.FunctionDef) and part.name == "state_dict" for part in each.body)
    }
    assert found == MAKERS.keys()


@pytest.mark.parametrize(
    ("kind", "make"),
    [
        pytest.param(kind, make, id=f"{kind}{i}")
        for kind, makers in MAKERS.items()
        for i, make in enumerate(makers)
    ],
)
def test_a_state_is_not_changed_by_later_steps(kind, make):
    """Neither of the run that gave it, nor of one that took it; so it can be kept in memory and resumed."""
    one, step = make()
    for seed in (1, 2):
        step(seed)
    state = one.state_dict()
    kept = copy.deepcopy(state)
    for seed in (3, 4, 5):
        step(seed)
    assert same(state, kept), "the run goes on in its state"
    assert not same(one.state_dict(), kept), "the steps change nothing, so this says nothing"
    other, go_on = make()
    loaded = other if kind != "Pilot" else other.choice
    loaded.load_state_dict(state)
    assert same(other.state_dict() if kind != "Choice" else {**other.state_dict(), "profile": None}, kept)
    for seed in (3, 4, 5):
        go_on(seed)
    assert same(state, kept), "a run that took the state goes on in it"


def test_a_channel_resumes_from_memory():
    channel, given = Channel("onebit/64+ef"), [gauss(300, seed=seed) for seed in range(6)]
    for x in given[:3]:
        channel.encode(x, "w")
    state = channel.state_dict()
    through = [channel.encode(x, "w") for x in given[3:]]
    again = Channel("onebit/64+ef")
    again.load_state_dict(state)
    assert all(torch.equal(again.encode(x, "w"), wire) for x, wire in zip(given[3:], through, strict=True))
