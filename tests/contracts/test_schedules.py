"""What holds for every schedule with every codec that it serves; a new entry is covered on arrival."""

import dataclasses
import functools
import hashlib
import itertools
import math
import operator
from random import Random
from types import SimpleNamespace

import pytest
import torch

from thinwire import Channel, Stream, codecs, formats, schedules
from thinwire.codecs import CODECS, Cast, MaxMin, OneBit, RandomK, TopK
from thinwire.errors import CodecError, CommError, InputError, ScheduleError
from thinwire.runtimes import arguments, local
from thinwire.runtimes import job as jobs
from thinwire.runtimes import plan as plans
from thinwire.runtimes.group_runtime import ranks_per_node
from thinwire.runtimes.trace import trace
from thinwire.schedules import SCHEDULES, AllGather, Buffers, Item, gather
from thinwire.schedules.batch import Batch
from thinwire.schedules.batch_run import BatchRun
from thinwire.schedules.rank_context import Sharding
from thinwire.schedules.reduce import two_shot
from thinwire.schedules.residuals import gradient_residual

WORLDS = (1, 2, 3, 4, 5, 8)
UNIT = 2.0**-24  # half a unit in the last place of float32, relative
FEW = ("fp32", "bf16", "int8/256", "int4/128~sr", "aps/e5m2", "onebit/column+ef", "topk/0.01+ef")
LEARNING = [name for name, codec in CODECS.items() if codec.feedback]
#: A block's numbers follow from it alone (nvfp4 has a factor for the whole vector, besides).
STEADY = {
    name: codec for name, codec in CODECS.items() if not codec.needs_rng and codec.grain and name != "nvfp4"
}

every_schedule = pytest.mark.parametrize("schedule", SCHEDULES.values(), ids=list(SCHEDULES))
moving = pytest.mark.parametrize(
    "schedule", [each for each in SCHEDULES.values() if not each.refuses(codecs.get("int8/256"))],
    ids=operator.attrgetter("spec"),
)  # fmt: skip


def gauss(*shape, seed=0):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def ranks_of(world, *shape, first=0):
    return [gauss(*shape, seed=first + rank) for rank in range(world)]


def in_worlds(*worlds, names=None):
    """Some schedules, by name, in every world that they can serve; without names, every schedule."""
    known = SCHEDULES.values() if names is None else names
    pairs = [(each, n) for each in known for n in worlds if n % schedules.get(each).ranks_per_node == 0]
    return pytest.mark.parametrize(("schedule", "world"), pairs, ids=lambda part: getattr(part, "spec", part))


def served(schedule, world, among=CODECS):
    """The codecs that a schedule serves in a world; without any, a test would check nothing."""
    assert world % schedule.ranks_per_node == 0
    can = [codecs.get(spec) for spec in among if not schedule.refuses(codecs.get(spec))]
    assert can
    return can


def channels(codec, world):
    return [Channel(codec) for _ in range(world)] if codec.feedback else codec


def reduced(ranks, codec, op="sum", schedule="auto", **options):
    """Each rank's result; what came in stays as it is."""
    codec = codecs.get(codec) if isinstance(codec, str) else codec
    if isinstance(codec, codecs.Codec):
        codec = channels(codec, len(ranks))
    results = [[x.clone() for x in each] if isinstance(each, list) else each.clone() for each in ranks]
    local.all_reduce(results, codec, op, schedule, **options)
    return results


def digest(x):
    """Of the bits of a tensor, or of a bucket."""
    tensors = x if isinstance(x, list) else [x]
    hashed = hashlib.sha256()
    for each in tensors:
        hashed.update(each.contiguous().view(torch.uint8).numpy().tobytes())
    return hashed.hexdigest()


def alike(results):
    return len({digest(each) for each in results}) == 1


def total(ranks):
    return sum(x.double() for x in ranks)


def relative_error(result, exact):
    return float((result.double() - exact).norm() / exact.norm())


# All ranks end with the same bits


@in_worlds(*WORLDS)
def test_all_ranks_hold_the_same_bits(schedule, world):
    for codec, (numel, op) in itertools.product(served(schedule, world), ((1000, "avg"), (729, "sum"))):
        ranks = ranks_of(world, numel)
        results = reduced(ranks, codec, op, schedule)
        assert alike(results), codec.spec
        assert bool(torch.stack(results).isfinite().all()), codec.spec
        if world == 1:
            assert digest(results[0]) == digest(ranks[0])


@every_schedule
@pytest.mark.parametrize("numel", [0, 1, 3, 7])
def test_sizes_under_the_world_and_nothing_at_all_go_through(schedule, numel):
    for codec in served(schedule, 8):
        results = reduced(ranks_of(8, numel), codec, "avg", schedule)
        assert alike(results), codec.spec
        assert results[0].shape == (numel,)
        assert bool(results[0].isfinite().all()), codec.spec


@in_worlds(3, 4)
def test_matrices_and_other_shapes_keep_their_shape(schedule, world):
    for codec, shape in itertools.product(served(schedule, world, FEW), ((11, 101), (3, 5, 7), (2, 0, 4))):
        results = reduced(ranks_of(world, *shape), codec, "avg", schedule)
        assert alike(results), codec.spec
        assert results[0].shape == shape


@every_schedule
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision_is_summed_in_float32_and_rounded_once(schedule, dtype):
    for codec in served(schedule, 4, FEW):
        ranks = [x.to(dtype) for x in ranks_of(4, 700)]
        results = reduced(ranks, codec, "avg", schedule, rng=Stream(1))
        wide = reduced([x.float() for x in ranks], codec, "avg", schedule, rng=Stream(1))
        assert alike(results), codec.spec
        assert digest(results[0]) == digest(wide[0].to(dtype)), codec.spec


@every_schedule
def test_tensors_that_are_not_contiguous_are_changed_in_place(schedule):
    for codec in served(schedule, 4, FEW):
        plain = ranks_of(4, 24, 30)
        bases = [torch.zeros(60, 24) for _ in plain]
        views = [base[::2].t() for base in bases]
        for view, x in zip(views, plain, strict=True):
            view.copy_(x)
        local.all_reduce(views, channels(codec, 4), "sum", schedule, rng=Stream(1))
        expected = reduced(plain, codec, "sum", schedule, rng=Stream(1))
        assert digest(views[0]) == digest(expected[0]), codec.spec
        assert alike(views)
        assert not any(bool(base[1::2].any()) for base in bases)  # what lies between is left alone


@moving
def test_tensors_of_several_pieces_stay_equal(schedule):
    numel, world = 2 * plans.PIECE + 1000, 4
    codec = codecs.get("int8/256")
    assert len(list(plans.spans([numel], [codec], schedule))) == 3
    ranks = ranks_of(world, numel)
    results = reduced(ranks, codec, "avg", schedule)
    assert alike(results)
    assert relative_error(results[0], total(ranks) / world) < 0.03


@pytest.mark.parametrize("spec", ["int4/128~sr", "onebit/64+ef", "aps/e4m3", "topk/0.01+ef"])
def test_several_pieces_of_random_and_learning_codecs_stay_equal(spec):
    ranks = ranks_of(3, plans.PIECE + 1000)
    assert alike(reduced(ranks, spec, "avg", "two_shot"))


def test_the_same_stream_gives_the_same_bits_and_another_does_not():
    ranks = ranks_of(3, 1000)
    for schedule in ("one_shot", "two_shot", "ring", "tree"):
        one, again, other = (
            reduced(ranks, "qsgd4/512", "avg", schedule, rng=Stream(seed))[0] for seed in (1, 1, 2)
        )
        assert digest(one) == digest(again)
        assert digest(one) != digest(other)


RANDOM = [
    (spec, schedule)
    for spec in ("int4/128~sr", "qsgd4/512")
    for schedule in ("one_shot", "two_shot", "ring", "tree", "hierarchical/2")
]


@pytest.mark.parametrize(("spec", "schedule"), RANDOM)
def test_every_part_of_a_stream_counts(spec, schedule):
    """Streams that differ in one thing only, whatever it is, draw apart; the rank is the rank's own."""
    ranks = ranks_of(4, 1000)

    def found(**given):
        return digest(reduced(ranks, spec, schedule=schedule, rng=Stream(**{"seed": 1, **given}))[0])

    streams = [{}, {"seed": 2}, {"step": 1}, {"tensor": 1}, {"tensor": "w"}, {"tensor": "tensor"}]
    assert len({found(**given) for given in streams}) == len(streams)
    assert found(rank=3) == found()


@pytest.mark.parametrize(("spec", "schedule"), RANDOM)
def test_without_a_stream_every_call_draws_anew(spec, schedule):
    ranks = ranks_of(4, 1000)
    assert len({digest(reduced(ranks, spec, schedule=schedule)[0]) for _ in range(5)}) == 5
    rows = [torch.stack(ranks)]
    calls = {
        digest(local.all_reduce_rows([each.clone() for each in rows], spec, "sum", schedule, names=["w"])[0])
        for _ in range(3)
    }
    assert len(calls) == 3


def test_every_stage_and_name_on_every_rank_has_a_stream_of_its_own():
    """The one that its slot is named by: so a batch, which draws by slots, has the same bits."""
    contexts = [
        schedules.RankContext(rank, 4, Channel("qsgd4/512"), name, rng=Stream(1, step=2, rank=rank))
        for rank in range(3)
        for name in ("a", "b")
    ]
    draws = {
        (context.rank, context.name, stage): context.stream(stage)
        for context in contexts
        for stage in ("sent", "sent/tail", "reduced", "hop0", "hop1")
    }
    assert len({tuple(stream.words(8).tolist()) for stream in draws.values()}) == len(draws)
    for (rank, name, stage), stream in draws.items():
        assert stream == Stream(1, step=2, tensor=f"{name}/{stage}", rank=rank)


def test_a_batch_draws_by_slots_too():
    """Its wires are those of a codec with the streams that the stages are named by."""
    codec, rng, x = codecs.get("qsgd4/64"), Stream(5, step=3, rank=0), gauss(500)
    sharding = Sharding(codec, 500, 2)
    batch = Batch([Item(500, Channel(codec), "w")], 0, 2, 1.0)
    steps = two_shot(BatchRun(batch, Buffers()).begin([x], rng, None))
    sent = next(steps)
    first, last = sharding.parts
    wires = [
        codec.encode(x[start : start + numel], dataclasses.replace(rng, tensor=f"w/{stage}"))
        for (start, numel, _), stage in ((first, "sent"), (last, "sent/tail"))
    ]
    assert torch.equal(sent.wire[: sharding.sizes[0]], wires[0])
    assert torch.equal(sent.wire[sent.stride or sharding.sizes[0] :][: sharding.sizes[1]], wires[1])
    for rank in range(2):  # what came: the same shard twice
        sent.out.view(2, -1)[rank, : sharding.sizes[0]] = wires[0]
    gathered = steps.send(None)
    total = 2 * codec.decode(wires[0], sharding.numels[0])
    assert torch.equal(
        gathered.wires[: sharding.sizes[0]], codec.encode(total, dataclasses.replace(rng, tensor="w/reduced"))
    )


def test_ranks_with_the_same_numbers_do_not_round_alike():
    """Otherwise errors would not average out."""
    world, x = 64, gauss(1000)
    errors = [
        relative_error(reduced([x] * n, "qsgd4/512", "avg", "one_shot")[0], x.double())
        for n in (1 + 1, world)
    ]
    assert errors[1] < errors[0] / 4  # by the square root of 32


# Exactness


def chain(values):
    return functools.reduce(operator.add, values)


def pairs(values):
    while len(values) > 1:
        values = [chain(values[i : i + 2]) for i in range(0, len(values), 2)]
    return values[0]


def around(values, ahead):
    """Shard s begins with rank s + ahead."""
    world, shard = len(values), -(-values[0].numel() // len(values))
    parts = []
    for s in range(-(-values[0].numel() // shard)):
        turned = [values[(s + ahead + i) % world][s * shard : (s + 1) * shard] for i in range(world)]
        parts.append(chain(turned))
    return torch.cat(parts)


ORDERS = {
    "native": chain, "one_shot": chain, "two_shot": chain, "tree": pairs, "low_rank/2": chain,
    "ring": functools.partial(around, ahead=0),
    "hierarchical/2": lambda values: chain([chain(values[i : i + 2]) for i in range(0, len(values), 2)]),
    "accumulate/sequential": chain, "accumulate/tree": pairs,
    "accumulate/ring": functools.partial(around, ahead=1),
    "accumulate/2": lambda values: chain([chain(values[i : i + 2]) for i in range(0, len(values), 2)]),
}  # fmt: skip


@in_worlds(2, 3, 4, 5, 8, names=ORDERS)
def test_fp32_sums_are_those_of_float32_in_the_order_of_the_schedule(schedule, world):
    ranks = ranks_of(world, 1003)
    results = reduced(ranks, "fp32", "sum", schedule)
    assert digest(results[0]) == digest(ORDERS[schedule](ranks))


@pytest.mark.parametrize("schedule", [name for name in SCHEDULES if ":bf16" not in name])
@pytest.mark.parametrize("op", ["sum", "avg"])
def test_fp32_sums_and_means_are_as_good_as_float32_can_be(schedule, op):
    """World additions and one product round, each by a unit of at most the sum of magnitudes."""
    for world in (2, 4, 8):
        ranks = ranks_of(world, 1003)
        weight = 1 / world if op == "avg" else 1.0
        off = (reduced(ranks, "fp32", op, schedule)[0].double() - weight * total(ranks)).abs()
        assert bool((off <= 2 * world * UNIT * weight * total([x.abs() for x in ranks])).all())


@moving
@pytest.mark.parametrize("spec", ["int8/256", "e4m3fn/128", "maxmin4/1024", "aps/e4m3"])
def test_the_mean_over_a_power_of_two_is_the_sum_divided(schedule, spec):
    """Scales are multiplied by a power of two, which rounds nothing."""
    ranks = ranks_of(4, 1000)
    mean = reduced(ranks, spec, "avg", schedule)[0]
    torch.testing.assert_close(mean * 4, reduced(ranks, spec, "sum", schedule)[0], rtol=1e-5, atol=1e-6)


# Error bounds

#: The largest error of one rounding over the largest magnitude of a block: half the widest gap over the
#: format's maximum (all of the gap at random).
ROUNDING = {
    "int8/256": 1 / 254, "int4/128": 1 / 14, "int4/128~sr": 1 / 7, "int8/tensor": 1 / 254,
    "e4m3fn/128": 16 / 448, "e5m2/128": 4096 / 57344, "maxmin4/1024": 1 / 15,
    "nf4/64": 0.5 * (1 - 0.7229568), "bf16": 2.0**-8,
    "fp16": 2.0**-11, "qsgd4/512": 1 / 7,
}  # fmt: skip


def depth(schedule, world):
    """How many times a value is rounded on its way."""
    return {
        "one_shot": 1, "two_shot": 2, "ring": world, "tree": 1 + math.ceil(math.log2(world)),
        "hierarchical/2": 1 if world == 4 else 2,
    }[schedule]  # fmt: skip


@in_worlds(2, 4, 5, 8, names=["one_shot", "two_shot", "ring", "tree", "hierarchical/2"])
@pytest.mark.parametrize("spec", ROUNDING)
def test_errors_stay_within_what_the_roundings_on_the_way_allow(spec, schedule, world):
    """|error| <= A ((1 + r)^d - 1), for A the sum over ranks of a block's largest magnitude.

    One rounding is off by at most r times the largest magnitude of its block (see ROUNDING). What has been
    rounded k times has, over all wires that make up the sum, magnitudes of at most A (1 + r)^k; so rounding
    it again adds at most r A (1 + r)^k. Over k = 0 .. d - 1 that is a geometric series. Shards are whole
    blocks, so blocks are the same in every wire; a codec without blocks has smaller ones in shards.
    """
    codec, numel = codecs.get(spec), 1003
    ranks = [x * 10 ** gauss(1, seed=7 + i) for i, x in enumerate(ranks_of(world, numel))]
    block = codec.grain or numel
    padded = torch.nn.functional.pad(torch.stack(ranks).double(), (0, -numel % block))
    largest = padded.view(world, -1, block).abs().amax(-1).sum(0).repeat_interleave(block)[:numel]
    allowed = largest * ((1 + ROUNDING[spec]) ** depth(schedule, world) - 1 + 2 * world * UNIT) + 2.0**-24
    off = (reduced(ranks, codec, "sum", schedule)[0].double() - total(ranks)).abs()
    assert bool((off <= allowed).all())
    assert float((off / allowed).max()) > 0.005  # the bound is not idle


#: Codecs whose ranks share a scale: how far apart neighbouring numbers are (half of it to nearest), over what
#: the scale reaches; for floats, over the number itself.
SHARED = {
    "int8/tensor~shared": 0.5 / 127, "int8/256~shared": 0.5 / 127, "int8/tensor~shared~world": 0.5 / 127,
    "int8/256~shared~sqrt": 0.5 / 127, "int8/tensor~bf16~shared": 0.5 / 127, "qsgd8~shared": 1 / 127,
    "terngrad~shared": 1.0, "fp8lm": 2.0**-4, "aps/e4m3": 2.0**-4, "aps/e5m2": 2.0**-3,
}  # fmt: skip


def steps(schedule, world, *, room):
    """By how many steps of a shared scale a sum may be off, if each rounding is off by one.

    Without room for sums a mean is encoded in their place, and its error is multiplied by the ranks that it
    is of: on a ring by those passed so far, in a tree by those of the branch. With room every sum on the way
    is rounded by itself, and so is the result: as many roundings as ranks.
    """
    again, nodes = 1 if room else world, world // 2
    branches = sum(min(rank & -rank, world - rank) for rank in range(1, world))
    return {
        "one_shot": world, "two_shot": world + again,
        "ring": world if room else world * (world + 1) / 2, "tree": world if room else world + branches,
        "hierarchical/2": nodes * (1 if room else 2) + again * (nodes != 2),
    }[schedule]  # fmt: skip


def allowed_of_shared(codec, ranks, schedule):
    """How far a sum may be off with a shared scale: nothing saturates, so it is rounding and no more."""
    world, numel, margin = len(ranks), ranks[0].numel(), codec.scaling.margin
    stacked = torch.stack(ranks).double().abs()
    padded = torch.nn.functional.pad(stacked, (0, -numel % (codec.block or numel)))
    largest = padded.view(world, -1, codec.block or numel).amax(-1).amax(0)
    reach = largest.repeat_interleave(codec.block or numel)[:numel]
    reach = reach * {"": 1, "sqrt": math.sqrt(world), "world": world}[margin]
    count = steps(schedule, world, room=margin == "world")
    step = SHARED[codec.spec]
    if margin == "world" and not isinstance(codec.format, formats.Float):  # `world` of the largest codes fit
        step *= codec.format.max / (world * (codec.format.max // world))
    float32 = 2 * world * UNIT * stacked.sum(0)
    if not isinstance(codec.format, formats.Float):
        return count * reach * step * (1 + 2.0**-7 * (codec.scaling.store == "bfloat16")) + float32
    tiny = codec.format.min_subnormal / 2 * 4 * reach / codec.format.max  # a power of two, a binade left
    return stacked.sum(0) * ((1 + step) ** depth(schedule, world) - 1) + count * tiny + float32


@pytest.mark.parametrize("kin", ["equal", "apart"])
@in_worlds(2, 4, 5, 8, names=["one_shot", "two_shot", "ring", "tree", "hierarchical/2"])
@pytest.mark.parametrize("spec", SHARED)
def test_under_a_shared_scale_sums_are_rounded_and_nothing_is_cut_off(spec, schedule, world, kin):
    """Ranks with the same numbers have the largest sum there is; ranks apart have one that is small."""
    codec = codecs.get(spec)
    ranks = [gauss(1003, seed=0)] * world if kin == "equal" else ranks_of(world, 1003)
    allowed = allowed_of_shared(codec, ranks, schedule)
    for op, weight in (("sum", 1.0), ("avg", 1 / world)):
        results = reduced(ranks, codec, op, schedule)
        assert alike(results)
        off = (results[0].double() - weight * total(ranks)).abs()
        assert bool((off <= weight * allowed).all())
        assert float((off / allowed).max()) > 0.05 * weight  # the bound is not idle


#: Codecs with a fixed scale: numbers of up to 1.4 fit, sums of four of them do not.
FIXED = {
    "fixed2.6~offset0": 2.0**-7, "fixed2.6~offset0~sr": 2.0**-6, "fixed2.6/64~offset0+ef": 2.0**-7,
    "topk/1~fixed2.6~offset0": 2.0**-7, "static8~offset-2": 0.05, "e4m3~offset-2": 0.08,
    "fixed2.6~offset0~shared": 2.0**-7,
}  # fmt: skip


@pytest.mark.parametrize("world", [4, 6, 8])
@pytest.mark.parametrize("schedule", ["two_shot", "ring", "tree", "hierarchical/2", "hierarchical/2:bf16"])
@pytest.mark.parametrize("spec", FIXED)
def test_under_a_fixed_scale_sums_are_encoded_as_means_so_that_none_is_cut_off(spec, schedule, world):
    """A rounding is off by no more than FIXED, of numbers that fit; a mean fits wherever they do."""
    x = torch.rand(600, generator=torch.Generator().manual_seed(3)) * (0.8 if "offset-2" in spec else 1.4)
    ranks = [x * (-1 if rank == world - 1 else 1) for rank in range(world)]
    total_of, mean_of = (reduced(ranks, spec, op, schedule, rng=Stream(1)) for op in ("sum", "avg"))
    assert alike(total_of)
    bf16 = 2.0**-8 if ":bf16" in schedule else 0.0
    torch.testing.assert_close(total_of[0], mean_of[0] * world, rtol=2 * bf16 + 1e-6, atol=1e-6)
    off = (mean_of[0].double() - total(ranks) / world).abs().max()
    roundings = steps(schedule.partition(":")[0], world, room=False) / world
    assert off <= roundings * FIXED[spec] + 2 * 1.4 * bf16 + 1e-6


def test_a_fixed_scale_is_refused_inside_nodes():
    with pytest.raises(ScheduleError, match="static8~offset-1 cannot be used inside a node"):
        schedules.get("hierarchical/2:static8~offset-1")


# Anything

FORMATS = ("int8", "int4", "int2", "e4m3fn", "nf4", "posit8_1", "fixed2.6", "tree8", "static8")
SOME = (
    "fp32", "bf16", "fp16",
    *(f"{name}{block}" for name in FORMATS for block in ("/tensor", "/16", "/64", "/256")),
    "int4/64~sr", "int8/tensor~pow2", "e5m2/32~pow2~e8m0", "int8/64~bf16", "e4m3/64~up", "qsgd4/512",
    "qsgd4/tensor", "terngrad", "maxmin4/64", "maxmin2/128~sr", "onebit/64", "onebit/64~mean", "sign/64",
    "topk/0.3",
    "topk/1~int8/64", *SHARED,
)  # fmt: skip
CASES, KINDS = 400, ("equal", "opposite", "apart", "uneven")


def rounding(codec):
    """By how much one rounding is off at most, over the largest magnitude of what shares a scale."""
    if isinstance(codec, Cast):
        return {"fp32": UNIT, "bf16": 2.0**-8, "fp16": 2.0**-11}[codec.dtype]
    if isinstance(codec, MaxMin):  # equal steps over twice the largest magnitude
        return (2 if codec.needs_rng else 1) / (2**codec.bits - 1)
    if isinstance(codec, OneBit):  # a mean of the same sign, or a mean and a mean deviation
        return 2.0 if codec.threshold == "mean" else 1.0
    if isinstance(codec, TopK):  # what is not sent is lost
        return max(1.0 * (codec.fraction < 1), rounding(codec.values))
    numbers = codec.format.values().double()
    limit = 1.0 if isinstance(codec.format, formats.Posit) else codec.format.max
    gap = numbers[numbers.abs() <= limit].diff().max().item() / limit
    halved = codec.rounding == "nearest" and not isinstance(codec.format, formats.Posit)
    wider = 2.0 if codec.scaling.choose == "pow2" else 1.0
    below = abs(codec.format.min) < limit  # nothing is as far below zero as above it
    return gap * (0.5 if halved and not below else 1.0) * wider * (1 + 2.0**-7)


def allowed_of(codec, ranks, schedule):
    """|error| <= A ((1 + r)^d - 1), as in the test of errors above."""
    if codec.spec in SHARED:
        return allowed_of_shared(codec, ranks, schedule)
    world, numel = len(ranks), ranks[0].numel()
    block = codec.grain or numel
    padded = torch.nn.functional.pad(torch.stack(ranks).double(), (0, -numel % block))
    largest = padded.view(world, -1, block).abs().amax(-1).sum(0).repeat_interleave(block)[:numel]
    times = world + 1 if schedule == "native" else depth(schedule, world)
    smallest = 2.0**-24 * world**2 if codec.name == "fp16" else 2.0**-120  # subnormal numbers
    return largest * ((1 + rounding(codec)) ** times - 1 + 2 * world * UNIT) + smallest


def related(random, numel, world, size):
    """Ranks that have the same numbers, opposite ones, their own, or some much larger than others."""
    seed, kind = random.randrange(1 << 30), random.choice(KINDS)
    if kind == "equal":
        return kind, [size * gauss(numel, seed=seed)] * world
    if kind == "opposite":
        return kind, [size * (-1) ** rank * gauss(numel, seed=seed) for rank in range(world)]
    sizes = [size * (10.0 ** random.randrange(-3, 3) if kind == "uneven" else 1) for _ in range(world)]
    return kind, [each * gauss(numel, seed=seed + rank) for rank, each in enumerate(sizes)]


def drawn_case(random):
    """Ranks, a codec, a schedule and a reduction that go together."""
    while True:
        world, kind = random.choice([2, 3, 4, 5, 6, 7, 8]), random.choice([SOME, tuple(SHARED)])
        codec = codecs.get(random.choice(kind))
        schedule = random.choice(["native", "one_shot", "two_shot", "ring", "tree", "hierarchical/2"])
        if SCHEDULES[schedule].refuses(codec) or world % SCHEDULES[schedule].ranks_per_node:
            continue
        if codec.spec in SHARED and (schedule, world) == ("hierarchical/2", 2):  # one node: nothing is shared
            continue
        numel = random.choice([1, 2, 15, 64, 65, 257, random.randrange(1, 1500)])
        size = 10.0 ** random.randrange(-6, 1 if codec.name == "fp16" else 4)  # whose sums would be infinite
        kind, ranks = related(random, numel, world, size)
        return ranks, codec, schedule, random.choice(["sum", "avg"]), kind


@pytest.mark.parametrize("seed", range(8))
def test_any_codec_on_any_schedule_comes_as_near_to_the_mean_as_its_numbers_allow(seed):
    """Whatever ranks have to do with each other: a sum in float64, and a bound of the codec's own."""
    random, worst = Random(seed), 0.0
    for _ in range(CASES // 8):
        ranks, codec, schedule, op, kind = drawn_case(random)
        world = len(ranks)
        results = reduced(ranks, codec, op, schedule, rng=Stream(seed))
        what = f"{codec.spec}, {schedule}, {world} ranks {kind}, {ranks[0].numel()} elements, {op}"
        assert alike(results), what
        weight = 1.0 if op == "sum" else 1 / world
        off = (results[0].double() - weight * total(ranks)).abs()
        allowed = weight * allowed_of(codec, ranks, schedule)
        assert bool((off <= allowed).all()), f"{what}: {(off / allowed).max():.3g} times what is allowed"
        worst = max(worst, (off / allowed).max().item())
    assert worst > 0.6  # the bound is not idle


@pytest.mark.parametrize("world", [3, 4, 8])
@pytest.mark.parametrize("schedule", ["one_shot", "two_shot", "ring", "tree", "hierarchical"])
@pytest.mark.parametrize(
    "spec",
    ["terngrad~shared", "qsgd4~shared", "int8/tensor~sr~shared~world", "int2~offset0~sr", "e4m3fn~sr~shared"],
)
def test_under_an_agreed_or_fixed_scale_random_rounding_is_right_on_average(spec, schedule, world):
    """Many elements of one value, up to the largest under the scale: their mean is within six deviations."""
    if schedule == "hierarchical":
        schedule = f"hierarchical/{math.gcd(world, 2)}"
    for part in (1.0, 0.75, 0.5):
        x = torch.full((20_000,), part)
        x[0] = 1.0
        (mean, *_) = reduced([x] * world, spec, "avg", schedule, rng=Stream(1))
        rest = mean[1:].double()
        assert (rest.mean() - part).abs() <= 6 * rest.std() / math.sqrt(rest.numel()) + 1e-6, part


def test_a_scale_without_room_for_a_sum_of_so_many_ranks_is_refused():
    assert (
        relative_error(reduced([torch.ones(9)] * 7, "int4/tensor~shared~world")[0], 7 * torch.ones(9)) < 1e-6
    )
    with pytest.raises(
        CodecError, match=r"no room for the sum of 8 ranks: the largest int4 is 7; leave ~world"
    ):
        reduced([torch.ones(9)] * 8, "int4/tensor~shared~world")


@pytest.mark.parametrize("spec", ["int8/256", "int4/128", "e4m3fn/128"])
def test_fewer_roundings_have_smaller_errors(spec):
    def error(schedule):
        errors = []
        for seed in range(4):
            ranks = ranks_of(8, 4096, first=10 * seed)
            errors.append(relative_error(reduced(ranks, spec, "avg", schedule)[0], total(ranks) / 8))
        return sum(errors)

    assert error("one_shot") < error("two_shot") < error("ring")
    assert error("two_shot") < error("tree")


# Buckets


BUCKET = ((1000,), (0,), (7,), (40, 12), (1,), (0, 3), (300,))
NAMES = [f"layer{i}" for i in range(len(BUCKET))]


@every_schedule
@pytest.mark.parametrize("world", [2, 4])
def test_a_bucket_has_the_bits_of_one_call_for_each_tensor(schedule, world):
    for codec in served(schedule, world):
        if codec.needs_rng or any(schedule.refuses(codec.for_shape(shape)) for shape in BUCKET):
            continue
        ranks = [
            [gauss(*shape, seed=10 * rank + i) for i, shape in enumerate(BUCKET)] for rank in range(world)
        ]
        results = reduced(ranks, codec, "avg", schedule, name=NAMES)
        assert alike(results), codec.spec
        for i, name in enumerate(NAMES):
            alone = reduced([each[i] for each in ranks], codec, "avg", schedule, name=name)
            assert digest(alone[0]) == digest(results[0][i]), (codec.spec, name)


@pytest.mark.parametrize("schedule", ["one_shot", "two_shot"])
@pytest.mark.parametrize(
    "spec", ["fp32", "bf16", "fp16", "int8/256", "e4m3fn/128", "onebit/64", "maxmin4/1024"]
)
def test_sums_of_negative_zeros_have_the_sign_that_they_have_row_by_row(spec, schedule):
    ranks = [
        torch.where(torch.arange(3000) < 1000 * rank, x, -0.0) for rank, x in enumerate(ranks_of(3, 3000))
    ]
    (summed,) = local.all_reduce_rows([torch.stack(ranks)], spec, "sum", schedule, names=["w"])
    assert digest(reduced(ranks, spec, "sum", schedule)[0]) == digest(summed)


def plan_of(numels, channel, schedule, rank, world):
    """Of the mean of tensors that lie in one flat vector, as those of a bucket of DDP do."""
    starts = itertools.accumulate(numels, initial=0)
    items = [
        schedules.Item(numel, channel, f"layer{i}", 0, start, i)
        for i, (numel, start) in enumerate(zip(numels, starts, strict=False))
    ]
    call = jobs.Call("all_reduce", channel.codec.spec, tuple(numels), "float32", schedule.spec)
    here = plans.Ranks(rank, world, schedule.ranks_per_node or 1)
    return plans.ReducePlan(items, schedule, here, call, weight=1.0 / world)


@pytest.mark.parametrize("move", [True, False])
@pytest.mark.parametrize("schedule", ["one_shot", "two_shot"])
@pytest.mark.parametrize("spec", ["onebit/64+ef", "int4/128+ef", "topk/0.1+ef", "int4/128+ef:8bit"])
def test_what_is_worked_out_once_follows_tensors_and_residuals_that_move(spec, schedule, move):
    """As on a group: plans and buffers are kept, residuals are forgotten, tensors move or do not."""
    kept = channels(codecs.get(spec), 2)
    plans = [plan_of((700, 300), each, SCHEDULES[schedule], rank, 2) for rank, each in enumerate(kept)]
    pool, ranks = [schedules.Buffers() for _ in plans], ranks_of(2, 1000)

    def send(step):
        given = ranks_of(2, 1000, first=10 * step)
        for i, x in enumerate(given):
            ranks[i] = x if move else ranks[i].copy_(x)
        calls = [plan.job([x]) for plan, x in zip(plans, ranks, strict=True)]
        for pieces in zip(*(call.starts() for call in calls), strict=True):
            local.lockstep([start(buffers) for start, buffers in zip(pieces, pool, strict=True)])
        return ranks[0].clone()

    first = [send(step) for step in range(3)]
    for channel in kept:
        channel.forget()
    again = [send(step) for step in range(3)]
    assert digest(again) == digest(first)


@pytest.mark.parametrize("schedule", ["one_shot", "two_shot", "ring", "tree", "hierarchical/2"])
@pytest.mark.parametrize("spec", ["int8/tensor~shared+ef", "aps/e4m3+ef", "onebit/64+ef", "int4/128+ef:8bit"])
def test_tensors_in_one_vector_have_the_residuals_of_one_call_for_each(spec, schedule):
    """And of very different sizes: the residual of one of them must not enter into another's scale."""
    codec, schedule, world, numels = codecs.get(spec), SCHEDULES[schedule], 4, (300, 1000, 70)
    together, apart = channels(codec, world), channels(codec, world)
    for step in range(3):
        ranks = [
            [100.0**i * gauss(numel, seed=10 * step + rank) for i, numel in enumerate(numels)]
            for rank in range(world)
        ]
        flat = [torch.cat(tensors) for tensors in ranks]
        plans = [plan_of(numels, each, schedule, rank, world) for rank, each in enumerate(together)]
        local.run([plan.job([x]) for plan, x in zip(plans, flat, strict=True)])
        for i, each in enumerate(flat[0].split(numels)):
            alone = reduced([tensors[i] for tensors in ranks], apart, "avg", schedule, name=f"layer{i}")
            assert digest(alone[0]) == digest(each), (step, i)


@pytest.mark.parametrize("schedule", ["two_shot", "ring", "hierarchical/2"])
def test_a_bucket_is_refused_if_any_of_its_tensors_must_not_be_cut(schedule):
    """A DCT of two dimensions is for whole matrices, wherever in the bucket one is."""
    codec = CODECS["dct/64:8+ef"]
    assert not SCHEDULES[schedule].refuses(codec)
    assert SCHEDULES[schedule].refuses(codec.for_shape((40, 12)))
    ranks = [[gauss(100), gauss(40, 12)] for _ in range(2)]
    with pytest.raises(ScheduleError, match="is for a whole tensor and cannot be cut into shards"):
        reduced(ranks, codec, "sum", schedule)


def test_auto_chooses_for_a_bucket_what_suits_all_of_its_tensors():
    for spec in ("dct/64:8+ef", "onebit/column+ef", "aps/e5m2", "int8/256"):
        ranks = [[gauss(100, seed=r), gauss(40, 12, seed=r), gauss(1, seed=r)] for r in range(4)]
        assert alike(reduced(ranks, spec)), spec


@pytest.mark.parametrize("numel", [0, 1, 2])
@pytest.mark.parametrize("spec", ["aps/e5m2", "fp8lm", "qsgd8~shared", "int8/256~shared"])
def test_a_shared_scale_goes_with_ranks_that_have_nothing_to_send(spec, numel):
    for world in (2, 4, 6, 8):
        assert alike(reduced(ranks_of(world, numel), spec, "sum", "hierarchical/2"))


@pytest.mark.parametrize("spec", ["aps/e5m2+ef", "aps/e3m0+ef", "fp8lm+ef"])
def test_residuals_count_when_ranks_agree_on_a_scale(spec):
    """Otherwise it does not fit under the scale of small gradients, and arrives a drop at a time."""
    kept, residual = channels(codecs.get(spec), 3), []
    for step in range(6):
        reduced([x * (1e-6 if step else 1.0) for x in ranks_of(3, 500)], kept, "avg", "one_shot")
        residual.append(max(float(channel.residuals["tensor/sent"].abs().max()) for channel in kept))
    assert residual[-1] < residual[0] / 2


@moving
def test_a_bucket_of_random_codecs_is_equal_on_all_ranks(schedule):
    random = [codec for codec in served(schedule, 4) if codec.needs_rng]
    assert random
    for codec in random:
        ranks = [[gauss(*shape, seed=i + 10 * rank) for i, shape in enumerate(BUCKET)] for rank in range(4)]
        assert alike(reduced(ranks, codec, "avg", schedule)), codec.spec


@every_schedule
def test_a_bucket_needs_no_more_exchanges_than_a_tensor(schedule):
    for codec in served(schedule, 4, FEW):
        one, bucket = (trace(each, codec, 4, schedule) for each in (1000, [1000, 700, 0, 7, 1000]))
        assert bucket.exchanges == one.exchanges, codec.spec
        assert bucket.kinds == one.kinds


@pytest.mark.parametrize("spec", ["aps/e5m2", "aps/e4m3", "aps/e3m0"])
def test_the_agreement_is_one_exchange_of_a_byte_for_every_tensor(spec):
    tensors = [gauss(1000), gauss(7), gauss(300), torch.empty(0)]
    job = arguments.all_reduce_job(tensors, spec, "sum", "two_shot", local.Rank(1, 4))
    requests = []
    for request in job.agreement:
        requests.append(request)
        request.wires.zero_()
    assert len(requests) == 1
    assert isinstance(requests[0], AllGather)
    assert tuple(requests[0].sizes) == (3, 3, 3, 3)  # nothing is agreed on for nothing


@pytest.mark.parametrize("schedule", ["one_shot", "two_shot", "ring", "tree", "hierarchical/2"])
@pytest.mark.parametrize("spec", SHARED)
def test_tensors_of_a_bucket_have_scales_of_their_own(schedule, spec):
    """Six orders of magnitude apart, each is as good as it would be alone."""
    ranks = [
        [gauss(1000, seed=r), 1e-6 * gauss(700, seed=9 + r), 1e6 * gauss(300, seed=19 + r)] for r in range(4)
    ]
    results = reduced(ranks, spec, "avg", schedule)
    assert alike(results)
    for i in range(3):
        mine = [each[i] for each in ranks]
        off = (results[0][i].double() - total(mine) / 4).abs()
        assert bool((off <= allowed_of_shared(codecs.get(spec), mine, schedule) / 4).all())


# Pieces


@pytest.mark.parametrize("schedule", ["one_shot", "two_shot", "tree", "hierarchical/2", "accumulate/tree"])
def test_cutting_into_pieces_changes_no_bit(schedule, monkeypatch):
    """For codecs that look at a few neighbours. On a ring, shards of a piece begin with other ranks."""
    plan, uncut = SCHEDULES[schedule], plans.spans
    ranks = ranks_of(4, 5000)
    steady = served(plan, 4, STEADY)
    assert steady
    for codec in steady:
        digests = set()
        for piece in (1 << 8, 1 << 10, 1 << 30):
            monkeypatch.setattr(plans, "spans", functools.partial(uncut, piece=piece))
            assert piece > 1 << 10 or len(list(plans.spans([5000], [codec], plan))) > 1 or codec.grain > 1024
            digests.add(digest(reduced(ranks, codec, "avg", schedule)[0]))
        assert len(digests) == 1, codec.spec


@pytest.mark.parametrize("spec", ["onebit/64+ef", "int8/256", "int4/128~sr", "aps/e4m3", "int8/256~shared"])
def test_pieces_of_a_ring_are_equal_on_all_ranks_and_as_good(spec, monkeypatch):
    ranks = ranks_of(4, 5000)
    exact, whole = total(ranks), reduced(ranks, spec, "sum", "ring")
    monkeypatch.setattr(plans, "spans", functools.partial(plans.spans, piece=1 << 10))
    cut = reduced(ranks, spec, "sum", "ring")
    assert alike(cut)
    assert relative_error(cut[0], exact) == pytest.approx(relative_error(whole[0], exact), rel=0.1)


@moving
@pytest.mark.parametrize("spec", ["int8/64~shared", "int8/64~shared+ef"])
@pytest.mark.parametrize("tensors", [1, 2])
def test_every_block_has_its_own_agreed_scale_wherever_it_travels(schedule, spec, tensors, monkeypatch):
    """In a later piece, in any shard, between nodes, in a later tensor: blocks differ by powers of two."""
    assert not schedule.refuses(codecs.get(spec))
    world, numel = 4, 40 * 64
    unit = torch.exp2(torch.arange(numel // 64) % 40 - 20.0).repeat_interleave(64)
    ranks = [
        [gauss(numel, seed=10 * rank + i).clamp(-3, 3) * unit.roll(640 * i) for i in range(tensors)]
        for rank in range(world)
    ]
    for rank, i in itertools.product(range(world), range(tensors)):  # sums fit under a block's scale
        ranks[rank][i][::64] = 0.0 if rank else 16.0 * unit.roll(640 * i)[::64]
    exact = [torch.stack([each[i] for each in ranks]).double().sum(0) for i in range(tensors)]
    uncut = plans.spans
    for piece in (512, 1 << 20):
        monkeypatch.setattr(plans, "spans", functools.partial(uncut, piece=piece))
        summed = reduced(ranks, spec, "sum", schedule)
        assert alike(summed)
        for i in range(tensors):
            off = (summed[0][i].double() - exact[i]).abs() / unit.roll(640 * i)
            assert float(off.max()) < 8 * 16 / 127, (piece, i)  # a few steps of a block's own scale


def test_small_tensors_of_a_bucket_travel_together_up_to_a_piece(monkeypatch):
    numels = [300] * 10 + [5000] + [1] * 3
    codec, plan = codecs.get("int8/256"), SCHEDULES["two_shot"]
    groups = list(plans.spans(numels, [codec] * 14, plan, piece=1024))
    covered = sorted((span.tensor, span.start, span.stop) for group in groups for span in group)
    assert [sum(stop - start for i, start, stop in covered if i == t) for t in range(14)] == numels
    assert all(sum(span.stop - span.start for span in group) <= 1024 for group in groups)
    monkeypatch.setattr(plans, "spans", functools.partial(plans.spans, piece=1024))
    ranks = [[gauss(numel, seed=20 * rank + i) for i, numel in enumerate(numels)] for rank in range(3)]
    results = reduced(ranks, codec, "avg", plan)
    assert alike(results)
    monkeypatch.undo()
    assert digest(results[0]) == digest(reduced(ranks, codec, "avg", plan)[0])


# What is not finite


@every_schedule
@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_one_bad_number_on_one_rank_is_seen_by_all(schedule, bad):
    """In the element itself, and nowhere outside its block; random-k may not choose it at all."""
    for codec in served(schedule, 4):
        if isinstance(codec, RandomK):
            continue
        ranks = ranks_of(4, 1100)
        ranks[2][300] = bad
        results = reduced(ranks, codec, "avg", schedule)
        assert alike(results), codec.spec
        assert not bool(results[0][300].isfinite()), codec.spec
        if codec.spec in STEADY and not codec.agreement(1):
            first = 300 // codec.grain * codec.grain
            outside = torch.cat((results[0][:first], results[0][first + codec.grain :]))
            assert bool(outside.isfinite().all()), codec.spec


@pytest.mark.parametrize(
    ("spec", "schedule"),
    [(spec, name) for spec in LEARNING for name, each in SCHEDULES.items() if not each.refuses(CODECS[spec])],
)
def test_a_bad_step_does_not_spoil_later_ones(spec, schedule):
    kept = channels(CODECS[spec], 4)
    for step in range(3):
        ranks = ranks_of(4, 1100, first=10 * step)
        if step == 1:
            ranks[2][300] = math.nan
        results = reduced(ranks, kept, "avg", schedule)
        assert alike(results)
        assert bool(results[0].isfinite().all()) == (step != 1)


# Error feedback over steps


def running_mean(spec, schedule, steps, world=4):
    """Relative error of the mean of so many all-reduces of the same gradients."""
    ranks = ranks_of(world, 2000)
    kept = [Channel(spec) for _ in ranks]
    seen = torch.zeros(2000, dtype=torch.float64)
    for _ in range(steps):
        results = reduced(ranks, kept, "avg", schedule)
        assert alike(results)
        seen += results[0].double()
    return relative_error(seen / steps, total(ranks) / world)


@pytest.mark.parametrize("schedule", ["one_shot", "two_shot", "ring", "tree", "hierarchical/2"])
def test_with_feedback_what_was_held_back_arrives_later(schedule):
    few, many = (running_mean("onebit/64+ef", schedule, steps) for steps in (10, 100))
    assert many < 0.1
    assert many < few / 4  # residuals grow more slowly than what has arrived
    assert running_mean("onebit/64", schedule, 100) > 0.4


@pytest.mark.parametrize("schedule", ["one_shot", "two_shot", "hierarchical/2"])
def test_with_feedback_a_hundredth_at_a_time_adds_up_to_all(schedule):
    few, many = (running_mean("topk/0.01+ef", schedule, steps) for steps in (100, 500))
    assert few < 0.8
    assert many < 0.3
    assert many < few / 2
    assert running_mean("topk/0.01", schedule, 100) > 0.85


def test_the_owner_of_a_shard_keeps_a_residual_of_its_own():
    ranks, kept = ranks_of(3, 1000), channels(CODECS["onebit/64+ef"], 3)
    reduced(ranks, kept, "avg", "two_shot")
    for channel in kept:
        assert any(slot.startswith("tensor/sent") for slot in channel.residuals)
        assert channel.residuals["tensor/reduced"].abs().max() > 0
    reduced(ranks, kept, "avg", "one_shot", name="other")
    assert not any("reduced" in slot for slot in kept[0].residuals if slot.startswith("other"))


@pytest.mark.parametrize("schedule", ["one_shot", "two_shot", "ring", "tree"])
def test_what_is_sent_and_the_residuals_add_up(schedule):
    """Over all ranks and slots, the mean so far and the residuals are the gradients so far."""
    world, kept = 4, channels(codecs.get("onebit/64+ef"), 4)
    given, seen = torch.zeros(1024, dtype=torch.float64), torch.zeros(1024, dtype=torch.float64)
    for step in range(5):
        ranks = ranks_of(world, 1024, first=10 * step)
        given += total(ranks)
        seen += reduced(ranks, kept, "sum", schedule)[0].double()
    residual = float(sum(each.double().sum() for channel in kept for each in channel.residuals.values()))
    assert float(given.sum() - seen.sum()) == pytest.approx(residual, abs=1e-3)


@pytest.mark.parametrize("world", [4, 6])
@pytest.mark.parametrize("light", ["fp32", "bf16", "int8/256", "int4/128"])
def test_what_is_rounded_inside_a_node_is_fed_back_too(light, world):
    """Over all slots, as above; all nodes have the same residual of the result, which counts once."""
    kept, numel = channels(codecs.get("onebit/64+ef"), world), 1024
    given, seen = 0.0, 0.0
    for step in range(5):
        ranks = ranks_of(world, numel, first=10 * step)
        given += float(total(ranks).sum())
        results = reduced(ranks, kept, "sum", f"hierarchical/2:{light}")
        assert alike(results)
        seen += float(results[0].double().sum())
    nodes = [
        torch.cat(
            [channel.residuals.get("tensor/near/result", torch.zeros(512)) for channel in kept[i : i + 2]]
        )
        for i in range(0, world, 2)
    ]
    assert alike(nodes)
    assert bool(nodes[0].any()) == (light != "fp32")
    slots = [channel.residuals.items() for channel in kept]
    residual = sum(float(x.double().sum()) for each in slots for slot, x in each if "near/result" not in slot)
    assert given - seen == pytest.approx(residual + float(nodes[0].double().sum()), abs=1e-2)


@pytest.mark.parametrize("spec", ["int4/128+ef", "onebit/64+ef", "int4/tensor~shared+ef", "topk/0.1+ef:bf16"])
@pytest.mark.parametrize("light", ["bf16", "int8/256"])
def test_with_feedback_roundings_inside_nodes_do_not_pile_up(light, spec):
    """What is still missing after many steps is no more than after few."""
    ranks = ranks_of(4, 2000)
    kept, seen, missing = channels(codecs.get(spec), 4), torch.zeros(2000, dtype=torch.float64), []
    for step in range(1, 241):
        seen += reduced(ranks, kept, "avg", f"hierarchical/2:{light}")[0].double()
        missing.append(float((step * total(ranks) / 4 - seen).norm()))
    assert max(missing[160:]) < 1.3 * max(missing[40:80])


@pytest.mark.parametrize(("world", "inside"), [(6, 3), (9, 3), (8, 4), (12, 3)])
@pytest.mark.parametrize("light", ["fp32", "bf16", "int8/256"])
@pytest.mark.parametrize("spec", ["fp32", "int8/256", "int8/tensor~shared", "aps/e4m3"])
def test_nodes_of_more_than_two_ranks_come_near_the_mean_of_all(spec, light, world, inside):
    """A mean in float64, and every rounding on the way: twice inside a node, once or twice between them.

    Blocks of 256 are whole in shards. One rounding is off by at most r of the largest magnitude of its block,
    and magnitudes grow by no more than that: see the test of errors above.
    """
    codec, numel, nodes = codecs.get(spec), 3000, world // inside
    ranks = ranks_of(world, numel)
    results = reduced(ranks, codec, "avg", f"hierarchical/{inside}:{light}")
    assert alike(results)
    largest = float(torch.stack(ranks).abs().max())
    far = {"fp32": 0.0, "aps/e4m3": 2.0**-4 + 2.0**-10}.get(spec, 1 / 254)
    near = {"fp32": 0.0, "bf16": 2.0**-8, "int8/256": 1 / 254}[light]
    allowed = largest * ((1 + near) ** 2 * (1 + far) ** (1 if nodes == 2 else 2) - 1 + 4 * world * UNIT)
    off = (results[0].double() - total(ranks) / world).abs()
    assert bool((off <= allowed).all())


@pytest.mark.parametrize(("world", "numel"), [(2, 100), (4, 100), (4, 20_000)])
@pytest.mark.parametrize("spec", ["bf16+ef", "fp16+ef", "bf16+ef:bf16"])
def test_casts_with_feedback_feed_back_on_the_schedule_that_auto_chooses(spec, world, numel):
    """1 and a part too small for the format: a step rounds to 1, many steps add up to all of it."""
    small, steps = {"b": 2.0**-10, "f": 2.0**-13}[spec[0]], 61
    kept, seen = channels(codecs.get(spec), world), 0.0
    for _ in range(steps):
        results = reduced([torch.full((numel,), 1.0 + small)] * world, kept, "avg")
        assert alike(results)
        seen += float(results[0].double().mean()) / steps
    assert any(bool(each.any()) for channel in kept for each in channel.residuals.values())
    assert seen == pytest.approx(
        1.0 + small, abs=2 * 8 * small / steps
    )  # the residuals are at most a step, on two ways


@pytest.mark.parametrize("op", ["avg", "sum"])
@pytest.mark.parametrize(("spec", "world"), [("bf16+ef", 2), ("bf16+ef:8bit", 3), ("fp16+ef", 4)])
def test_low_rank_feeds_back_what_is_rounded_of_tensors_that_do_not_shrink(spec, world, op):
    """Numbers of which the format holds no part arrive in the end; residuals stay below a step."""
    small = {"b": 2.0**-10, "f": 2.0**-13}[spec[0]]
    x, big, kept = torch.full((9,), 1.0 + small), gauss(40, 30), channels(codecs.get(spec), world)
    weight, seen, steps = 1 if op == "avg" else world, 0.0, 41
    for _ in range(steps):
        ranks = [[x.clone(), big.clone()] for _ in range(world)]
        local.all_reduce(ranks, kept, op, "low_rank/2", name=["small", "big"])
        assert alike(ranks)
        seen = seen + ranks[0][0].double()
    network = 2.0**-7 if world == 3 else 0.0  # what it loses when it adds 16-bit numbers
    assert (seen / steps / weight - x.double()).abs().max() <= 16 * small / steps + network
    assert all(channel.residuals["small/error"].abs().max() > 0 for channel in kept)
    residual = gradient_residual(kept[0], "small", (9,), 0, world).double()
    if not network:
        torch.testing.assert_close(seen + weight * residual, x.double() * steps * weight, rtol=1e-6, atol=0)


@pytest.mark.parametrize("spec", ["bf16+ef", "fp16+ef:8bit"])
def test_a_bad_step_of_tensors_that_do_not_shrink_does_not_spoil_later_ones(spec):
    kept = channels(codecs.get(spec), 3)
    for step in range(3):
        ranks = ranks_of(3, 500, first=10 * step)
        if step == 1:
            ranks[2][300] = math.nan
        results = reduced(ranks, kept, "avg", "low_rank/2")
        assert alike(results)
        assert bool(results[0].isfinite().all()) == (step != 1)


def test_native_refuses_a_feedback_that_it_would_ignore():
    for spec in ("bf16+ef", "fp16+ef", "bf16+ef:8bit"):
        with pytest.raises(
            ScheduleError, match=r"feedback of .* would be ignored.* These can: one_shot, two_shot"
        ):
            reduced(ranks_of(2, 10), spec, "avg", "native")
    ranks = ranks_of(2, 10)  # fp32 rounds nothing that could be fed back
    assert digest(reduced(ranks, "fp32+ef", "avg", "native")[0]) == digest(reduced(ranks, "fp32", "avg")[0])
    assert schedules.get("low_rank/2", codecs.get("bf16+ef")).spec == "low_rank/2"  # its error is its own


@pytest.mark.parametrize("schedule", ["one_shot", "two_shot"])
@pytest.mark.parametrize(
    "spec", ["int4/128+ef", "int4/tensor~shared+ef", "int4/128~shared~sqrt+ef", "aps/e3m0+ef"]
)
def test_the_mean_of_all_residuals_is_what_the_mean_gradient_lacks(spec, schedule):
    """Element by element: so residuals can go to another codec or world."""
    world, kept = 4, channels(codecs.get(spec), 4)
    given, seen = torch.zeros(1024, dtype=torch.float64), torch.zeros(1024, dtype=torch.float64)
    for step in range(5):
        ranks = ranks_of(world, 1024, first=10 * step)
        given += total(ranks) / world
        seen += reduced(ranks, kept, "avg", schedule)[0].double()
    residuals = [
        gradient_residual(channel, "tensor", (1024,), rank, world) for rank, channel in enumerate(kept)
    ]
    assert float((given - seen).abs().max()) > 0.02
    torch.testing.assert_close(total(residuals) / world, given - seen, rtol=0, atol=1e-5)


# Bad input


@pytest.mark.parametrize(
    ("schedule", "message"),
    [
        ("two_shoot", "unknown schedule 'two_shoot'; did you mean 'two_shot'"),
        ("zzz", "unknown schedule .zzz.; `thinwire schedules` lists all"),
        ("", "unknown schedule ''"),
        ("ring/4", "ring takes no option, not '/4'"),
        ("hierarchical/x", "expected a whole number of 1 or more, such as hierarchical/4"),
        ("hierarchical/0", "expected a whole number of 1 or more"),
        ("hierarchical/2:qsgd4/512", "cannot be used inside a node; use fp32, bf16"),
        ("hierarchical/2:aps/e5m2", "cannot be used inside a node"),
        ("hierarchical/2:onebit/64+ef", "cannot be used inside a node"),
        ("low_rank/-1", "expected a whole number of 1 or more, such as low_rank/4"),
        ("accumulate", "the order of additions is one of sequential, ring, tree or a number"),
        ("accumulate/star", "such as accumulate/16"),
        ("accumulate/0", "expected a whole number of 1 or more"),
        ("accumulate/tree+neumaier", r"accepts '\+kahan', not '\+neumaier'"),
    ],
)
def test_unknown_schedules_and_options_are_refused_with_advice(schedule, message):
    with pytest.raises(ScheduleError, match=message):
        local.all_reduce(ranks_of(2, 10), "aps/e5m2", "sum", schedule)


@every_schedule
def test_a_refusal_lists_the_schedules_that_can(schedule):
    for spec, codec in CODECS.items():
        why = schedule.refuses(codec)
        if not why:
            assert schedules.get(schedule, codec) is schedule
            continue
        with pytest.raises(ScheduleError) as caught:
            local.all_reduce(ranks_of(2, 10), channels(codec, 2), "sum", schedule)
        assert why in str(caught.value)
        listed = str(caught.value).split("These can: ")[1].split(", ")
        assert listed == [name for name, each in SCHEDULES.items() if not each.refuses(codec)]
        assert "one_shot" in listed, spec


def test_a_codec_for_whole_tensors_is_not_cut_into_shards():
    codec = codecs.get("onebit/column:8t+ef")
    for schedule in ("two_shot", "ring", "hierarchical/2"):
        with pytest.raises(ScheduleError, match="is for a whole tensor and cannot be cut into shards"):
            schedules.get(schedule, codec)
    assert schedules.get("one_shot", codec).spec == "one_shot"


def test_nodes_that_do_not_divide_the_world_are_told_what_would():
    codec = CODECS["topk/0.01+ef"]
    with pytest.raises(
        ScheduleError, match="8 ranks do not make nodes of 3; these numbers would do: 1, 2, 4, 8"
    ):
        local.all_reduce(ranks_of(8, 10), channels(codec, 8), "sum", "hierarchical/3")
    with pytest.raises(ScheduleError, match="do not make nodes of 5"):
        local.all_reduce(ranks_of(8, 10), "int8/256", "sum", "hierarchical", ranks_per_node=5)


def test_nodes_are_found_where_all_are_alike_and_refused_where_they_are_not():
    alike = {"a": 1, "aaaa": 4, "abc": 1, "aabb": 2, "bbbaaaccc": 3}
    assert {hosts: ranks_per_node(list(hosts)) for hosts in alike} == alike
    for hosts in ("abab", "abba", "aab", "abb", "aabbb", "abcc", "aabaab"):
        with pytest.raises(ScheduleError, match="say how many ranks a node has"):
            ranks_per_node(list(hosts))


@pytest.mark.parametrize("spec", LEARNING)
def test_feedback_without_a_channel_is_refused(spec):
    with pytest.raises(CodecError, match=r"keeps residuals: pass thinwire\.Channel"):
        local.all_reduce(ranks_of(2, 10), spec)


def test_parts_of_a_view_that_is_not_contiguous_are_refused_in_words():
    with pytest.raises(InputError, match="input is not contiguous, so that it has no even parts"):
        arguments.parts(torch.zeros(4, 3).t(), 2, "input")


@pytest.mark.parametrize("op", ["max", None, 3, torch.distributed.ReduceOp.MAX, "mean"])
def test_other_reductions_than_sum_and_mean_are_refused(op):
    with pytest.raises(InputError, match="op must be 'sum' or 'avg'"):
        local.all_reduce(ranks_of(2, 10), "int8/256", op)


def test_reductions_may_be_named_as_torch_does():
    ranks = ranks_of(3, 100)
    for ours, theirs in (("sum", torch.distributed.ReduceOp.SUM), ("avg", torch.distributed.ReduceOp.AVG)):
        assert digest(reduced(ranks, "fp32", ours)[0]) == digest(reduced(ranks, "fp32", theirs)[0])


@pytest.mark.parametrize("schedule", [None, 2, ["ring"]])
def test_a_schedule_is_a_string(schedule):
    with pytest.raises(ScheduleError, match="a schedule is a string such as 'two_shot'"):
        local.all_reduce(ranks_of(2, 10), "int8/256", "sum", schedule)


def test_tensors_that_cannot_be_reduced_are_refused():
    for bad, message in (
        (torch.zeros(3, dtype=torch.float64), "expected float32, bfloat16 or float16, got torch.float64"),
        (torch.zeros(3, dtype=torch.int32), "got torch.int32"),
        ([], "got an empty list"),
        ([torch.zeros(3), torch.zeros(3).half()], "of one dtype and on one device"),
        (torch.zeros(3, device="meta"), "on cpu or cuda"),
    ):
        with pytest.raises(InputError, match=message):
            local.all_reduce([bad, bad], "int8/256")


def test_ranks_that_call_different_things_are_told_so():
    for one, other in ((gauss(10), gauss(11)), (gauss(10), gauss(10).half())):
        with pytest.raises(CommError, match="ranks disagree"):
            local.all_reduce([one, other], "int8/256")
    with pytest.raises(CommError, match="ranks disagree"):
        local.all_reduce(ranks_of(2, 10), ["int8/256", "int4/128"])
    for codec, schedule in (("onebit/column", "one_shot"), ("fp32", "low_rank/1")):  # which see a matrix
        with pytest.raises(CommError, match=r"ranks disagree.*shapes \((8, 5|5, 8)\)"):
            local.all_reduce([gauss(8, 5), gauss(5, 8)], codec, schedule=schedule)


def test_calls_that_are_kept_are_told_apart_by_all_that_decides_them():
    """As on a group, which works a call out once: one after another, each has the result of a new one."""
    plans = [arguments.PlanCache() for _ in range(2)]
    changes = ({}, {"op": "avg"}, {"schedule": "two_shot"}, {"codec": "onebit/column"}, {"name": "b"}, {})
    for change in changes:
        how = {"codec": "qsgd4/512", "op": "sum", "schedule": "one_shot", "name": "a"} | change
        for x in (gauss(40), gauss(8, 5), gauss(5, 8), gauss(40).half()):
            kept, new = ([x * (rank + 1) for rank in range(2)] for _ in range(2))
            places = [local.Rank(rank, 2, plans=each) for rank, each in enumerate(plans)]
            calls = [
                arguments.all_reduce_job([each], endpoint=here, rng=Stream(1), **how)
                for each, here in zip(kept, places, strict=True)
            ]
            local.run(calls)
            local.all_reduce(new, rng=Stream(1), **how)
            assert digest(kept[0]) == digest(new[0]), (how, x.shape, x.dtype)


def test_ranks_that_name_tensors_in_another_order_are_told_so():
    bucket = [gauss(10), gauss(10)]
    calls = [
        arguments.all_reduce_job(bucket, "int8/256", "sum", "auto", local.Rank(rank, 2), names)
        for rank, names in enumerate((["a", "b"], ["b", "a"]))
    ]
    with pytest.raises(CommError, match="ranks disagree"):
        local.run(calls)
    assert len({arguments.named(names) for names in (["a", "b", "c"], ["a", "c", "b"], ["a", "b", "d"])}) == 3


def test_names_of_a_bucket_must_differ():
    for names in (["a", "a"], ["a"]):
        with pytest.raises(InputError, match="2 tensors need as many different names"):
            local.all_reduce([[gauss(3), gauss(4)]] * 2, "int8/256", name=names)


@pytest.mark.parametrize("spec", ["int8/256", "qsgd4/512"])
def test_what_is_no_stream_is_refused_even_where_nothing_is_random(spec):
    with pytest.raises(CodecError, match=r"rng must be a thinwire\.Stream, not int"):
        local.all_reduce(ranks_of(2, 100), spec, rng=7)


def test_another_size_under_the_same_name_is_refused():
    kept = channels(CODECS["onebit/64+ef"], 2)
    reduced(ranks_of(2, 100), kept)
    with pytest.raises(InputError, match="give tensors of another shape another name"):
        reduced(ranks_of(2, 101), kept)


# A schedule is data


@every_schedule
def test_schedules_are_frozen_and_known_by_their_spec(schedule):
    assert schedules.get(schedule.spec) is schedule
    assert schedules.get(schedule) is schedule
    with pytest.raises(dataclasses.FrozenInstanceError):
        schedule.spec = "other"


def test_a_residual_of_another_shape_is_refused_before_wires_travel():
    """Else other ranks would wait for a wire that never comes."""

    def refuse(x, stage):
        raise InputError(f"{tuple(x.shape)} at {stage}")

    context = SimpleNamespace(
        codec=CODECS["int8/256"], world=2, rank=0, encode=print, check=refuse,
        buffer=lambda _, shape, like: like.new_empty(shape, dtype=torch.uint8),
    )  # fmt: skip
    with pytest.raises(InputError, match=r"\(5,\) at sent"):
        next(gather.gathered(torch.zeros(5), context, None))
