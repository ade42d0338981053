"""Ranks of an outer loop that die, leave and join: scenarios in process groups that are made anew.

    python outer_faults_program.py [SCENARIO ...]

Every rank that survives reports what went wrong, "" if nothing, and the parent how each process ended.
"""

import os
import shutil
import signal
import sys
import time
import traceback
from pathlib import Path

import torch
import torch.distributed as dist
from attach_tools import alike
from outer_tools import globals_alike, made, network, sgd, train
from start_program import digest, fork, join, meeting, raises, report, statuses

from thinwire.errors import CommError
from thinwire.integrations import warm
from thinwire.integrations.routes import Route

TIMEOUT_S = 8
LATE_S = TIMEOUT_S + 8.0  # on a busy machine
WALL_S = 150


def gather(rank, world, place, era):
    """A process group of its own for each era."""
    if dist.is_initialized():
        dist.destroy_process_group()
    folder = Path(place).with_name(f"era{era}")
    folder.mkdir(exist_ok=True)
    join(rank, world, str(folder / "port"), TIMEOUT_S)


def die():
    os.kill(os.getpid(), signal.SIGKILL)


def lost(model, optimizer, rank, first):
    """Train until an outer step fails: in time, and with an error that names the call."""
    began = time.monotonic()
    said = raises(CommError, "all_reduce", train, model, optimizer, rank, 30, first)
    assert time.monotonic() - began < LATE_S, f"{time.monotonic() - began:.1f} s"
    return said


def killed(kind, *, when):
    def scenario(rank, place):
        """Rank 2 dies in an outer step; the others are told, go on alone, and then with each other."""
        gather(rank, 3, place, 0)
        model, optimizer, outer = made(kind)
        train(model, optimizer, rank, 8)
        if rank == 2:
            if when == "in flight":
                every = outer.settings.every
                train(model, optimizer, rank, every - 8 % every, 8)
            die()
        weights = digest(outer.global_weights().values())
        lost(model, optimizer, rank, 8)
        local = digest(model.parameters())
        assert all(each.isfinite().all() for each in model.parameters())
        assert outer.rounds or weights == digest(outer.global_weights().values())
        gather(rank, 2, place, 1)
        outer.regroup()
        assert digest(model.parameters()) == local or outer.step
        globals_alike(outer)
        train(model, optimizer, rank, 12, outer.step)
        globals_alike(outer)
        outer.sync()
        alike(digest(model.parameters()))
        assert outer.stats()["world"] == 2
        dist.destroy_process_group()

    return scenario


def half_told(rank, place):
    """One survivor used an outer step of which the other never heard: the one that is behind catches up."""
    gather(rank, 3, place, 0)
    model, optimizer, outer = made("diloco int4+ef")
    train(model, optimizer, rank, 7)
    ahead = rank != 1
    if ahead:
        train(model, optimizer, rank, 1, 7)
        wanted = digest(outer.global_weights().values())
    else:
        handle = outer.fragments[0].handle
        handle.reduce = broken(handle.reduce)
        raises(CommError, "broken", train, model, optimizer, rank, 1, 7)
    if rank == 2:
        die()
    gather(rank, 2, place, 1)
    outer.regroup()
    globals_alike(outer)
    if ahead:
        assert digest(outer.global_weights().values()) == wanted
    else:
        assert digest(model.parameters()) == digest(outer.global_weights().values())
    train(model, optimizer, rank, 8, outer.step)
    globals_alike(outer)
    dist.destroy_process_group()


def broken(reduce):
    """An all-reduce that fails when the others have all they need."""

    def fails(bucket):
        reduce(bucket).wait()
        raise CommError("broken")

    return fails


def alone(rank, place):
    """After a rank died, detach: training goes on without anyone."""
    gather(rank, 2, place, 0)
    model, optimizer, outer = made("diloco overlapped")
    train(model, optimizer, rank, 4)
    if rank == 1:
        die()
    lost(model, optimizer, rank, 4)
    raises(CommError, "no call can follow", train, model, optimizer, rank, 12, 8)
    outer.detach()
    before = digest(model.parameters())
    train(model, optimizer, rank, 8, 8)
    assert digest(model.parameters()) != before
    gather(rank, 1, place, 1)
    outer.regroup()  # a group of one
    outer.sync()
    assert outer.stats()["world"] == 1


def leaves_and_joins(rank, place):
    """Two ranks, then one, then three: in groups of new processes, as on machines that come and go."""
    kind, model = "diloco all", None
    if rank < 2:
        gather(rank, 2, place, 0)
        model, optimizer, outer = made(kind)
        train(model, optimizer, rank, 14)
        outer.hand_over()
        alike(digest(model.parameters()))
        momenta = digest(each["momentum_buffer"] for each in outer.optimizer.state.values())
        dist.destroy_process_group()
    if rank == 0:
        gather(0, 1, place, 1)
        outer.regroup()
        train(model, optimizer, rank, 7, outer.step)
        assert momenta
    if rank:  # rank 1 comes back as a new process would, without a memory
        model = network(seed=50 + rank)
        optimizer = sgd(model, momentum=0.9)
    gather(rank, 3, place, 2)
    if rank:
        outer = made(kind, model=model, optimizer=optimizer)[2]
    else:
        outer.regroup()
    assert outer.step == 21
    globals_alike(outer)
    train(model, optimizer, rank, 13, outer.step)
    outer.finish()
    globals_alike(outer)
    outer.sync()
    alike(digest(model.parameters()))
    dist.destroy_process_group()


SCENARIOS = {  # what every rank does, the number of ranks, those that die
    "killed": (killed("diloco int4+ef", when="between"), 3, (2,)),
    "killed_fp32": (killed("local fp32", when="between"), 3, (2,)),
    "killed_in_flight": (killed("diloco all", when="in flight"), 3, (2,)),
    "half_told": (half_told, 3, (2,)),
    "alone": (alone, 2, (1,)),
    "leaves_and_joins": (leaves_and_joins, 3, ()),
}


def main(name, rank, place):
    wrong, began = "", time.monotonic()
    try:
        SCENARIOS[name][0](rank, place)
    except Exception:  # noqa: BLE001
        wrong = traceback.format_exc()[-1500:]
    report(scenario=name, rank=rank, wrong=wrong, seconds=round(time.monotonic() - began, 2))


if __name__ == "__main__":
    torch.set_num_threads(1)
    names = sys.argv[1:] or list(SCENARIOS)
    report(scenarios={name: [SCENARIOS[name][1], list(SCENARIOS[name][2])] for name in names})
    for codec in ("int4/128+ef", "fp32"):  # ranks must not wait for each other's compiler
        warm.warm({Route(codec, "one_shot"), Route(codec, "two_shot")}, torch.device("cpu"), print)
    places = {name: meeting() for name in names}
    pids = {
        (name, rank): fork(main, name, rank, places[name])
        for name in names
        for rank in range(SCENARIOS[name][1])
    }
    for who, status in zip(pids, statuses([*pids.values()], time.monotonic() + WALL_S), strict=True):
        report(scenario=who[0], rank=who[1], status=status)
    for place in places.values():
        shutil.rmtree(Path(place).parent, ignore_errors=True)
