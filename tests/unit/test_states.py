"""States: what `state_dict` gives stays as it is, and a state that does not fit changes nothing."""

import ast
import copy
import random
from contextlib import suppress
from pathlib import Path

import pytest
import torch
from torch import nn

import thinwire
from thinwire import Channel, ThinwireError, integrations, policy
from thinwire.errors import InputError
from thinwire.integrations import checkpoint
from thinwire.integrations.auto import Candidate, Choice
from thinwire.integrations.auto_driver import AutoDriver
from thinwire.integrations.futures import ready
from thinwire.integrations.handle import Handle
from thinwire.integrations.ladder import LadderState
from thinwire.integrations.routes import Route, schedule_of
from thinwire.policy import LADDER, Ladder, Policy, Rule, TensorInfo
from thinwire.runtimes import local
from thinwire.simulate import SGD, Adam, LossScale, Nodes, RMSprop
from thinwire.simulate.ladder import PrecisionLadderState

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


class TwoRanks:
    """The handles of two ranks, without their process group: what the hook would do to them."""

    def __init__(self, rules=POLICY, autos=(None, None)):
        self.ranks = [Handle(rules, double_buffer=True, auto=auto) for auto in autos]
        parameters = {name: nn.Parameter(torch.zeros(shape)) for name, shape in SHAPES.items()}
        for rank, handle in enumerate(self.ranks):
            handle.rank, handle.world = rank, WORLD
            for name, each in parameters.items():
                handle.tensors[id(each)] = each, TensorInfo(name, "weight", SHAPES[name])

    def step(self, seed):
        for tensor in self.ranks[0].trained:
            given = [gauss(*tensor.shape, seed=97 * seed + rank) for rank in range(WORLD)]
            for handle, gradient in zip(self.ranks, given, strict=True):
                rule = handle.policy.route(tensor, seed, 0, handle.router.level)
                handle.routes[tensor.name] = Route(rule.codec, schedule_of(rule, tensor.numel, WORLD))
                if tensor.name in handle.pending:
                    handle.pending[tensor.name].add_(gradient)
                if handle.ladder_state is not None:
                    handle.ladder_state.see(tensor.name, gradient)
            codec, schedule = self.ranks[0].routes[tensor.name]
            channels = [handle.channel(codec) for handle in self.ranks]
            local.all_reduce(given, channels, "avg", schedule, name=tensor.name)
            for handle, gradient in zip(self.ranks, given, strict=True):
                held = handle._buffers._stale.get(tensor.name, (None, torch.zeros(tensor.shape)))[1]
                handle._buffers._stale[tensor.name] = ready(held), held.copy_(gradient)
        for handle in self.ranks:
            handle.step += 1

    def run(self, steps=2):
        for step in range(steps):
            self.step(step)
        for handle in self.ranks:
            handle.pending["a"] = gauss(*SHAPES["a"])
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


def a_ladder():
    ladder_state = LadderState(ladder=LEVELS)

    def step(seed):
        ladder_state.see("w", gauss(20, seed=seed))
        ladder_state.end_look(lambda value: value)

    return ladder_state, step


def a_precision_ladder():
    state = PrecisionLadderState()
    return state, lambda seed: state.look({"w": gauss(20, seed=seed)}, seed)


def a_choice():
    choice = settled()

    def step(seed):
        choice.tried[f"again{seed}"] = 1.0 + seed
        choice.rows.append(choice.rows[0])

    return choice, step


def a_driver():
    choice, step = a_choice()
    return AutoDriver(choice), step


def a_scale():
    scale = LossScale("dynamic", interval=2)
    return scale, lambda seed: scale.update(bool(seed % 3))


def a_handle():
    pair = TwoRanks()
    return pair.run(1), pair.step


MAKERS = {
    "Channel": [a_channel],
    "Nodes": [some_nodes],
    "Rounded": [
        lambda: an_optimizer(lambda p: SGD(p, 0.1, 0.9, keep="float16", update="kahan")),
        lambda: an_optimizer(lambda p: Adam(p, 0.1, keep="bfloat16~sr")),
        lambda: an_optimizer(lambda p: RMSprop(p, 0.1, momentum=0.9)),
    ],
    "LadderState": [a_ladder],
    "PrecisionLadderState": [a_precision_ladder],
    "Choice": [a_choice],
    "AutoDriver": [a_driver],
    "LossScale": [a_scale],
    "Handle": [a_handle],
}


#: These need ranks: they are tried in tests/groups (sharded, outer, outer optimizer and hybrids checks).
WITH_RANKS = {"ShardedHandle", "Outer", "Communicating", "Hybrid"}


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
    with_state = {
        each.name
        for path in SOURCES.rglob("*.py")
        for each in ast.walk(ast.parse(path.read_text()))
        if isinstance(each, ast.ClassDef)
        and any(isinstance(part, ast.FunctionDef) and part.name == "state_dict" for part in each.body)
    }
    assert with_state == {*MAKERS, *WITH_RANKS}


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
    loaded = other if kind != "AutoDriver" else other.choice
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
    assert all(
        torch.equal(again.encode(x, "w"), handle) for x, handle in zip(given[3:], through, strict=True)
    )


# Damaged states


def places(value, path=()):
    """Every part of a state, by its path."""
    yield path, value
    if isinstance(value, dict | list):
        for key, each in value.items() if isinstance(value, dict) else enumerate(value):
            yield from places(each, (*path, key))


def changed_tensor(x, draw):
    """Of another length, dtype or shape, or not finite."""
    ways = {
        "longer": lambda: (
            torch.cat([x.reshape(-1), x.reshape(-1)[:1]]) if x.numel() else torch.zeros(1, dtype=x.dtype)
        ),
        "shorter": lambda: x.reshape(-1)[:-1].clone(),
        "double": lambda: x.double(),
        "half": lambda: x.half(),
        "integers": lambda: x.to(torch.int32),
        "deeper": lambda: x.unsqueeze(0),
        "meta": lambda: x.to("meta"),
    }
    if x.is_floating_point() and x.numel():
        ways["nan"] = lambda: torch.full_like(x, float("nan"))
        ways["inf"] = lambda: x.reshape(-1).index_fill(0, torch.tensor([0]), float("inf")).view(x.shape)
    how = draw.choice(sorted(ways))
    return how, ways[how]()


def ways_of(value):
    """What may happen to a part of a state."""
    more = {dict: ["extra", "drop"], list: ["shorter", "longer"], torch.Tensor: ["tensor"] * 4}
    more[int] = ["less", "more", "huge"]
    fits = value if isinstance(value, dict | list) else True
    return ["none", "type", *(more.get(type(value), []) if fits else ["extra"])]


def grown(value, how, draw):
    """Another size of a dict or a list; the key that is gone, if one is."""
    if how == "extra":
        if isinstance(value, dict):
            value["extra"] = draw.choice([None, 1, torch.zeros(3), {}])
        else:
            value.append(None)
    elif how == "drop":
        key = draw.choice(sorted(value))
        value.pop(key)
        return (key,)
    elif how == "shorter":
        value.pop()
    else:
        value.append(value[0])
    return ()


def replaced(value, how, draw):
    """Something else in place of a value, and how it was made."""
    if how == "tensor":
        return changed_tensor(value, draw)
    if how == "type":
        kinds = ["junk", 3.5, [], {}, torch.zeros(3), object(), b"x", (1, 2)]
        return how, draw.choice([each for each in kinds if type(each) is not type(value)])
    return how, {"none": lambda: None, "less": lambda: -1 - value, "more": lambda: value + 1,
                 "huge": lambda: 10**9}[how]()  # fmt: skip


def damage(state, draw):
    """Change one part; where and how."""
    path, value = draw.choice([each for each in places(state) if each[0] or draw.random() < 0.5])
    how = draw.choice(ways_of(value) if path else ["extra", "drop"])
    if how in ("extra", "drop", "shorter", "longer"):
        return (*path, *grown(value, how, draw)), how
    here = state
    for key in path[:-1]:
        here = here[key]
    how, here[path[-1]] = replaced(value, how, draw)
    return path, how


LATER = ("more", "huge")  # of a number: another moment
BAD = ("nan", "inf")  # a gradient that was not finite then
ANY = ("none", "type", "extra", "drop", "shorter", "longer", "less", *LATER, *BAD)
COUNTS = ("looks", "violations", "calm", "seen", "largest")
UNREAD = ("profile", "budget", "settled", "predicted_step_s", "measured_step_s", "fp32_step_s", "tried")
#: Damages after which it still is a state, of the same run at another moment, or that nobody reads. A path of
#: as many parts, "*" for any, and what may happen there. Everything else must be refused.
HARMLESS = [
    *((path, ("extra",)) for path in ((), ("ladder",), ("auto",), ("channels", "*"))),  # of a later version
    (("step",), LATER),
    (("epoch",), LATER),
    (("stale", "*"), (*BAD, "half")),  # of 16 bits
    (("pending", "*"), ("drop",)),  # nothing is pending
    *((("ladder", name), LATER) for name in COUNTS),
    (("ladder", "level"), ("more",)),
    (("ladder", "sums", "*"), BAD),
    (("ladder", "squares", "*"), BAD),
]
#: What "auto" measured is only a table to look at.
TABLE = [
    *((("auto", name), ANY) for name in UNREAD),
    (("auto", "tried", "*"), ANY),
    (("auto", "candidates"), ("shorter", "longer")),
    *((("auto", "candidates", "*", name), ("less", *LATER, "type")) for name in
      ("predicted_step_s", "sent_nbytes", "error", "wall_s", "cpu_s")),
    *((("auto", "candidates", "*", name), ("drop",)) for name in ("wall_s", "cpu_s")),
    (("routes", "*"), ("drop",)),  # int8 has no residuals
]  # fmt: skip


def fits(pattern, path):
    return len(pattern) == len(path) and all(a in ("*", b) for a, b in zip(pattern, path, strict=True))


def harmless(path, how, with_auto):
    if not with_auto and path[:1] == ("auto",) and len(path) > 1:
        return True  # it is not read
    return any(
        fits(pattern, path) and how in ways for pattern, ways in HARMLESS + (TABLE if with_auto else [])
    )


def seen(handle):
    """All of a handle that a load may change."""
    auto = None if handle.auto is None else (handle.auto.settled, handle.auto.chosen, handle.auto.describe())
    handles = [
        id(handle.channels),
        *map(id, handle.channels.values()),
        id(handle.ladder_state),
        id(handle.policy),
    ]
    return {
        "state": handle.state_dict(),
        "policy": handle.policy.to_toml(),
        "auto": auto,
        "handles": handles,
    }


def a_handle_with_auto(step=True):
    pair = TwoRanks(
        policy.get("int8" if step else "fp32"),
        [AutoDriver(settled() if step else Choice()) for _ in range(2)],
    )
    return pair.run() if step else pair.ranks[0]


@pytest.mark.parametrize("seed", range(240))
def test_a_damaged_state_is_refused_and_changes_nothing(seed):
    draw, with_auto = random.Random(seed), seed % 4 == 3
    state = copy.deepcopy((WITH_AUTO if with_auto else MIXED)())
    path, how = damage(state, draw)
    handle = a_handle_with_auto(step=False) if with_auto else TwoRanks().run(1)
    before = seen(handle)
    try:
        handle.load_state_dict(state)
    except ThinwireError:
        assert same(seen(handle), before), f"{path}, {how}: refused, but changed"
        return
    assert harmless(path, how, with_auto), f"{path}, {how}: accepted"
    handle.state_dict()


def remembered(make):
    held = []

    def state():
        if not held:
            held.append(make().state_dict())
        return held[0]

    return state


MIXED, WITH_AUTO = remembered(lambda: TwoRanks().run()), remembered(a_handle_with_auto)


@pytest.mark.parametrize("state", [MIXED, WITH_AUTO], ids=["mixed", "with_auto"])
def test_a_state_that_is_whole_is_taken(state):
    handle = a_handle_with_auto(step=False) if state is WITH_AUTO else TwoRanks().run(1)
    handle.load_state_dict(state())
    assert same({**handle.state_dict(), "auto": {}}, {**state(), "auto": {}})
    assert handle.policy == (policy.get("int8") if state is WITH_AUTO else POLICY)


def test_a_state_that_lacks_something_is_refused():
    """Residuals would be lost without a word."""
    for key, said in (("channels", "is missing"), ("stale", "must name the same tensors")):
        with_residuals = [
            name for name, held in MIXED()["channels"].items() if held["residuals"] and name != "fp32+ef"
        ]
        assert with_residuals
        for name in with_residuals if key == "channels" else MIXED()[key]:
            state = copy.deepcopy(MIXED())
            del state[key][name]
            with pytest.raises(InputError, match=said):
                TwoRanks().run(1).load_state_dict(state)


@pytest.mark.parametrize(("rank", "world"), [(2, 2), (-1, 2), (0, 0), (5, 3)])
def test_a_state_of_no_rank_is_refused(rank, world):
    with pytest.raises(InputError, match=f"there is no rank {rank} among {world} ranks"):
        TwoRanks().run(1).load_state_dict({**MIXED(), "rank": rank, "world": world})


def test_residuals_of_a_rank_are_not_for_any_number_of_ranks():
    with pytest.raises(InputError, match="for any number of ranks, but has residuals of one rank"):
        TwoRanks().run(1).load_state_dict({**MIXED(), "rank": -1, "world": 0})


def test_what_is_not_a_number_is_no_time():
    state = copy.deepcopy(WITH_AUTO())
    state["auto"]["fp32_step_s"] = torch.ones(3)
    with pytest.raises(InputError, match="does not say how long steps took"):
        a_handle_with_auto(step=False).load_state_dict(state)


def test_what_is_no_checkpoint_is_refused_in_words(tmp_path):
    with pytest.raises(InputError, match="is no checkpoint of torch"):
        integrations.load_sharded(TwoRanks().run(1), tmp_path / "nowhere")
    (tmp_path / ".metadata").write_bytes(b"x")
    with pytest.raises(InputError, match="is no checkpoint of torch"):
        integrations.load_sharded(TwoRanks().run(1), tmp_path)
    for states, shapes in ((None, {}), (3, {}), ([MIXED()], None)):
        with pytest.raises(InputError, match="reshard takes a list of all ranks' states"):
            integrations.reshard(states, shapes)


def test_stale_gradients_need_double_buffering():
    """A handle without it would neither use nor drop them."""
    handle, other = TwoRanks().run(), TwoRanks().run(1)
    other.double_buffer = False
    before, state = seen(other), handle.state_dict()
    with pytest.raises(InputError, match=r"attach with double_buffer=True, or drop them: state\['stale'\]"):
        other.load_state_dict(state)
    assert same(seen(other), before)
    other.load_state_dict({**state, "stale": {}})
    assert same(other.pending, handle.pending)


# What simulates has states as well

SIMULATED = [
    pytest.param(make, id=f"{kind}{i}")
    for kind in ("LossScale", "Rounded", "Nodes", "PrecisionLadderState")
    for i, make in enumerate(MAKERS[kind])
]
#: As HARMLESS, for these: what a later version adds, or the same run at another moment.
TAKEN = [
    *((path, ("extra",)) for path in ((), ("param_groups", "*"), ("channels", "*", "*"), ("seen", "*"))),
    *(((name,), LATER) for name in ("step", "steps", "epoch", "good", "skipped", "violations", "level")),
    *(((name,), ("less", *LATER)) for name in ("largest", "last", "scale")),
    *((path, ("drop",)) for path in (("routes",), ("routes", "*"), ("channels", "*"), ("state", "*"))),
    (("seen",), ("shorter", "longer")),
    (("seen", "*", "*"), (*BAD, "drop")),
    (("state", "*", "step"), LATER),
    *((("state", "*", name), BAD) for name in ("momentum", "square", "mean", "compensation")),
    *((("param_groups", "*", name), (*LATER, "drop")) for name in ("seed", "sum_of", "gradient")),
]


@pytest.mark.parametrize("make", SIMULATED)
def test_a_damaged_state_of_a_simulation_is_refused_and_changes_nothing(make):
    one, step = make()
    for seed in (1, 2):
        step(seed)
    whole = one.state_dict()
    for seed in range(150):
        state, (other, go_on) = copy.deepcopy(whole), make()
        path, how = damage(state, random.Random(seed))
        before = other.state_dict()
        try:
            other.load_state_dict(state)
        except ThinwireError:
            assert same(other.state_dict(), before), f"{path}, {how}: refused, but changed"
            continue
        assert any(fits(pattern, path) and how in ways for pattern, ways in TAKEN), f"{path}, {how}: accepted"
        with suppress(InputError):  # in words, if a ladder has not seen a layer in every epoch
            go_on(3)


@pytest.mark.parametrize("make", SIMULATED)
@pytest.mark.parametrize("state", [None, 7, [], "x", {}], ids=repr)
def test_what_is_no_state_of_a_simulation_is_refused(make, state):
    one, step = make()
    step(1)
    before = one.state_dict()
    with pytest.raises(InputError, match="state"):
        one.load_state_dict(state)
    assert same(one.state_dict(), before)


def test_a_ladder_measures_the_diversity_of_its_window():
    ladder_state = LadderState(ladder=LEVELS)
    gradients = [(gauss(20, seed=seed), gauss(7, seed=100 + seed)) for seed in range(LEVELS.window)]
    found = []
    for a, b in gradients:
        ladder_state.see("a", a)
        ladder_state.see("b", b)
        ladder_state.end_look(lambda value: (found.append(float(value)), value)[1])
    ratios = [
        sum(float(each.square().sum()) for each in layer) / float(sum(layer).square().sum())
        for layer in zip(*gradients, strict=True)
    ]
    assert found == pytest.approx([sum(ratios) / 2])
    assert [ladder_state.wants(step) for step in range(1, 2 * LEVELS.every + 1)] == (
        [False] * (LEVELS.every - 1) + [True]
    ) * 2


def test_what_a_rank_owes_is_all_of_it():
    """What waits to be sent, and the residuals of every channel."""
    owed, kept = gauss(100), Channel("onebit/64+ef")
    kept.encode(gauss(100, seed=5), "w/sent")
    residual = kept.residuals["w/sent"].clone()
    state = {
        "pending": {"w": owed, "v": owed},
        "channels": {"onebit/64+ef": kept.state_dict()},
        "rank": 0,
        "world": 1,
    }
    found = checkpoint.gradient_residuals(state, {"w": (100,)})
    assert found.keys() == {"w", "v"}
    assert torch.equal(found["w"], owed + residual)
    assert torch.equal(found["v"], owed)
    alone = checkpoint.gradient_residuals({**state, "pending": {}}, {"w": (100,)})
    assert torch.equal(alone["w"], residual)
    assert found["v"] is not owed
