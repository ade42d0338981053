"""What ranks over gloo do: calls, compared bit for bit with ranks in one process.

    python gloo_program.py fork 3         # the checks of the test, on three ranks made by fork
    python gloo_program.py spawn 3 full   # every schedule with every codec

Every rank reports every check: what went wrong ("" if nothing), and a digest of the result where all ranks
must hold the same bits.
"""

import functools
import sys
import time
import traceback
import zlib

import own_codec
import torch
import torch.distributed as dist
from start_program import digest, join, raises, report, start

import thinwire
import thinwire.collectives  # before ranks are forked
from thinwire import codecs, functional
from thinwire.channel import Channel
from thinwire.codecs import CODECS
from thinwire.errors import CommError
from thinwire.rounding import Stream
from thinwire.runtimes import arguments, job, local, plan
from thinwire.schedules import SCHEDULES
from thinwire.schedules import get as get_schedule

TIMEOUT_S = 30
SHAPE = 11, 101  # an odd number of elements, and a matrix for those who see one
COVERING = (
    "fp32", "bf16", "int8/256", "int4/128~sr", "qsgd4/512", "aps/e5m2", "nvfp4", "topk/0.01+ef",
    "onebit/column+ef",
)  # fmt: skip
DTYPES = torch.bfloat16, torch.float16
BIG = plan.PIECE * job.WINDOW + 77  # more pieces than are in flight at a time
PIECES = ("native", False), ("one_shot", True), ("two_shot", True), ("two_shot", False), ("ring", False)
INT8 = codecs.get("int8/256")


def specs(world):
    """Schedules for so many ranks: nodes are of as many ranks as divide the world."""
    node = max(each for each in range(1, max(world // 2, 1) + 1) if world % each == 0)
    for spec in SCHEDULES:
        if get_schedule(spec).ranks_per_node == 1:
            yield spec
        else:
            name, _, option = spec.partition("/")
            yield f"{name}/{node}{option[1:]}"
            yield f"{name}/{world}{option[1:]}"


def grid(world, wanted):
    """Pairs of a schedule and a codec that go together."""
    for spec in dict.fromkeys(specs(world)):
        for codec in wanted:
            if not get_schedule(spec).refuses(codecs.get(codec).for_shape(SHAPE)):
                yield spec, codec


def served(spec):
    """A codec for a schedule."""
    return next(
        codec
        for codec in ("int8/256", "topk/0.01+ef", "aps/e5m2", "fp32")
        if not get_schedule(spec).refuses(codecs.get(codec))
    )


def checks(world, full=False):
    """Checks by name. Every second one does not wait for the first call before it makes the next."""
    by_name = {}
    for i, (spec, codec) in enumerate(grid(world, CODECS if full else COVERING)):
        by_name[f"{spec} {codec}"] = functools.partial(bits, spec, codec, waits=bool(i % 2))
    for codec in () if full or world == 1 else CODECS:
        by_name[f"auto {codec}"] = functools.partial(bits, "auto", codec, waits=False)
    for i, spec in enumerate(dict.fromkeys(specs(world))):
        codec = served(spec)
        for shape in ((0,), (1,), (7,)):
            by_name[f"{spec} {shape[0]} elements"] = functools.partial(bits, spec, codec, shape=shape)
        dtype = DTYPES[i % 2]
        by_name[f"{spec} {dtype}"] = functools.partial(bits, spec, codec, dtype=dtype, waits=False)
    for spec, waits in PIECES:
        codec = "bf16" if spec == "native" else "int8/256"
        name = f"{spec} pieces {'sync' if waits else 'async'}"
        by_name[name] = functools.partial(bits, spec, codec, shape=(BIG,), waits=waits)
    for each in (
        mean, strided, bucket, buckets, auto, nodes, subgroups, scattered, gathered, exchanged, fed_back,
        broadcasts, message_counts, noise, twins, guests, work, own_group_of_one, again, own_codecs,
    ):  # fmt: skip
        by_name[each.__name__] = each
    return by_name


def made(world, seed, shape=SHAPE, dtype=torch.float32):
    """Every rank's tensor, the same in every process."""
    generator = torch.Generator().manual_seed(zlib.crc32(seed.encode()))
    return [torch.randn(shape, generator=generator).to(dtype) for _ in range(world)]


def same(actual, expected, near=0.0, scale=1e-30):
    """That it is what it should be, or as near to it as sums of a network are, of numbers of that scale."""
    for x, good in zip(actual, expected, strict=True):
        assert x.dtype == good.dtype
        assert x.shape == good.shape
        if near:
            error = (x.double() - good.double()).norm() / max(good.double().norm().item(), scale)
            assert error <= near, f"relative error {error:.3g}"
        else:
            assert digest([x]) == digest([good]), "differs from local ranks"


def bits(spec, codec, rank, world, shape=SHAPE, dtype=torch.float32, *, waits=True):
    """Two calls with the same channel, so that residuals count."""
    own, everyone = Channel(codec), [Channel(codec) for _ in range(world)]
    chosen = arguments.schedule_of(spec, codecs.get(codec).for_shape(shape), 1, world)
    coarse = (
        [torch.finfo(each).eps for each in (codecs.get(codec).torch_dtype, dtype)] if chosen.adds else [0.0]
    )
    near = 4 * max(coarse)
    digests, works = [], []
    inputs = [made(world, f"{spec} {codec} {shape} {dtype} {step}", shape, dtype) for step in range(2)]
    for step, each in enumerate(inputs):
        digests.append(each[rank].clone())
        rng = Stream(1, step=step)
        works.append(thinwire.all_reduce(digests[-1], own, schedule=spec, rng=rng, async_op=not waits))
    for each in works:
        assert each is None or each.wait()
    if rank == 0:
        for step, each in enumerate(inputs):
            scale = max(x.double().norm().item() for x in each) or 1.0
            local.all_reduce(
                each,
                everyone,
                schedule=spec,
                rng=Stream(1, step=step),
                ranks_per_node=chosen.ranks_per_node or 1,
            )
            same(digests[step : step + 1], each[:1], near if world > 2 else 0.0, scale)
    return digests


def sent(x):
    """What others see of a vector."""
    return INT8.decode(INT8.encode(x.reshape(-1).float()), x.numel()).view(x.shape)


def total(parts):
    """The sum of wires, in the order of ranks."""
    wires = [INT8.encode(x.reshape(-1)) for x in parts]
    summed = INT8.decode(wires[0], parts[0].numel())
    for wire in wires[1:]:
        INT8.decode_add(wire, summed)
    return summed.view(parts[0].shape)


def mean(rank, world):
    expected = made(world, "mean")
    x = expected[rank].clone()
    thinwire.all_reduce(x, "e5m2/128", op=dist.ReduceOp.AVG)
    local.all_reduce(expected, "e5m2/128", op="avg")
    same([x], [expected[0]] if world > 1 else [made(1, "mean")[0]])
    return [x]


def strided(rank, world):
    """Not contiguous: transposed, and every third column of a larger tensor."""
    expected = made(world, "strided")
    turned, wide = expected[rank].clone().t(), torch.zeros(11, 303)
    wide[:, ::3] = expected[rank]
    works = [
        thinwire.all_reduce(x, "int8/256", schedule="two_shot", async_op=True) for x in (turned, wide[:, ::3])
    ]
    assert all(each.wait() for each in works)
    flipped = [x.t().contiguous() for x in expected]
    local.all_reduce(flipped, "int8/256", schedule="two_shot")
    local.all_reduce(expected, "int8/256", schedule="two_shot")
    same([turned.contiguous(), wide[:, ::3].contiguous()], [flipped[0], expected[0]])
    assert wide[:, 1::3].eq(0).all()
    return [turned.contiguous(), wide]


def bucket(rank, world, codec="int8/256", schedule="auto", waits=True, largest=plan.PIECE + 5):
    """Several tensors in one call."""
    sizes = (7, 1000, 0, 333, largest, 1, 64)
    rows = [made(world, f"bucket {i}", (size,)) for i, size in enumerate(sizes)]
    expected = [[row[each] for row in rows] for each in range(world)]
    mine = [x.clone() for x in expected[rank]]
    work = thinwire.all_reduce(mine, codec, schedule=schedule, rng=Stream(2), async_op=not waits)
    assert work is None or work.wait()
    local.all_reduce(expected, codec, schedule=schedule, rng=Stream(2))
    same(mine, expected[0])
    return mine


def buckets(rank, world):
    """Of every kind, with and without waiting."""
    digests = []
    for i, (codec, schedule) in enumerate(
        (
            ("aps/e5m2", "two_shot"),
            ("int4/128~sr", "ring"),
            ("int8/256", "tree"),
            ("int8/256", f"hierarchical/{world}"),
        )
    ):
        digests += bucket(rank, world, codec, schedule, waits=bool(i % 2), largest=5000)
    return digests


def auto(rank, world):
    """What is chosen is what `explain` says."""
    x, named = made(world, "auto", (100_000,))[rank], made(world, "auto", (100_000,))[rank]
    thinwire.all_reduce(x, "int4/128")
    thinwire.all_reduce(named, "int4/128", schedule=thinwire.explain(named, "int4/128").schedule)
    same([x], [named])
    return [x]


def nodes(rank, world):
    """Schedules of two levels without a number find that all ranks are on one machine."""
    x, named = made(world, "nodes")[rank], made(world, "nodes")[rank]
    thinwire.all_reduce(x, "int8/256", schedule="hierarchical")
    thinwire.all_reduce(named, "int8/256", schedule=f"hierarchical/{world}")
    same([x], [named])
    return [x]


def subgroups(rank, world):
    """Some ranks, whose places in the group are not their global ranks; all ranks make all groups."""
    digests = []
    for members in ([0, world - 1], list(range(world - 1, -1, -1)), list(range(1, world))):
        members = list(dict.fromkeys(members))
        group = dist.new_group(members) if members else None
        if rank not in members:
            continue
        ranks = dist.get_process_group_ranks(group)
        expected = made(world, f"subgroup {members}")
        x, y = expected[rank].clone(), expected[rank].clone()
        work = thinwire.all_reduce(x, "int8/256", group=group, schedule="ring", async_op=True)
        thinwire.all_reduce(y, "fp32", group=group)
        work.wait()
        among = [expected[each].clone() for each in ranks]
        local.all_reduce(among, "int8/256", schedule="ring")
        same([x], [among[0]])
        same([y], [sum(expected[each] for each in ranks)], 1e-5)
        z = expected[rank].clone()
        thinwire.broadcast(z, ranks[-1], "int8/256", group=group)
        same([z], [sent(expected[ranks[-1]]) if len(ranks) > 1 else expected[rank]])
        if len(ranks) > 1 and rank in (ranks[0], ranks[-1]):
            if rank == ranks[0]:
                thinwire.send(expected[rank], ranks[-1], "int8/256", group=group)
            else:
                got = torch.zeros(SHAPE)
                thinwire.recv(got, ranks[0], "int8/256", group=group)
                same([got], [sent(expected[ranks[0]])])
    return digests


def scattered(rank, world):
    """reduce_scatter: of a tensor, and of an uneven list."""
    whole = made(world, "scattered", (world * 5, 13))
    out = torch.full((5, 13), 9.0)
    thinwire.reduce_scatter(out, whole[rank].clone(), "int8/256")
    good = [x[rank * 5 : rank * 5 + 5] for x in whole]
    same([out], [total(good) if world > 1 else whole[0]])
    sizes = [300 * place % 700 for place in range(world)]
    rows = [[x[:size] for size in sizes] for x in made(world, "uneven", (700,))]
    out = torch.full((sizes[rank],), 9.0)
    assert thinwire.reduce_scatter(out, rows[rank], "int8/256", async_op=True).wait()
    if sizes[rank]:
        same([out], [total([row[rank] for row in rows]) if world > 1 else rows[0][0]])
    low = torch.zeros(4, dtype=torch.bfloat16)
    thinwire.reduce_scatter(low, torch.ones(4 * world, dtype=torch.bfloat16), "int8/256", op="avg")
    same([low], [torch.ones(4, dtype=torch.bfloat16)])
    much = torch.zeros(5000)  # wires of so many elements are added up one by one
    thinwire.reduce_scatter(much, torch.ones(5000 * world), "int8/256", op="avg")
    same([much], [torch.ones(5000)])


def gathered(rank, world):
    """all_gather: into a tensor, and into an uneven list; one's own part is what others see."""
    parts = made(world, "gathered", (3, 50))
    out = torch.zeros(world * 3, 50)
    thinwire.all_gather(out, parts[rank], "int8/256")
    expected = torch.cat([sent(x) if world > 1 else x for x in parts])
    same([out], [expected])
    sizes = [(300 * place + 1) % 701 if place != 1 else 0 for place in range(world)]
    outs = [torch.zeros(size) for size in sizes]
    own = made(world, "uneven", (701,))
    assert thinwire.all_gather(outs, own[rank][: sizes[rank]], "int8/256", async_op=True).wait()
    for x, size, got in zip(own, sizes, outs, strict=True):
        if size:
            same([got], [sent(x[:size]) if world > 1 else x[:size]])
    return [out, *outs]


def exchanged(rank, world):
    """all_to_all: lists of any sizes, tensors, split sizes."""
    sizes = [[31 * (one + 2 * other) % 97 for other in range(world)] for one in range(world)]
    everyone = [
        [made(1, f"{one} to {other}", (n,))[0] for other, n in enumerate(row)]
        for one, row in enumerate(sizes)
    ]
    seen = [[sent(x) if world > 1 and x.numel() else x for x in row] for row in everyone]
    came = [torch.full((row[rank],), 9.0) for row in sizes]
    thinwire.all_to_all(came, everyone[rank], "int8/256")
    same(came, [row[rank] for row in seen])
    joined, room = torch.cat(everyone[rank]), torch.full((sum(row[rank] for row in sizes),), 9.0)
    work = thinwire.all_to_all(
        room, joined, "int8/256", [row[rank] for row in sizes], sizes[rank], async_op=True
    )
    assert work.wait()
    same([room], [torch.cat([row[rank] for row in seen])])
    even = made(world, "even", (world, 40))
    room = torch.zeros(world, 40)
    thinwire.all_to_all(room, even[rank], "int8/256")
    same([room], [torch.stack([sent(x[rank]) if world > 1 else x[rank] for x in even])])


def fed_back(rank, world):
    """all_to_all with feedback: the residual for one rank is not sent to another."""
    if world == 1:
        return
    channel, sizes = Channel("onebit/64+ef"), [(100, 100, 170, 40)[place % 4] for place in range(world)]
    sources = [Channel("onebit/64+ef") for _ in range(world)]
    for step in range(3):
        given = [made(1, f"{rank} to {other} {step}", (n,))[0] for other, n in enumerate(sizes)]
        came = [torch.zeros(sizes[rank]) for _ in range(world)]
        thinwire.all_to_all(came, given, channel)
        for one, (source, got) in enumerate(zip(sources, came, strict=True)):
            x = made(1, f"{one} to {rank} {step}", (sizes[rank],))[0]
            same([got], [source.codec.decode(source.encode(x, "sent"), x.numel())])


def broadcasts(rank, world):
    """From every rank, in every dtype."""
    digests = []
    for i, src in enumerate([*range(world), 0]):
        dtype = (torch.float32, *DTYPES)[i % 3]
        parts = made(world, f"broadcast {src}", SHAPE, dtype)
        x = parts[rank].clone()
        work = thinwire.broadcast(x, src, "int8/256", async_op=bool(i % 2))
        assert work is None or work.wait()
        same([x], [sent(parts[src]).to(dtype) if world > 1 else parts[src]])
        digests.append(x)
    return digests


def message_counts(rank, world):
    """Messages around a ring, past an outstanding call; several to one rank; both ways at once."""
    if world == 1:
        return
    right, left = (rank + 1) % world, (rank - 1) % world
    parts = made(world, "message_counts")
    x, got = torch.ones(5), [torch.zeros(SHAPE) for _ in range(20)]
    if rank != 0:
        work = thinwire.all_reduce(x, "int8/256", async_op=True)
    going = [thinwire.isend(parts[rank] * (i + 1), right, "int8/256") for i in range(20)]
    coming = [thinwire.irecv(room, left, "int8/256") for room in got]
    if rank == 0:
        work = thinwire.all_reduce(x, "int8/256", async_op=True)
    for each in (*coming, *going):
        assert each.wait()
        assert each.is_completed()
    same(got, [sent(parts[left] * (i + 1)) for i in range(20)])
    assert work.wait()
    assert x.eq(world).all()
    if rank == 0:
        thinwire.send(parts[0].half(), world - 1, "bf16")
    if rank == world - 1:
        room = torch.zeros(SHAPE, dtype=torch.float16)
        thinwire.recv(room, 0, "bf16")
        same([room], [parts[0].half().float().bfloat16().float().half()])


def noise(rank, world):
    """Without a stream every call and every message draws anew, and every rank apart."""
    if world == 1:
        return None
    right, left = (rank + 1) % world, (rank - 1) % world
    x, digests, heard = made(1, "noise")[0], [], []
    for _ in range(4):
        digests.append(x.clone())
        thinwire.all_reduce(digests[-1], "qsgd4/512", schedule="one_shot")
    for _ in range(4):
        heard.append(torch.zeros(SHAPE))
        coming, going = thinwire.irecv(heard[-1], left, "qsgd4/512"), thinwire.isend(x, right, "qsgd4/512")
        assert coming.wait()
        assert going.wait()
    assert len({digest([each]) for each in digests}) == 4
    everyone = [torch.zeros(4, *SHAPE) for _ in range(world)]
    dist.all_gather(everyone, torch.stack(heard))
    assert len({digest([each]) for part in everyone for each in part}) == 4 * world
    return digests


def twins(rank, world):
    """The functional ones leave their inputs as they are."""
    parts = made(world, "twins", (world, 60))
    x = parts[rank].clone()
    reduced = functional.all_reduce(x, "int8/256", op="avg", schedule="two_shot")
    shard = functional.reduce_scatter(x, "int8/256")
    stacked = functional.all_gather(x, "int8/256")
    heard = functional.broadcast(x, world - 1, "int8/256")
    same([x], [parts[rank]])
    y, out, room = x.clone(), torch.zeros_like(shard), torch.zeros(world * world, 60)
    thinwire.all_reduce(y, "int8/256", op="avg", schedule="two_shot")
    thinwire.reduce_scatter(out, x, "int8/256")
    thinwire.all_gather(room, x, "int8/256")
    same([reduced, shard, stacked.view(-1, 60)], [y, out, room])
    same([heard], [sent(parts[-1]) if world > 1 else parts[-1]])
    return [reduced, stacked, heard]


def guests(rank, world):
    """The user's own collectives on the same group, in between."""
    works, digests = [], []
    for i in range(6):
        x, own = torch.full((300_000,), 1.0), torch.full((1000,), float(rank))
        schedule, codec = (("two_shot", "int8/256"), ("ring", "int8/256"), ("native", "fp32"))[i % 3]
        works.append(thinwire.all_reduce(x, codec, schedule=schedule, async_op=True))
        theirs = dist.all_reduce(own, async_op=True)
        dist.barrier()
        again = torch.full((10,), float(rank))
        dist.broadcast(again, world - 1)
        theirs.wait()
        assert own.eq(world * (world - 1) / 2).all()
        assert again.eq(world - 1).all()
        digests.append(x)
    assert all(each.wait() for each in works)
    assert all(x.eq(world).all() for x in digests)
    return digests


def work(rank, world):
    """What a caller holds while a call is under way."""
    x = torch.ones(1000)
    if rank == 0 and world > 1:
        held = thinwire.all_reduce(x, "int8/256", async_op=True)
        raises(CommError, "not done within 0.05 s", held.wait, 0.05)
        assert not held.is_completed()
        assert held.exception() is None
        dist.barrier()
    else:
        dist.barrier()
        held = thinwire.all_reduce(x, "int8/256", async_op=True)
    after = held.get_future().then(lambda future: future.value()[0].sum().item())
    assert held.wait(timeout=20)
    assert held.wait()
    assert held.is_completed()
    assert held.exception() is None
    assert after.wait() == 1000 * world
    assert held.get_future().wait()[0] is x
    return [x]


def own_group_of_one(rank, world):
    """In a group of one rank nothing changes."""
    groups = [dist.new_group([each]) for each in range(world)]
    x = made(1, f"alone {rank}")[0]
    before = x.clone()
    for schedule in ("auto", "two_shot", "ring", "tree", "one_shot", "hierarchical"):
        thinwire.all_reduce(x, "int4/128", group=groups[rank], schedule=schedule)
    thinwire.all_reduce(x, "fp32", group=groups[rank], op="avg", async_op=True).wait()
    thinwire.broadcast(x, rank, "int4/128", group=groups[rank])
    out = torch.zeros(SHAPE)
    thinwire.all_gather(out, x, "int4/128", group=groups[rank])
    thinwire.reduce_scatter(x, out, "int4/128", group=groups[rank])
    thinwire.all_to_all([x], [out], "int4/128", group=groups[rank])
    same([x], [before])


def again(rank, world):
    """The same call many times, with and without waiting: numbers of calls come round again."""
    digests = []
    for i in range(40):
        x = torch.full((300,), float(rank + i))
        held = thinwire.all_reduce(x, "fp32", schedule="two_shot", async_op=bool(i % 3))
        digests.append((x, held))
    for i, (x, held) in enumerate(digests):
        assert held is None or held.wait()
        assert x.eq(world * i + world * (world - 1) / 2).all()
    return [x for x, _ in digests]


def own_codecs(rank, world):
    """Codecs and formats of users, as they are: the bits of local ranks, and of the same numbers by name."""
    given = own_codec.mine(), own_codec.block(), own_codec.Steps()
    results = []
    for codec in given:
        for schedule in ("one_shot", "two_shot", "ring"):
            everyone = made(world, f"own {schedule}")
            x = everyone[rank].clone()
            for _ in range(2):  # the second is known
                thinwire.all_reduce(y := x.clone(), codec, "avg", schedule=schedule)
            local.all_reduce(everyone, codec, "avg", schedule)
            same([y], everyone[rank : rank + 1])
            results.append(y)
    by_name = made(world, "own two_shot")[rank]
    thinwire.all_reduce(by_name, "nf4/64", "avg", schedule="two_shot")
    same([by_name], results[4:5])
    x = functional.broadcast(made(world, "own broadcast")[rank], 0, own_codec.mine())
    return [*results, x]


def one_rank(rank, world, place, full):
    join(rank, world, place, TIMEOUT_S)
    began = time.monotonic()
    for name, check in checks(world, full).items():
        wrong, result = "", None
        try:
            result = check(rank, world)
        except BaseException:  # noqa: BLE001
            wrong = traceback.format_exc(limit=-4)[-1500:]
        report(check=name, rank=rank, wrong=wrong, digest=digest(result) if result else "")
    report(seconds=time.monotonic() - began, rank=rank)
    dist.barrier()
    dist.destroy_process_group()


def main(method, world, full=""):
    report(checks=list(checks(int(world), bool(full))))
    codes = start(method, int(world), one_rank, bool(full))
    sys.exit(f"ranks ended with {codes}" if any(codes) else 0)


if __name__ == "__main__":
    main(*sys.argv[1:])
