"""What happens when something is wrong: scenarios, each in a process group of its own, several at once.

Every rank that survives reports whether it was told what it should be; the driver reports how each process
ended. The group's time-out is a few seconds.
"""

import gc
import itertools
import multiprocessing
import os
import re
import shutil
import signal
import sys
import threading
import time
import traceback
from dataclasses import dataclass
from datetime import timedelta
from functools import partial
from pathlib import Path

import own_codec
import torch
import torch.distributed as dist
from start_program import fork, join, meeting, raises, report, statuses

import thinwire
import thinwire.collectives  # before ranks are forked
import thinwire.integrations
from thinwire.errors import CommError, Disagreement, InputError, UnknownCodecError
from thinwire.integrations.run import plain
from thinwire.runtimes import gloo_runtime, local

TIMEOUT_S = 7  #: long enough for groups to form while thirty processes share two cores
TIMEOUT = timedelta(seconds=TIMEOUT_S)
SOON_S = 3.0  #: "at once", on a busy machine
LATE_S = TIMEOUT_S + 8.0  #: the time-out, and the time to ask others what they did
SHARD = "two_shot"


@dataclass(frozen=True)
class Scenario:
    """What every rank does; `dead` are ranks that do not survive it, with their exit status."""

    run: object
    world: int = 3
    dead: tuple[int, ...] = ()
    within_s: float = LATE_S
    debug: bool = False


def good(world, numel=999, codec="int8/256", **options):
    """A call that works."""
    x = torch.ones(numel)
    thinwire.all_reduce(x, codec, **options)
    assert x.eq(world).all()


def die():
    os.kill(os.getpid(), signal.SIGKILL)


# A rank is gone


def killed_before(rank, world):
    """Before the first exchange; a rank that is late is told the same."""
    del world
    if rank == 2:
        die()
    time.sleep(3 * rank)
    raises(CommError, ["rank 2", "all_reduce of 1,000"], thinwire.all_reduce, torch.ones(1000), "int8/256")
    raises(CommError, "no call can follow", thinwire.all_reduce, torch.ones(1000), "int8/256")


def killed_first(rank, world):
    """The rank that holds the store."""
    good(world)
    if rank == 0:
        die()
    raises(CommError, ["rank 0", "all_reduce of 999"], thinwire.all_reduce, torch.ones(999), "int8/256")


def frozen_first(rank, world):
    """The rank that holds the store is stopped: nothing may wait for the store either."""
    good(world)
    pid = torch.tensor([os.getpid() if rank == 0 else 0])
    dist.broadcast(pid, 0)
    if rank == 0:
        os.kill(os.getpid(), signal.SIGSTOP)
    began = time.monotonic()
    raises(CommError, ["rank 0", "all_reduce of 999"], thinwire.all_reduce, torch.ones(999), "int8/256")
    assert time.monotonic() - began < LATE_S, "late"
    if rank == 1:  # ends it, once the others are done with it
        threading.Timer(5, os.kill, (pid.item(), signal.SIGKILL)).start()
        time.sleep(5.5)


def killed_during(rank, world):
    """While 100 MB are under way."""
    x = torch.ones(25_000_000)
    good(world)
    if rank == 2:
        threading.Timer(0.7, die).start()
    works = [thinwire.all_reduce(x, "fp32", schedule="one_shot", async_op=True) for _ in range(20)]
    raises(CommError, ["rank 2", "all_reduce of 25,000,000"], works[-1].wait)
    assert all(work.is_completed() for work in works)
    assert isinstance(works[-1].exception(), CommError)
    raises(CommError, "no call can follow", thinwire.all_reduce, x, "fp32")


def killed_during_sum(rank, world):
    """While the network adds."""
    good(world, codec="fp32")
    x = torch.ones(25_000_000)
    if rank == 1:
        threading.Timer(0.3, die).start()

    def sums():
        for _ in range(100):
            thinwire.all_reduce(x, "fp32")

    said = raises(CommError, "all_reduce of 25,000,000", sums)
    assert re.search(r"no word from rank (\d, )*1", said), said  # others may be slow to notice
    assert f"rank {rank} is gone" not in said, "a rank blames itself"
    assert f"rank {2 - rank} is gone" not in said, "a rank that gave up because of another is blamed"


def late_to_a_sum(rank, world):
    """The network adds on a group of its own, whose time-out must be the user's."""
    good(world, codec="fp32")
    if rank == 1:
        time.sleep(TIMEOUT_S + 1.5)
    said = raises(CommError, "all_reduce of 999", thinwire.all_reduce, torch.ones(999), "fp32")
    assert rank == 1 or re.search(r"rank 1 came \d\.\d s later|no word from rank (\d, )*1", said), said


def killed_before_a_sum(rank, world):
    """When ranks have agreed on the first sum, and are about to connect for it."""
    if rank == 2:
        gloo_runtime._sums = lambda _: die()
    said = raises(CommError, "all_reduce of 999", good, world, codec="fp32")
    assert re.search(r"no word from rank (\d, )*2", said), said
    raises(CommError, "no call can follow", good, world)


def told_by_another(rank, world):
    """A rank that waits for one that gave up, and not for the one that is gone."""
    good(world)
    if rank == 2:
        die()
    if rank == 0:  # keeps the store, and leaves once it was told
        raises(CommError, "rank 2", good, world, schedule="one_shot")
        return
    texts = ["send of 90", "rank 0 gave up", "no word from rank 2"]
    raises(CommError, texts, thinwire.recv, torch.ones(90), 0, "int8/256")
    raises(CommError, "no call can follow", good, world)


def killed_in_a_smaller_group(rank, world):
    """Errors name ranks as the user counts them, not by their places in the group."""
    del world
    group, store = dist.new_group([1, 2], TIMEOUT), dist.distributed_c10d._get_default_store()
    if rank == 0:
        store.wait(["told"], timedelta(seconds=LATE_S))
        return
    call = partial(thinwire.all_reduce, torch.ones(10 + rank), "int8/256", group=group)
    raises(Disagreement, ["rank 1 called all_reduce of 11", "rank 2 called all_reduce of 12"], call)
    if rank == 2:
        die()
    raises(CommError, ["failed on rank 1: rank 2 is gone", "no word from rank 2"], good, 2, group=group)
    store.set("told", "")


def killed_between(rank, world):
    """Between two exchanges of known calls."""
    for _ in range(3):
        good(world)
    dist.barrier()
    if rank == 2:
        os._exit(7)
    said = raises(
        CommError, ["rank 2", "all_reduce of 999"], thinwire.all_reduce, torch.ones(999), "int8/256"
    )
    raises(CommError, ["no call can follow", said[:40]], thinwire.all_reduce, torch.ones(9), "int8/256")
    raises(CommError, "no call can follow", thinwire.send, torch.ones(9), 1 - rank, "int8/256")


def killed_in_training(rank, world, recipe):
    """In a backward pass of DDP: an error that users can catch by its name, and that names the rank."""
    torch.manual_seed(0)
    net = torch.nn.Sequential(torch.nn.Linear(64, 256), torch.nn.ReLU(), torch.nn.Linear(256, 256))
    model = torch.nn.parallel.DistributedDataParallel(net, bucket_cap_mb=0.1)
    if recipe == "hook":
        model.register_comm_hook(*thinwire.hooks.get("int8", net))
    else:
        thinwire.attach(model, "int8" if recipe == "detached" else recipe)
    if recipe == "detached":
        thinwire.integrations.detach(model)

    def train():
        for step in range(2000):
            if rank == 1 and step == 5:
                die()
            model.zero_grad()
            model(torch.ones(4, 64)).square().sum().backward()

    raises(CommError, ["all_reduce", "rank 1"], train)
    began = time.monotonic()
    raises(CommError, "no call can follow", good, world)
    raises(CommError, "no call can follow", plain, torch.ones(9), None)
    assert time.monotonic() - began < SOON_S, "a call after a failure waits"


# Ranks disagree


def disagree(world, ask, texts):
    """A disagreement on every rank at once; then the group works."""
    began = time.monotonic()
    said = raises(Disagreement, texts, ask)
    assert time.monotonic() - began < SOON_S, "not at once"
    assert all(f"rank {rank}" in said for rank in range(world))
    good(world, 1234)
    good(world, 1234, async_op=False, schedule="ring")


def other_codec(rank, world):
    codec = "int4/128" if rank == 1 else "int8/256"
    texts = ["rank 0 called all_reduce of 1,000", "rank 1 called", "int4/128", "int8/256"]
    disagree(world, lambda: thinwire.all_reduce(torch.ones(1000), codec, schedule=SHARD), texts)


def other_own_codec(rank, world):
    """Codecs of users that go by one name, but are not the same."""
    for one, other in ((own_codec.block(), own_codec.block(0.5)), (own_codec.Steps(), own_codec.Steps(0.25))):
        codec = other if rank == 1 else one
        texts = ["rank 0 called all_reduce of 1,000", "rank 1 called", codec.spec]
        disagree(world, lambda codec=codec: thinwire.all_reduce(torch.ones(1000), codec), texts)


def other_schedule(rank, world):
    schedule = "ring" if rank == 1 else SHARD
    disagree(
        world, lambda: thinwire.all_reduce(torch.ones(1000), "int8/256", schedule=schedule), [SHARD, "ring"]
    )


def sums_or_not(rank, world):
    """One rank asks the network to add, the others do not."""
    codec = "fp32" if rank == 1 else "int8/256"
    disagree(world, lambda: thinwire.all_reduce(torch.ones(1000), codec), ["fp32", "int8/256", "native"])
    good(world, codec="fp32")


def sums_or_not_async(rank, world):
    codec = "fp32" if rank == 1 else "int8/256"
    disagree(
        world,
        lambda: thinwire.all_reduce(torch.ones(1000), codec, async_op=True).wait(),
        ["fp32", "int8/256", "native"],
    )


def other_size(rank, world):
    numel = 1000 + rank
    disagree(world, lambda: thinwire.all_reduce(torch.ones(numel), "int8/256"), ["1,000", "1,001", "1,002"])


def other_dtype(rank, world):
    dtype = torch.bfloat16 if rank else torch.float32
    disagree(
        world,
        lambda: thinwire.all_reduce(torch.ones(1000, dtype=dtype), "int8/256"),
        ["float32", "bfloat16"],
    )


def other_size_async(rank, world):
    numel = 1000 + rank
    disagree(
        world,
        lambda: thinwire.all_reduce(torch.ones(numel), "int8/256", async_op=True).wait(),
        ["1,000", "1,001", "1,002"],
    )


def other_node(rank, world):
    """Schedules of two levels, with and without a number."""
    schedule = "hierarchical" if rank == 1 else "hierarchical/1"
    raises(CommError, "schedule", good, world, schedule=schedule)


def swapped_new(rank, world):
    """Two calls, swapped on one rank, at their first use: both fail, at once."""
    began = time.monotonic()
    calls = (lambda: good(world, 500), lambda: good(world, 600))
    for call in [*(calls if rank != 1 else calls[::-1])] * 2:  # a call is not known because it was refused
        raises(Disagreement, ["of 500", "of 600"], call)
    assert time.monotonic() - began < SOON_S, "not at once"
    good(world, 500)


def swapped_names(rank, world):
    """Calls that differ in nothing but their names, swapped on one rank: no sum of different tensors."""
    names = ("fc1", "fc2") if rank else ("fc2", "fc1")
    tensors = {"fc1": torch.ones(1000), "fc2": 10 * torch.ones(1000)}
    for name in names:
        texts = ["named 'fc1'", "named 'fc2'", "rank 0 called"]
        raises(Disagreement, texts, thinwire.all_reduce, tensors[name], "int8/256", name=name)
    good(world)


def swapped_names_elsewhere(rank, world):
    """The same for other collectives, and names that are longer than what ranks tell one another."""
    one, other = ("a" * 600, "b" * 600) if rank else ("é" * 600, "b" * 600)
    raises(Disagreement, "rank 0 called", good, world, name=one)
    good(world, name=other)
    name, x, many = f"w{min(rank, 1)}", torch.ones(10), torch.ones(10 * world)
    for call in (
        lambda: thinwire.all_gather(many, x, "int8/256", name=name),
        lambda: thinwire.reduce_scatter(x, many, "int8/256", name=name),
        lambda: thinwire.broadcast(x, 0, "int8/256", name=name),
        lambda: thinwire.all_to_all(many, many.clone(), "int8/256", name=name),
    ):
        raises(Disagreement, ["named 'w0'", "named 'w1'"], call)
    good(world)


def swapped_sums(rank, world, sizes, codec):
    """Known sums, which the network matches by nothing but their order, swapped on one rank."""
    calls = [partial(good, world, size, codec, name=name) for size, name in zip(sizes, "ab", strict=True)]
    for call in calls:
        call()
    first, second = calls if rank != 1 else calls[::-1]
    raises(CommError, ["named 'a'", "named 'b'", f"failed on rank {rank}"], first)
    raises(CommError, "no call can follow", second)


def swapped_letters(rank, world):
    """Messages of one size that are sent in one order and received in another."""
    del world
    call = thinwire.recv if rank else thinwire.send
    raises(CommError, "send of 90", call, torch.ones(90), 1 - rank, "int8/256", name=f"w{rank}")


def attached_differently(rank, world):
    """Options of attach that differ between ranks."""
    model = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(64, 64))
    for one, other in (
        ({"codec": "int8"}, {"codec": "int4"}),
        ({"double_buffer": True}, {}),
        ({"shadow": 5}, {}),
        ({"seed": 1}, {}),
        ({"codec": "auto", "error_budget": 0.1}, {"codec": "auto"}),
        ({"codec": own_codec.mine()}, {"codec": own_codec.mine(0.5)}),
        ({"codec": own_codec.Steps(0.5)}, {"codec": own_codec.Steps(0.25)}),
    ):
        said = raises(Disagreement, "attach of", thinwire.attach, model, **(other if rank else one))
        assert all(f"rank {each} called" in said for each in range(world)), said
    thinwire.attach(model, "int8")
    model(torch.ones(4, 64)).sum().backward()


def swapped(rank, world):
    """Known calls, swapped on one rank: the time-out, and both calls are named."""
    good(world, 500), good(world, 600)
    call, other = (500, 600) if rank != 1 else (600, 500)
    raises(CommError, ["of 500", "of 600", f"failed on rank {rank}"], good, world, call)
    raises(CommError, "no call can follow", good, world, other)


def swapped_checked(rank, world):
    """The same where every call is compared."""
    good(world, 500), good(world, 600)
    calls = (lambda: good(world, 500), lambda: good(world, 600))
    for call in calls if rank != 1 else calls[::-1]:
        raises(Disagreement, ["of 500", "of 600"], call)
    good(world, 500), good(world, 600)


def uneven(rank, world):
    """all_to_all: what is sent is not what there is room for."""
    sent = [torch.ones(10 + rank + other) for other in range(world)]
    came = [torch.zeros(10 + rank + other) for other in range(world)]
    thinwire.all_to_all(came, sent, "int8/256")
    assert all(x.eq(1).all() for x in came)
    if rank == 1:
        came[2] = torch.zeros(99)
    for options in ({}, {"async_op": True}):
        began = time.monotonic()
        raises(
            Disagreement,
            "rank 2 sends 13 elements to rank 1, which has room for 99",
            lambda options=options: (
                work.wait() if (work := thinwire.all_to_all(came, sent, "int8/256", **options)) else None
            ),
        )
        assert time.monotonic() - began < SOON_S, "not at once"
    good(world)


def letter_of_another_size(rank, world):
    """A message the receiver does not expect."""
    del world
    if rank == 0:
        raises(CommError, ["send of 100", "rank 1"], thinwire.send, torch.ones(100), 1, "int8/256")
    else:
        raises(CommError, ["send of 90", "rank 0"], thinwire.recv, torch.ones(90), 0, "int8/256")
    raises(CommError, "no call can follow", good, 2)


def letter_on_its_way(rank, world):
    """What is not waited for at once is told by `wait`, as often as it is asked, and by every later call."""
    if rank == 1:
        time.sleep(0.3)
        die()
    coming = thinwire.irecv(torch.ones(90), 1, "int8/256")
    for _ in range(2):
        raises(CommError, ["send of 90", "failed on rank 0", "rank 1"], coming.wait)
    raises(CommError, "no call can follow", good, world)
    raises(CommError, "no call can follow", thinwire.irecv, torch.ones(90), 1, "int8/256")


def letter_to_the_dead(rank, world):
    del world
    if rank == 1:
        die()
    raises(CommError, "rank 1", thinwire.recv, torch.ones(90), 1, "int8/256")
    raises(CommError, "no call can follow", good, 2)


# The end of a group


def destroyed(rank, world):
    """Work in flight ends with an error."""
    good(world)
    if rank == 0:
        work = thinwire.all_reduce(torch.ones(999), "int8/256", async_op=True)
        waiting = thinwire.all_reduce(torch.ones(99), "int8/256", async_op=True)
        time.sleep(0.3)
        dist.destroy_process_group()
        raises(CommError, "", work.wait)
        raises(CommError, "", waiting.wait)
        raises(CommError, "there is no process group", good, world)
    else:
        time.sleep(1)
        dist.destroy_process_group()


def destroyed_by_all(rank, world):
    """Nobody waits, all end."""
    del rank
    x = torch.ones(3_000_000)
    thinwire.all_reduce(x, "int8/256")
    for _ in range(5):
        thinwire.all_reduce(x, "int8/256", async_op=True)
    dist.destroy_process_group()
    raises(CommError, "there is no process group", good, world)


def left_behind(rank, world):
    """A program that ends while calls are under way, and never destroys its group."""
    good(world)
    for _ in range(rank + 1):
        thinwire.all_reduce(torch.ones(3_000_000), "int8/256", schedule="ring", async_op=True)


def made_again(rank, world):
    """A second group after the first was destroyed."""
    good(world)
    dist.destroy_process_group()
    join(rank, world, os.environ["SECOND_PLACE"], TIMEOUT_S)
    good(world), good(world, codec="fp32")
    thinwire.all_reduce(torch.ones(10), "int8/256", async_op=True).wait()


# Many calls, and ranks that are not in step


def thousand(rank, world):
    """Calls outstanding."""
    xs = [torch.full((10 + i % 7,), float(i)) for i in range(1000)]
    works = [thinwire.all_reduce(x, "fp32", schedule="one_shot", async_op=True) for x in xs]
    works.reverse()
    assert all(work.wait() for work in works)
    assert all(x.eq(i * world).all() for i, x in enumerate(xs)), rank


def ahead(rank, world, one, other, lag_s=0.5):
    """Rank 0 makes its second call long before the others do."""
    for each in (one, other):
        good(world, **each)
    for _ in range(2):
        first, second = torch.ones(999), torch.ones(888)
        works = [thinwire.all_reduce(first, **{"async_op": True, **one})]
        if rank != 0:
            time.sleep(lag_s)
        works.append(thinwire.all_reduce(second, **{"async_op": True, **other}))
        for work in works:
            work.wait()
        assert first.eq(world).all()
        assert second.eq(world).all()


def ahead_on_a_ring(rank, world):
    ahead(rank, world, {"codec": "int8/256", "schedule": "ring"}, {"codec": "int8/256", "schedule": "ring"})


def ahead_on_a_tree(rank, world):
    ahead(
        rank, world, {"codec": "int8/256", "schedule": "tree"}, {"codec": "int8/256", "schedule": "two_shot"}
    )


def ahead_with_a_new_call(rank, world):
    """The second call is compared first."""
    ahead(rank, world, {"codec": "int8/256", "schedule": SHARD}, {"codec": "fp32", "schedule": SHARD})


def ahead_with_an_agreement(rank, world):
    """The second call agrees on a scale first."""
    ahead(rank, world, {"codec": "int8/256", "schedule": SHARD}, {"codec": "aps/e5m2", "schedule": SHARD})


def ahead_with_a_sum(rank, world):
    """The second is added by the network."""
    ahead(rank, world, {"codec": "int8/256", "schedule": "ring"}, {"codec": "fp32", "schedule": "native"})


def waits_at_other_places(rank, world):
    """One rank waits for the first call before it makes the second."""
    good(world, 999, schedule="ring")
    good(world, 888, schedule="ring")
    first, second = torch.ones(999), torch.ones(888)
    work = thinwire.all_reduce(first, "int8/256", schedule="ring", async_op=True)
    if rank == 1:
        work.wait()
    thinwire.all_reduce(second, "int8/256", schedule="ring", async_op=True).wait()
    work.wait()
    assert first.eq(world).all()
    assert second.eq(world).all()


def compiled(rank, world):
    """Collectives in a function that is compiled: torch.compile leaves them as they are."""

    def step(x):
        y = x * 2
        thinwire.all_reduce(y, "int8/256", "avg")
        return thinwire.functional.all_reduce(y + 1, "int8/256", "sum") - y

    x = torch.randn(1000, generator=torch.Generator().manual_seed(rank))
    wanted, fast = step(x), torch.compile(step, backend="eager")
    for _ in range(3):
        assert torch.equal(fast(x), wanted)
    del world


def called_back(rank, world):
    """A callback that blocks would wait for itself; one that does not is fine."""
    good(world)
    if rank == 0:
        time.sleep(0.3)  # so that others have said what comes next before the call is done
    x = torch.ones(999)
    future = thinwire.all_reduce(x, "int8/256", async_op=True).get_future()
    if rank:
        future.then(lambda _: raises(CommError, "use async_op=True", good, world)).wait()
    future.wait()
    then = future.then(lambda _: thinwire.all_reduce(x, "int8/256", async_op=True))
    assert then.wait().wait()
    assert x.eq(world**2).all()


# What is refused


def not_finite(rank, world):
    """NaN and infinity of one rank reach all."""
    for schedule in ("one_shot", "two_shot", "ring", "tree", "hierarchical/3", "native"):
        for bad in (float("nan"), float("inf")):
            x = torch.ones(1000)
            if rank == 1:
                x[500] = bad
            codec = "fp32" if schedule == "native" else "int8/256"
            thinwire.all_reduce(x, codec, schedule=schedule)
            assert not x[500].isfinite(), (schedule, bad, x[500])
            x = torch.ones(1000)
            thinwire.all_reduce(x, codec, schedule=schedule)
            assert x.eq(world).all()


def refused(rank, world):
    """Arguments that cannot be; the group goes on."""
    for x, text in (
        (torch.ones(3, dtype=torch.int32), "expected float32, bfloat16 or float16, got torch.int32"),
        (torch.ones(3, dtype=torch.float64), "got torch.float64"),
        (torch.ones(3, device="meta"), "on meta"),
        (torch.ones(3).to_sparse(), "dense"),
        ([1.0, 2.0], "expected a torch.Tensor, got float"),
        ([], "empty list"),
        ([torch.ones(3), torch.ones(3).half()], "one dtype"),
        (None, "expected a tensor, or a list of them, got NoneType"),
        (torch.ones(4).expand(3, 4), "expanded or negated; pass x.clone()"),
        (torch.ones(4, dtype=torch.complex64).conj().imag, "expanded or negated; pass x.clone()"),
    ):
        raises(InputError, text, thinwire.all_reduce, x, "int8/256")
    for name in (None, 3, [["a"]], {"a": 1}, [3], b"x", []):
        for codec in ("int8/256", thinwire.Channel("onebit/64+ef")):
            raises(InputError, "name must be a string", thinwire.all_reduce, torch.ones(4), codec, name=name)
        raises(InputError, "name must be a string", thinwire.broadcast, torch.ones(4), 0, "fp32", name=name)
    raises(UnknownCodecError, "a codec must be a spec", thinwire.all_reduce, torch.ones(4), [])
    raises(InputError, "got NoneType", thinwire.all_gather, None, torch.ones(3), "fp32")
    exchange = partial(thinwire.all_to_all, torch.ones(4), torch.ones(4), "fp32", None)
    for sizes in ((2.0, 2.0, 0.0), "abc", 4, [-1, 4, 1], [4], [None] * 3):
        raises(InputError, "whole numbers that add up to 4", exchange, sizes)
    raises(InputError, "cannot share evenly", thinwire.reduce_scatter, torch.ones(3), torch.ones(10), "fp32")
    raises(InputError, "output has 4", thinwire.reduce_scatter, torch.ones(4), torch.ones(9), "fp32")
    raises(
        InputError,
        "one tensor for each of 3",
        thinwire.all_gather,
        [torch.ones(3)] * 2,
        torch.ones(3),
        "fp32",
    )
    raises(InputError, "src must be one of", thinwire.broadcast, torch.ones(4), 3, "fp32")
    raises(InputError, "cannot send to itself", thinwire.send, torch.ones(4), rank, "fp32")
    raises(InputError, "op must be", thinwire.all_reduce, torch.ones(4), "fp32", op="max")
    good(world)


OTHER = "another name, or forget the slot first"


def reused(rank, world):
    """A name that has a residual, and a tensor of another size: all ranks are told, and the group goes on."""
    del rank
    ways = [
        ("onebit/64+ef", schedule) for schedule in ("one_shot", "two_shot", "ring", "tree", "hierarchical/1")
    ]
    ways += [("fp32+ef", "low_rank/2"), ("aps/e4m3+ef", "two_shot"), ("bf16+ef", "accumulate/sequential")]
    for codec, schedule in ways:
        channel, errors = thinwire.Channel(codec), []
        for loaded in (False, True):
            for options in ({}, {"async_op": True}):
                work = thinwire.all_reduce(torch.ones(30, 40), channel, schedule=schedule, **options)
                assert work is None or work.wait()
                before = {slot: each.clone() for slot, each in channel.residuals.items()}

                def call(shape=(30, 50), options=options, channel=channel, schedule=schedule):
                    work = thinwire.all_reduce(torch.ones(shape), channel, schedule=schedule, **options)
                    return work.wait() if work else None

                # What was loaded does not say of what size the tensor was: here slots tell, and on all ranks
                if not loaded or schedule in ("one_shot", "two_shot", "low_rank/2", "accumulate/sequential"):
                    errors.append(raises(InputError, OTHER, call))
                assert channel.residuals.keys() == before.keys()
                assert all(torch.equal(each, before[slot]) for slot, each in channel.residuals.items())
                good(world), good(world, 1234, schedule="ring", async_op=False)
                call((30, 40))
            state = channel.state_dict()
            channel.load_state_dict(state)
        assert errors
    channel, x = thinwire.Channel("onebit/64+ef"), torch.ones(999)
    thinwire.all_reduce(x, channel, schedule="two_shot")
    text = ["has a residual of schedule two_shot, which ring would not send", OTHER]
    raises(InputError, text, thinwire.all_reduce, x, channel, schedule="ring")
    good(world)
    thinwire.all_reduce(x, channel, schedule="two_shot")
    two = thinwire.Channel("onebit/64+ef")
    options = {"name": "two", "async_op": True}
    for _ in range(20):  # refused when it is made, whatever has begun by then on this rank
        first = thinwire.all_reduce(torch.ones(100), two, **options)
        raises(InputError, OTHER, thinwire.all_reduce, torch.ones(101), two, **options)
        third = thinwire.all_reduce(torch.ones(100), two, **options)
        assert first.wait()
        assert third.wait()
        two.forget()
    good(world)


def reused_elsewhere(rank, world):
    """The same for other collectives, and for messages."""
    channel = thinwire.Channel("onebit/64+ef")
    for numel, other in ((100, 101), (100, 99)):
        x, y = torch.ones(numel), torch.ones(other)
        many, more = torch.ones(world * numel), torch.ones(world * other)
        for call in (
            lambda x, _: thinwire.broadcast(x, 1, channel, name="broadcast"),
            lambda x, many: thinwire.all_gather(many, x, channel, name="gather"),
            lambda x, many: thinwire.reduce_scatter(x, many, channel, name="scatter"),
        ):
            call(x, many)
            raises(InputError, OTHER, call, y, more)
            call(x, many)
            good(world)
    for slot in ("broadcast", "broadcast/sent"):
        channel.forget(slot)
    thinwire.broadcast(torch.ones(101), 1, channel, name="broadcast")
    right, left = (rank + 1) % world, (rank - 1) % world
    ears = thinwire.Channel("onebit/64+ef")
    for numel in (50, 60, 50):  # the second is refused where it is sent, so nobody waits for it
        if numel == 60:
            channel.load_state_dict(channel.state_dict())  # then it is found out when it is encoded
            raises(InputError, OTHER, thinwire.isend, torch.ones(60), right, channel, name="letter")
            raises(InputError, OTHER, thinwire.send, torch.ones(60), right, channel, name="letter")
            continue
        room = torch.zeros(numel)
        coming = thinwire.irecv(room, left, ears, name="letter")
        going = thinwire.isend(torch.ones(numel), right, channel, name="letter")
        assert coming.wait()
        assert going.wait()
        assert room.eq(1).all()
    good(world)


def not_a_member(rank, world):
    group = dist.new_group([0, 1])
    if rank == 2:
        raises(CommError, "not in the group", thinwire.all_reduce, torch.ones(3), "int8/256", group=group)
    else:
        x = torch.ones(300)
        thinwire.all_reduce(x, "int8/256", group=group)
        assert x.eq(2).all()
        raises(InputError, "dst must be one of the group's ranks", thinwire.send, x, 2, "fp32", group=group)
    good(world)


def in_a_child(rank, world, text):
    """Where the group belongs to the parent, a forked child is told so; the parent goes on."""
    child = multiprocessing.get_context("fork").Process(target=raises, args=(CommError, text, good, world))
    child.start()
    child.join(LATE_S)
    assert child.exitcode == 0, f"the child of rank {rank}: {child.exitcode}"
    good(world)


def forked(rank, world):
    good(world)
    in_a_child(rank, world, "forked after the group was made")


def forked_before_any_call(rank, world):
    in_a_child(rank, world, "forked after the group was made")


def no_group(rank, world):
    dist.destroy_process_group()
    raises(CommError, ["no process group", "init_process_group", "torchrun"], good, rank + world)


KILLED = {
    "killed_before": Scenario(killed_before, dead=(2,)),
    "killed_first": Scenario(killed_first, dead=(0,)),
    "frozen_first": Scenario(frozen_first, dead=(0,), within_s=LATE_S + 6),
    "killed_between": Scenario(killed_between, dead=(2,)),
    "killed_during": Scenario(killed_during, dead=(2,), within_s=LATE_S + 5),
    "killed_during_sum": Scenario(killed_during_sum, dead=(1,), within_s=LATE_S + 5),
    "late_to_a_sum": Scenario(late_to_a_sum, within_s=LATE_S + 3),
    "killed_before_a_sum": Scenario(killed_before_a_sum, dead=(2,)),
    "told_by_another": Scenario(told_by_another, dead=(2,), within_s=SOON_S + 2),
    "killed_in_a_smaller_group": Scenario(killed_in_a_smaller_group, dead=(2,)),
    "letter_to_the_dead": Scenario(letter_to_the_dead, world=2, dead=(1,)),
    "letter_on_its_way": Scenario(letter_on_its_way, world=2, dead=(1,)),
}
TRAINING = {
    f"killed_in_training_{recipe}": Scenario(
        partial(killed_in_training, recipe=recipe), 3 if recipe == "fp32" else 2, (1,), 2 * LATE_S
    )
    for recipe in ("fp32", "fp16", "int8", "onebit", "powersgd", "auto", "hook", "detached")
}
DISAGREE = {
    each.__name__: Scenario(each)
    for each in (
        other_codec, other_own_codec, other_schedule, other_size, other_size_async, other_dtype, other_node,
        sums_or_not, sums_or_not_async, swapped_new, swapped_names, swapped_names_elsewhere, swapped, uneven,
        attached_differently,
    )
}  # fmt: skip
DISAGREE["swapped_checked"] = Scenario(swapped_checked, within_s=SOON_S, debug=True)
DISAGREE["letter_of_another_size"] = Scenario(letter_of_another_size, world=2)
DISAGREE["swapped_letters"] = Scenario(swapped_letters, world=2)
for sizes, codec in (((500, 500), "fp32"), ((1000, 200_000), "fp32"), ((500, 600), "fp16")):
    DISAGREE[f"swapped_sums_{codec}_{sizes[1]}"] = Scenario(partial(swapped_sums, sizes=sizes, codec=codec))
ENDS = {
    each.__name__: Scenario(each)
    for each in (
        destroyed, destroyed_by_all, left_behind, made_again, not_finite, refused,
        not_a_member, forked,
        forked_before_any_call, no_group,
    )
}  # fmt: skip
STEPS = {
    each.__name__: Scenario(each)
    for each in (
        thousand, ahead_on_a_ring, ahead_on_a_tree, ahead_with_a_new_call, ahead_with_an_agreement,
        ahead_with_a_sum, waits_at_other_places, called_back, compiled, reused_elsewhere,
    )
}  # fmt: skip
STEPS["reused"] = Scenario(reused, within_s=3 * LATE_S)
FAMILIES = {"killed": KILLED, "training": TRAINING, "disagree": DISAGREE, "ends": ENDS, "steps": STEPS}


def one_rank(name, scenario, rank, places):
    if scenario.debug:
        os.environ["THINWIRE_DEBUG"] = "1"
    os.environ["SECOND_PLACE"] = places[1]
    join(rank, scenario.world, places[0], TIMEOUT_S)
    began, wrong = time.monotonic(), ""
    try:
        scenario.run(rank, scenario.world)
    except BaseException:  # noqa: BLE001
        wrong = traceback.format_exc()
    seconds = time.monotonic() - began
    if not wrong and seconds > scenario.within_s:
        wrong = f"took {seconds:.1f} s"
    report(scenario=name, rank=rank, wrong=wrong, seconds=round(seconds, 2))
    if name not in ENDS:  # the end of a program takes a second of its own
        stay(scenario, rank, Path(places[0]))
        os._exit(0)


def stay(scenario, rank, place):
    """Until all that survive have been told: a rank that leaves early is gone too, to one that is late."""
    place.with_name(f"told-{rank}").touch()
    alive = [place.with_name(f"told-{each}") for each in range(scenario.world) if each not in scenario.dead]
    end = time.monotonic() + 2 * LATE_S
    while not all(each.exists() for each in alive) and time.monotonic() < end:
        time.sleep(0.02)


def warm_up():
    """Load compiled loops, and what DDP imports, once, before ranks are forked."""
    import torch._dynamo

    for codec in ("int8/256", "int4/128", "fp32", "aps/e5m2", "onebit/64", "aps/e4m3", "bf16"):
        for schedule in ("one_shot", "two_shot", "ring"):
            local.all_reduce([torch.ones(999) for _ in range(2)], codec, schedule=schedule)


def main(family, *only):
    torch.set_num_threads(1)
    warm_up()
    wanted = {name: each for name, each in FAMILIES[family].items() if not only or name in only}
    report(scenarios={name: [each.world, list(each.dead)] for name, each in wanted.items()})
    places = {name: (meeting(), meeting()) for name in wanted}
    gc.freeze()  # or the end of every rank looks through all that was imported, for a second
    pids = {
        (name, rank): fork(one_rank, name, each, rank, places[name])
        for name, each in wanted.items()
        for rank in range(each.world)
    }
    ended = statuses(list(pids.values()), time.monotonic() + 50)
    for place in itertools.chain(*places.values()):
        shutil.rmtree(Path(place).parent, ignore_errors=True)
    for (name, rank), status in zip(pids, ended, strict=True):
        report(scenario=name, rank=rank, status=status)


if __name__ == "__main__":
    main(*sys.argv[1:])
