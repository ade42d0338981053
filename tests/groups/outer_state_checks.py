"""Checks of what outlives a step of an outer loop: checkpoints, and groups that change."""

import copy

import torch
import torch.distributed as dist
from attach_tools import alike, everyone, saved
from outer_tools import globals_alike, made, network, sgd, train
from start_program import digest, raises

from thinwire.errors import Disagreement, InputError
from thinwire.integrations.checkpoint import gradient_residuals
from thinwire.outer import DiLoCo, reshard

EXACT = "local fp32", "diloco random", "diloco all", "diloco powersgd", "sparse overlapped"


def bits(model, optimizer, outer):
    """Of everything that a run consists of."""
    momenta = [state["momentum_buffer"] for state in optimizer.state.values()]
    return digest([*model.state_dict().values(), *momenta, *outer.global_weights().values()])


def resume(rank, world):
    """From the middle of a round, with outer steps in flight: the bits of a run that went on."""
    del world
    for kind in EXACT:
        for cut in (7, 9):
            one = made(kind)
            train(one[0], one[1], rank, cut)
            state = saved([each.state_dict() for each in one])
            again = saved([each.state_dict() for each in one])  # saving changes nothing
            assert digest(state[0].values()) == digest(again[0].values())
            train(one[0], one[1], rank, 9, cut)
            other = made(kind, seed=5)
            train(other[0], other[1], rank, 2)  # what it was before does not matter
            for each, content in zip(other, state, strict=True):
                each.load_state_dict(content)
            train(other[0], other[1], rank, 9, cut)
            assert bits(*one) == bits(*other), (kind, cut)
            globals_alike(other[2])
            one[2].detach()
            other[2].detach()


def residuals(outer):
    """What this rank would add to its next outer gradients, by name."""
    return {
        name: residual
        for fragment in outer.fragments
        for name, residual in gradient_residuals(fragment.handle.state_dict(), fragment.handle.shapes).items()
    }


def mean_residuals(outer, group=None):
    everything = everyone(residuals(outer), group)
    names = {name for each in everything for name in each}
    return {name: sum(each[name] for each in everything if name in each) / len(everything) for name in names}


def same_means(before, after):
    assert before.keys() == after.keys()
    assert before
    for name, mean in before.items():
        assert torch.allclose(mean, after[name], rtol=1e-5, atol=1e-6), name
        assert mean.abs().max() > 0


def another_world(rank, world):
    """The states of all ranks, merged: the mean residual stays, and any number of ranks goes on."""
    kind = "diloco int4+ef"
    model, optimizer, outer = made(kind)
    train(model, optimizer, rank, 7)
    before = mean_residuals(outer)
    merged = reshard(everyone(outer.state_dict()))
    halves = [dist.new_group([0, 1]), dist.new_group([*range(1, world)])]
    for group in halves:
        if (
            rank not in dist.get_process_group_ranks(group)
            if group != dist.GroupMember.NON_GROUP_MEMBER
            else True
        ):
            continue
        other = made(kind, seed=9, group=group)
        other[0].load_state_dict(model.state_dict())
        other[2].load_state_dict(saved(merged))
        assert digest(other[2].global_weights().values()) == digest(outer.global_weights().values())
        same_means(before, mean_residuals(other[2], group))
        train(other[0], other[1], rank, 6, 7)
        globals_alike(other[2])
        other[2].detach()


def refused_states(rank, world):
    """A state that does not fit is refused and changes nothing."""
    model, optimizer, outer = made("diloco all")
    train(model, optimizer, rank, 14)
    state = outer.state_dict()
    train(model, optimizer, rank, 4, 14)
    outer.state_dict()  # waits for what is in flight
    before = bits(model, optimizer, outer), digest(residuals(outer).values()), outer.step
    name = next(iter(state["weights"]))

    def changed(change):
        broken = copy.deepcopy(state)
        change(broken)
        return broken

    for broken, texts in (
        ({}, "no state of an outer loop"),
        (changed(lambda each: each.update(version=9)), "version 9"),
        (changed(lambda each: each.update(settings="other")), "other settings"),
        (changed(lambda each: each.update(rank=(rank + 1) % world)), "each rank loads its own"),
        (changed(lambda each: each.update(step="3")), "step is '3'"),
        (changed(lambda each: each["weights"].pop(name)), "another model"),
        (changed(lambda each: each["weights"].update({name: torch.zeros(3)})), "another model"),
        (changed(lambda each: each["fragments"].pop()), "2 fragments"),
        (changed(lambda each: each["fragments"][0].update(last=[])), "averaged buffers"),
        (changed(lambda each: each["fragments"][1].update(mean=torch.zeros(3))), "mean"),
        (changed(lambda each: each["fragments"][2]["handle"].update(version=0)), "version 0"),
        (changed(lambda each: each["optimizer"]["param_groups"].clear()), "outer optimizer"),
        (
            changed(lambda each: each["optimizer"]["state"][0].update(momentum_buffer=torch.zeros(2))),
            "is (2,)",
        ),
    ):
        raises(InputError, texts, outer.load_state_dict, broken)
        assert before == (bits(model, optimizer, outer), digest(residuals(outer).values()), outer.step), texts
    train(model, optimizer, rank, 4, 18)
    globals_alike(outer)
    raises(InputError, "list of all ranks' states", reshard, [])
    raises(InputError, "states of all ranks, each once", reshard, [state, state])
    outer.detach()


def leave_and_join(rank, world):
    """Sub-groups: the last rank leaves, with and without handing over, and joins again."""
    for kind in ("diloco int4+ef", "diloco all", "sparse overlapped"):
        check_leaving(rank, world, kind, hands_over=True)
        check_leaving(rank, world, kind, hands_over=False)


def check_leaving(rank, world, kind, *, hands_over):
    fewer, everybody = dist.new_group([*range(world - 1)]), dist.new_group([*range(world)])
    model, optimizer, outer = made(kind)
    train(model, optimizer, rank, 13)
    if hands_over:
        outer.hand_over()
        alike(digest(model.parameters()))
        alike(digest(residuals(outer).values()))
    before, momenta, stays = mean_residuals(outer), len(outer.optimizer.state), rank < world - 1
    if stays:
        check_staying(outer, fewer, before if hands_over else {})
        train(model, optimizer, rank, 6, outer.step)
        outer.finish()
        globals_alike(outer)
        before = mean_residuals(outer, fewer)
        outer.regroup(everybody)
    else:
        outer.detach()
        model = network(seed=77)
        optimizer = sgd(model, momentum=0.9)
        outer = made(kind, model=model, optimizer=optimizer, group=everybody)[2]
        assert len(outer.optimizer.state) == momenta
        assert digest(model.parameters()) == digest(outer.global_weights().values())
    assert outer.step == 19
    globals_alike(outer)
    after = mean_residuals(outer, everybody)
    if stays and world > 2:  # a group of one sends nothing, and owes nothing
        same_means(before, after)
    train(model, optimizer, rank, 8, outer.step)
    globals_alike(outer)
    outer.sync()
    alike(digest(model.parameters()))
    outer.detach()


def check_staying(outer, fewer, means):
    """A smaller group changes no weights; it has the mean of all residuals if these were handed over."""
    local, weights = digest(outer.model.parameters()), digest(outer.global_weights().values())
    outer.regroup(fewer)
    assert digest(outer.model.parameters()) == local
    assert digest(outer.global_weights().values()) == weights
    assert outer.stats()["world"] == dist.get_world_size(fewer)
    if means:
        same_means(means, mean_residuals(outer, fewer))


def other_settings_join(rank, world):
    """A rank that joins with other settings: all ranks hear of it, and go on as before."""
    fewer, everybody = dist.new_group([*range(world - 1)]), dist.new_group([*range(world)])
    model = network()
    optimizer = sgd(model)
    if rank < world - 1:
        outer = DiLoCo(model, optimizer, 4, "int4", group=fewer)
        train(model, optimizer, rank, 5)
        before = digest(residuals(outer).values())
        said = caught(outer.regroup, everybody)
        assert digest(residuals(outer).values()) == before
        train(model, optimizer, rank, 5, 5)
        globals_alike(outer)
    else:
        said = caught(DiLoCo, model, optimizer, 5, "int4", group=everybody)
    assert "every 4" in said, said
    assert "every 5" in said, said
    alike(said)


def caught(function, *args, **options):
    """What the disagreement says."""
    return raises(Disagreement, "rank 0 called", function, *args, **options)


CHECKS = (resume, another_world, refused_states, leave_and_join, other_settings_join)
