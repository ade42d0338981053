"""`thinwire.attach` over time: residuals are sent, ladders, epochs, other worlds, `auto`, one rank."""

import tomllib

import torch
import torch.distributed as dist
from attach_tools import LR, alike, bag, equal, everyone, feed, go, mean, saved, wanted
from ddp_program import model, train
from start_program import digest, raises

import thinwire
from thinwire import policy
from thinwire.errors import InputError
from thinwire.integrations import reshard
from thinwire.integrations.auto import CANDIDATES
from thinwire.policy import LADDER, Ladder, Policy, Rule
from thinwire.schedules.residuals import gradient_residual

SHAPES = [(130, 100), (50,), (111, 300)]
SMALL = (Rule("fp32", "two_shot", max_ndim=1),)


def residuals_of(handle, shapes):
    """This rank's residuals of w0, w1, ..., whatever it is called."""
    residuals = []
    for number, shape in enumerate(shapes):
        name, total = f"w{number}", torch.zeros(shape, dtype=torch.float64)
        for channel in handle.channels.values():
            residual = gradient_residual(channel, name, shape, handle.rank, handle.world)
            total += 0 if residual is None else residual.double()
        total += handle.pending[name].double() if name in handle.pending else 0
        residuals.append(total)
    return residuals


class Books:
    """What went in and what came out, added up in float64."""

    def __init__(self, shapes, group=None):
        self.shapes, self.group = shapes, group
        self.went = [torch.zeros(shape, dtype=torch.float64) for shape in shapes]
        self.came = [each.clone() for each in self.went]

    def step(self, net, rank, step):
        gradients = wanted(self.shapes, rank, step)
        for i, mean_gradient in enumerate(feed(net, gradients)):
            self.went[i] += gradients[i].double()
            self.came[i] += mean_gradient.double()

    def check(self, handle, what, lossy=True):
        """The mean of what all ranks put in, less what all got, is the mean of their residuals."""
        for i, residual in enumerate(residuals_of(handle, self.shapes)):
            sums = []
            for each in (self.went[i], residual):
                dist.all_reduce(each := each.clone(), group=self.group)
                sums.append(each / handle.world)
            size = self.went[i].abs().max().item() + sums[0].abs().max().item() + 1
            lost = (sums[0] - self.came[i] - sums[1]).abs().max().item()
            assert lost < 4e-6 * size, f"{what}, w{i}: {lost:.3g} of {size:.3g} was lost"
            assert not lossy or i == 1 or sums[1].abs().max() > 1e-3 * size, f"{what}, w{i} has no residual"


def conserved(rank, world):
    """Over many steps everything arrives, or is in a residual."""
    cases = [(f"{codec} {schedule}", Policy("p", (*SMALL, Rule(codec, schedule))))
             for codec in ("onebit/512+ef", "int4/128+ef", "onebit/column+ef")
             for schedule in ("one_shot", "two_shot")]  # fmt: skip
    cases += [(name, policy.get(name)) for name in ("mstopk", "dct-topk", "powersgd", "topk/0.01+ef")]
    cases += [("aps", Policy("p", (*SMALL, Rule("aps/e4m3+ef", "two_shot"))))]
    for what, rules in cases:
        net, books = bag(SHAPES), Books(SHAPES)
        handle = thinwire.attach(net, rules)
        for step in range(20):
            books.step(net, rank, step)
        books.check(handle, what)
    shapes = [(2300, 1000), (7,), (30, 20)]  # several pieces, the last one shorter
    net, books = bag(shapes), Books(shapes)
    handle = thinwire.attach(net, Policy("p", (*SMALL, Rule("onebit/512+ef", "two_shot"))))
    for step in range(3):
        books.step(net, rank, step)
    assert any("[1048576]" in slot for slot in handle.channels["onebit/512+ef"].residuals)
    books.check(handle, "pieces")
    del world
    return net


def switched(rank, world):
    """A residual goes with its tensor, to another codec and another schedule, also over a restart."""
    del world
    ways = [("onebit/512+ef", "one_shot"), ("int4/128+ef", "two_shot"), ("onebit/column+ef", "two_shot"),
            ("onebit/column+ef", "one_shot"), ("mstopk/0.01+ef", "one_shot"), ("fp32+ef", "low_rank/2"),
            ("aps/e4m3+ef", "two_shot"), ("fp32", "two_shot")]  # fmt: skip
    for one, other in zip(ways, [*ways[1:], ways[0]], strict=True):
        rules = Policy("p", (*SMALL, Rule(*one, last_step=2), Rule(*other)))
        what = f"{one} to {other}"
        whole, first, second = bag(SHAPES), bag(SHAPES), bag(SHAPES)
        handles = [thinwire.attach(net, rules) for net in (whole, first, second)]
        books, later = Books(SHAPES), Books(SHAPES)
        for step in range(5):
            books.step(whole, rank, step)
        books.check(handles[0], what, lossy=other[0] != "fp32")
        for step in range(3):  # saved just before the change
            later.step(first, rank, step)
        handles[2].load_state_dict(saved(handles[1].state_dict()))
        for step in range(3, 5):
            later.step(second, rank, step)
        later.check(handles[2], f"{what}, resumed", lossy=other[0] != "fp32")
        if "low_rank" not in what:
            equal(books.came, later.came, what)
    return None


def fast(*levels, **options):
    """A ladder that is climbed within a few steps."""
    given = {"every": 1, "window": 2, "patience": 1, "spread": 1e-6, **options}
    return Policy("fast", (*SMALL, Rule(LADDER)), Ladder(levels, **given))


def steered(rank, step):
    """Two gradients that have little in common, then two that are alike: diversity falls."""
    return wanted(SHAPES, rank, step if step // 2 % 2 == 0 else step // 2 * 2)


def climb(net, handle, rank, first, last, books=None):
    levels = []
    for step in range(first, last):
        gradients = steered(rank, step)
        means = feed(net, gradients)
        for i, each in enumerate(means):
            if books is not None:
                books.went[i] += gradients[i].double()
                books.came[i] += each.double()
            params = list(net.parameters())
            params[i].data.sub_(each, alpha=LR)
        levels.append(handle.stats()["level"])
    return levels


def ladder(rank, world):
    """All ranks climb at the same step, nothing is lost, runs resume; with `calm` they come back."""
    del world
    rules = fast("int4/128+ef", "int8/256+ef", "fp32")
    assert policy.parse(tomllib.loads(rules.to_toml())) == rules
    for double in (False, True):
        net, books = bag(SHAPES), Books(SHAPES)
        handle = thinwire.attach(net, rules, double_buffer=double)
        levels = alike(climb(net, handle, rank, 0, 12, books))
        assert levels[:5] == ["int4/128+ef"] * 4 + ["int8/256+ef"], levels
        assert levels[-1] == "fp32", levels
        if not double:
            books.check(handle, "ladder", lossy=False)
        for stop in (3, 4, 8):  # in the middle of a window; just before it climbs
            one, two = bag(SHAPES), bag(SHAPES)
            before = thinwire.attach(one, rules, double_buffer=double)
            climb(one, before, rank, 0, stop)
            two.load_state_dict(one.state_dict())
            after = thinwire.attach(two, rules, double_buffer=double)
            after.load_state_dict(saved(before.state_dict()))
            assert climb(two, after, rank, stop, 12) == levels[stop:], f"resumed at {stop}"
            for parameter, other in zip(two.parameters(), net.parameters(), strict=True):
                torch.testing.assert_close(parameter, other, rtol=1e-5, atol=1e-5)  # fp32 sums: buckets
    back = bag(SHAPES)
    handle = thinwire.attach(back, fast("int4/128+ef", "int8/256", calm=1))
    levels = alike(climb(back, handle, rank, 0, 9))
    assert levels == ["int4/128+ef"] * 4 + ["int8/256"] * 2 + ["int4/128+ef"] * 3, levels
    idle = bag([(130, 100), (40, 40)])
    handle = thinwire.attach(idle, fast("int4/128+ef", "int8/256"))
    for step in range(6):  # one tensor has no gradients at all
        feed(idle, [steered(rank, step)[0], torch.zeros(40, 40)])
    assert handle.stats()["level"] == "int8/256"
    return back


def ladder_looks(rank, world):
    """A ladder looks at what the optimizer will see: reduced gradients, the same bits on all ranks."""
    del world
    for shadow in (0, 1):
        net = bag(SHAPES)
        handle = thinwire.attach(net, fast("int4/128+ef", "int8/256+ef"), shadow=shadow)
        see, seen = handle.ladder_state.see, {}

        def spy(name, gradient, see=see, seen=seen):
            seen[name] = gradient.clone()
            see(name, gradient)

        handle.ladder_state.see = spy
        for step in range(3):
            seen.clear()
            means = feed(net, steered(rank, step))
            assert sorted(seen) == ["w0", "w2"], sorted(seen)  # w1 is not on the ladder
            equal([seen["w0"], seen["w2"]], [means[0], means[2]], f"step {step}")
            alike(digest([seen["w0"], seen["w2"]]))
            own = steered(rank, step)
            assert not torch.equal(seen["w0"], own[0])
        assert all(torch.isfinite(each).all() for each in handle.ladder_state._sums.values())
    return net


def epochs(rank, world):
    """Rules may name epochs."""
    del world
    rules = Policy("epochs", (*SMALL, Rule("onebit/512+ef", last_epoch=0), Rule("int8/256+ef", last_epoch=1),
                              Rule("fp32", "two_shot")))  # fmt: skip
    net, books = bag(SHAPES), Books(SHAPES)
    handle = thinwire.attach(net, rules)
    for epoch, codec in enumerate(("onebit/512+ef", "int8/256+ef", "fp32", "fp32")):
        handle.set_epoch(epoch)
        for step in range(2):
            books.step(net, rank, 2 * epoch + step)
        assert handle.stats()["layers"]["w0"]["codec"] == codec
        again = thinwire.attach(bag(SHAPES), rules)
        again.load_state_dict(saved(handle.state_dict()))
        assert again.epoch == epoch
    books.check(handle, "epochs", lossy=False)
    return net


def resharded(rank, world):
    """The states of all ranks, made one, on fewer ranks and on more: residuals stay."""
    half = world // 2
    group = dist.new_group(list(range(half)))
    for name in ("onebit", "int4", "mstopk", "powersgd", "onebit/column+ef"):
        wide = bag(SHAPES)
        handle = thinwire.attach(wide, name)
        books = Books(SHAPES)
        for step in range(3):
            books.step(wide, rank, step)
        states = everyone(saved(handle.state_dict()))
        residuals = everyone(residuals_of(handle, SHAPES))
        one = saved(reshard(states, handle.shapes))
        for i, key in enumerate(("w0", "w1", "w2")):
            whole = mean([each[i] for each in residuals])
            there = one["pending"].get(key, torch.zeros(SHAPES[i])).double()
            torch.testing.assert_close(there, whole, rtol=1e-5, atol=1e-5)
        if rank < half:
            narrow = bag(SHAPES, process_group=group)
            other = thinwire.attach(narrow, name)
            other.load_state_dict(one)
            assert other.step == 3
            less = Books(SHAPES, group)
            less.came = [-each for each in map(mean, zip(*residuals, strict=True))]
            for step in range(3, 6):
                less.step(narrow, rank, step)
            less.check(other, f"{name}: fewer", lossy=half > 1)
            kept, shares = (
                everyone(saved(other.state_dict()), group),
                everyone(residuals_of(other, SHAPES), group),
            )
        else:
            kept = shares = None
        kept, shares = everyone(kept)[0], everyone(shares)[0]
        again = bag(SHAPES)
        handle = thinwire.attach(again, name)
        handle.load_state_dict(reshard(kept, handle.shapes))
        books = Books(SHAPES)
        books.came = [-each for each in map(mean, zip(*shares, strict=True))]
        for step in range(6, 9):
            books.step(again, rank, step)
        books.check(handle, f"{name}: more")
        alike(digest([parameter.grad for parameter in again.parameters()]))
    wrong_states(states, handle)
    return again


def wrong_states(states, handle):
    """What reshard and load_state_dict say of states that do not fit."""
    shapes = handle.shapes
    raises(InputError, "all ranks, each once", reshard, states[1:], shapes)
    raises(InputError, "all ranks, each once", reshard, [states[0]] * len(states), shapes)
    raises(InputError, "all ranks, each once", reshard, [], shapes)
    mixed = [*states[:-1], {**states[-1], "step": 99}]
    raises(InputError, "not of one run", reshard, mixed, shapes)
    raises(InputError, "lacks pending", reshard, [{k: v for k, v in each.items() if k != "pending"}
                                                for each in states], shapes)  # fmt: skip
    raises(InputError, "w2", reshard, states, {key: each for key, each in shapes.items() if key != "w2"})
    raises(InputError, "w2", reshard, states, {**shapes, "w2": (3, 3)})
    before = digest(each for each in handle.state_dict()["pending"].values())
    other = states[(handle.rank + 1) % handle.world]
    raises(InputError, "each rank loads its own", handle.load_state_dict, other)
    strange = saved(states[handle.rank])
    strange["channels"] = {
        codec: {**held, "residuals": {f"x{slot}": each for slot, each in held["residuals"].items()},
                "shapes": {f"x{slot}": each for slot, each in held["shapes"].items()}}
        for codec, held in strange["channels"].items()
    }  # fmt: skip
    raises(InputError, "xw", handle.load_state_dict, strange)
    sized = saved(reshard(states, shapes))
    sized["pending"]["w0"] = torch.zeros(3)
    raises(InputError, "w0", handle.load_state_dict, sized)
    assert digest(each for each in handle.state_dict()["pending"].values()) == before


def goes_on(net, state, chosen, shapes, rank):
    """A resumed `auto` keeps its choice, and does what that recipe by itself does, bit for bit.

    Not what the first run does: a new model's first buckets are others, and sums of float16 follow them.
    """
    nets = [bag(shapes, decay=0.1) for _ in range(2)]
    for each, name in zip(nets, ("auto", chosen), strict=True):
        each.load_state_dict(net.state_dict())
        handle = thinwire.attach(each, name)
        handle.load_state_dict(state)
        assert handle.policy == policy.get(chosen)
        assert name == chosen or handle.stats()["auto"]["settled"]
        go(each, shapes, rank, 3, handle.step)
    equal(*nets, f"auto keeps {chosen}")
    alike(digest(nets[0].parameters()))


def auto(rank, world):
    """It settles on every rank alike, says why, and a resumed run does not measure again."""
    shapes = [(300, 100), (50,), (200, 200)]
    net = bag(shapes, decay=0.1)
    handle = thinwire.attach(net, "auto")
    steps = 0
    while not handle.stats()["auto"]["settled"] and steps < 60:
        go(net, shapes, rank, 1, steps)
        steps += 1
    auto_stats = handle.stats()["auto"]
    assert auto_stats["settled"], auto_stats
    alike((auto_stats["chosen"], steps, digest(net.parameters())))
    for key in ("fp32_step_s", "predicted_step_s", "measured_step_s", "budget", "candidates"):
        assert auto_stats[key], (key, auto_stats)
    assert auto_stats["chosen"] in auto_stats["tried"] or auto_stats["chosen"] == "fp32", (
        auto_stats
    )  # nothing else may promise a gain
    assert auto_stats["chosen"] in [each["codec"] for each in auto_stats["candidates"]]
    assert handle.policy == policy.get(auto_stats["chosen"])
    kept = saved(handle.state_dict())
    goes_on(net, kept, auto_stats["chosen"], shapes, rank)
    for name in CANDIDATES:  # whatever a machine's timing might have led to
        blank = {"channels": {}, "routes": {}, "pending": {}, "auto": {**kept["auto"], "chosen": name}}
        goes_on(net, {**kept, **blank, "policy": policy.get(name).to_toml()}, name, shapes, rank)
    for stop in (3, 8):  # in the middle of measuring: it begins again, or goes on
        early = bag(shapes)
        begun = thinwire.attach(early, "auto")
        go(early, shapes, rank, stop)
        later = bag(shapes)
        resumed = thinwire.attach(later, "auto")
        resumed.load_state_dict(saved(begun.state_dict()))
        go(later, shapes, rank, 60, stop)
        assert resumed.stats()["auto"]["settled"], (stop, resumed.stats()["auto"])
        alike(digest(later.parameters()))
    del world
    return net


def one_rank(rank, world):
    """A world of one: nothing is sent, nothing is changed."""
    groups = [dist.new_group([each]) for each in range(world)]
    shapes = [(120, 100), (20,)]
    for name in (*policy.RECIPES, "auto", "noop", "topk/0.01+ef"):
        net = bag(shapes, process_group=groups[rank])
        handle = thinwire.attach(net, name, shadow=2)
        for step in range(8 if name == "auto" else 2):
            gradients = wanted(shapes, rank, step)
            equal(feed(net, gradients), gradients, name)
        stats = handle.stats()
        assert (stats["world"], stats["sent_nbytes"], stats["ratio"]) == (1, 0, 1.0)
        again = thinwire.attach(bag(shapes, process_group=groups[rank]), name)
        again.load_state_dict(saved(handle.state_dict()))
    assert handle.rank == 0
    net = model(process_group=groups[rank])
    thinwire.attach(net, "int8", double_buffer=True)
    train(net, rank, 3)
    return None


CHECKS = (conserved, switched, ladder, ladder_looks, epochs, resharded, auto, one_rank)
