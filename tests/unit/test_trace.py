"""What a trace and an explanation say, against what ranks really send each other."""

import functools
import resource
from collections import Counter
from operator import attrgetter

import pytest
import torch

from thinwire import Channel, codecs, explain
from thinwire.errors import InputError, ScheduleError
from thinwire.runtimes import arguments, local
from thinwire.runtimes import job as jobs
from thinwire.runtimes import plan as plans
from thinwire.runtimes.trace import count, trace
from thinwire.schedules import SCHEDULES, AllGather, AllReduce, AllToAll, Item
from thinwire.schedules.choose import SMALL_NBYTES, choose
from thinwire.schedules.exchange import arriving, parts

DOZEN = (
    "fp32", "bf16", "int8/tensor", "int8/256", "int4/128~sr", "e4m3fn/128", "nvfp4", "aps/e5m2",
    "int8/256~shared",
    "onebit/64+ef", "topk/0.01+ef", "randomk/0.01~unbiased", "threshold/0.001~cap0.1+ef",
)  # fmt: skip
HUGE_NUMEL, HUGE_WORLD = 70_000_000_000, 10_000

every_schedule = pytest.mark.parametrize("schedule", SCHEDULES.values(), ids=list(SCHEDULES))


def gauss(numel, seed=0):
    return torch.randn(numel, generator=torch.Generator().manual_seed(seed))


def served(schedule, world, specs=DOZEN):
    """The codecs that a schedule serves in a world; without any, a test would check nothing."""
    assert world % schedule.ranks_per_node == 0
    can = [codecs.get(spec) for spec in specs if not schedule.refuses(codecs.get(spec))]
    assert can
    return can


def watched(steps, rank, world, count):
    """The same exchanges; the bytes in their tensors are counted."""
    for request in steps:
        peers = request.peers or range(world)
        place = peers.index(rank)
        others = [i for i in range(len(peers)) if i != place]
        count["exchanges"] += 1
        if isinstance(request, AllGather):
            sizes = [part.numel() for part in parts(request.wires, request.sizes, request.stride)]
            assert sizes == list(request.sizes)
            sent, received = [sizes[place]] * len(others), [sizes[i] for i in others]
        elif isinstance(request, AllToAll):
            sizes = [part.numel() for part in parts(request.wire, request.sizes, request.stride)]
            coming = arriving(request, place)
            room = [part.numel() for part in parts(request.out.view(-1), coming, request.stride)]
            assert sizes == list(request.sizes)
            assert room == list(coming)
            sent, received = [sizes[i] for i in others], [room[i] for i in others]
        elif isinstance(request, AllReduce):  # as on a ring: a share in each of 2 (N - 1) steps
            hops = 2 * len(others)
            share = hops * request.values.nbytes // len(peers)
            sent, received = [share] + [1] * (hops - 1) if hops else [], [share]
            count["sent"] -= max(hops - 1, 0)
        else:
            sent = [] if request.wire is None else [request.wire.numel()]
            received = [] if request.out is None else [request.out.numel()]
        count["sent"] += sum(sent)
        count["received"] += sum(received)
        count["messages"] += len(sent) if isinstance(request, AllReduce) else sum(map(bool, sent))
        yield request


def moved(numels, codec, world, schedule):
    """What every rank really sends and receives."""
    counts = [Counter() for _ in range(world)]
    made = []
    for rank in range(world):
        tensors = [gauss(numel, rank) for numel in numels]
        channel = Channel(codec) if codec.feedback else codec
        made.append(arguments.all_reduce_job(tensors, channel, "sum", schedule, local.Rank(rank, world)))

    def lockstep(generators):
        local.lockstep([watched(each, r, world, counts[r]) for r, each in enumerate(generators)])

    if made[0].agreement is not None:
        lockstep([job.agreement for job in made])
    for starts in zip(*(job.starts() for job in made), strict=True):
        lockstep([start(jobs.Buffers()) for start in starts])
    return counts


def compare(numels, codec, world, schedule):
    for rank, counted in enumerate(moved(numels, codec, world, schedule)):
        traced = trace(numels, codec, world, schedule, rank=rank)
        where = f"{codec.spec}, {numels}, rank {rank} of {world}"
        assert traced.sent_nbytes == counted["sent"], where
        assert traced.received_nbytes == counted["received"], where
        assert traced.messages == counted["messages"], where
        assert traced.exchanges == counted["exchanges"] == sum(traced.kinds.values()), where


# Counts


@pytest.mark.parametrize(
    ("schedule", "world"),
    [(each, n) for each in SCHEDULES.values() for n in (2, 3, 4, 5, 8) if n % each.ranks_per_node == 0],
    ids=lambda part: getattr(part, "spec", part),
)
def test_a_trace_counts_what_ranks_send(schedule, world, monkeypatch):
    monkeypatch.setattr(plans, "spans", functools.partial(plans.spans, piece=1024))
    for codec in served(schedule, world):
        for numels in ([0], [1], [1000], [2600], [300, 0, 7, 3000, 1]):
            compare(numels, codec, world, schedule)


@every_schedule
def test_a_trace_counts_what_ranks_send_of_a_large_tensor(schedule):
    for codec in served(schedule, 4, ("fp32", "int8/256", "aps/e5m2", "topk/0.01+ef")):
        compare([300_000], codec, 4, schedule)


@pytest.mark.parametrize("spec", ["int8/256", "aps/e5m2", "fp32"])
def test_tensors_of_several_pieces_are_counted_piece_by_piece(spec):
    numel = plans.PIECE + 1000
    for schedule in ("two_shot", "ring"):
        compare([numel], codecs.get(spec), 3, SCHEDULES[schedule])


def test_pieces_of_one_size_and_different_codecs_are_counted_apart():
    numel = 2 << 20

    def sent(*specs):
        items = [Item(numel, Channel(spec), f"w{i}", 0, i * numel, i) for i, spec in enumerate(specs)]
        call = jobs.Call("all_reduce", "several", (numel,) * len(specs), "float32")
        return count(
            plans.ReducePlan(items, SCHEDULES["two_shot"], plans.Ranks(0, 4), call), 0, 4
        ).sent_nbytes

    assert sent("int8/256", "int4/128") == sent("int4/128", "int8/256") == sent("int8/256") + sent("int4/128")


@pytest.mark.parametrize(
    "schedule", [each for each in SCHEDULES.values() if each.ranks_per_node == 1], ids=attrgetter("spec")
)
def test_a_rank_alone_sends_nothing(schedule):
    for codec in served(schedule, 1):
        traced = trace([1000, 0, 7], codec, 1, schedule)
        assert (traced.sent_nbytes, traced.received_nbytes, traced.messages, traced.exchanges) == (0, 0, 0, 0)


def test_bytes_are_those_of_the_table():
    """What the docstring of the schedules promises, for a wire of b bytes."""
    codec, world, numel = codecs.get("int8/256"), 8, 8 * 256 * 10
    wire, shard = codec.nbytes(numel), codec.nbytes(numel // world)
    traced = {each: trace(numel, codec, world, each) for each in ("one_shot", "two_shot", "ring", "tree")}
    assert traced["one_shot"].sent_nbytes == (world - 1) * wire
    assert traced["two_shot"].sent_nbytes == traced["ring"].sent_nbytes == 2 * (world - 1) * shard
    assert traced["tree"].sent_nbytes == 3 * wire  # rank 0 sends to three
    assert [each.exchanges for each in traced.values()] == [1, 2, 14, 6]


@every_schedule
def test_all_that_is_sent_is_received(schedule):
    for codec in served(schedule, 8, ("int8/256", "aps/e5m2", "topk/0.01+ef", "bf16")):
        traced = [trace(1000, codec, 8, schedule, rank=rank) for rank in range(8)]
        assert sum(each.sent_nbytes for each in traced) == sum(each.received_nbytes for each in traced)


@every_schedule
def test_seventy_billion_elements_on_ten_thousand_ranks_take_no_memory(schedule):
    for codec in served(schedule, HUGE_WORLD, ("bf16", "int8/256", "aps/e5m2", "topk/0.01")):
        before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        traced = trace(HUGE_NUMEL, codec, HUGE_WORLD, schedule)
        assert traced.sent_nbytes > HUGE_NUMEL / 100
        assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 500_000  # kB


def test_a_world_that_does_not_fit_is_refused():
    with pytest.raises(ScheduleError, match="3 ranks do not make nodes of 2"):
        trace(1000, "int8/256", 3, "hierarchical/2")
    for world, rank, numel in ((0, 0, 10), (4, 4, 10), (4, -1, 10), (4, 0, -1)):
        with pytest.raises(InputError, match="expected 0 <= rank < world and sizes >= 0"):
            trace(numel, "int8/256", world, rank=rank)
    with pytest.raises(ScheduleError, match="cannot serve"):
        trace(1000, "int8/256", 4, "native")


# What auto chooses


@pytest.mark.parametrize(
    ("spec", "numel", "world", "schedule", "reason"),
    [
        ("fp32", 10, 8, "native", "the network itself can add fp32"),
        ("bf16", 10**9, 8, "native", "the network itself can add bf16"),
        ("topk/0.01", 10**7, 8, "one_shot", "gathered and added where they belong"),
        ("dct/64:8", 10**7, 8, "one_shot", "gathered"),
        ("onebit/column:8t", 8 * 10**5, 8, "one_shot", "cannot be cut into shards"),
        ("int8/256", 10**8, 2, "one_shot", "between two ranks"),
        ("int8/256", 10**8, 1, "one_shot", "between two ranks"),
        ("int8/256", 1000, 8, "one_shot", "are few"),
        ("int8/256", 10**7, 8, "two_shot", "2 x 7/8 of a wire"),
        ("aps/e5m2", 10**7, 8, "two_shot", "2 x 7/8"),
        ("onebit/64", 10**7, 8, "two_shot", "2 x 7/8"),
    ],
)
def test_auto_has_a_schedule_and_a_reason(spec, numel, world, schedule, reason):
    chosen, why = choose(codecs.get(spec), numel, world)
    assert chosen == schedule
    assert reason in why
    assert trace(numel, spec, world).schedule == schedule
    assert not SCHEDULES[schedule].refuses(codecs.get(spec))


def test_auto_changes_over_where_one_exchange_sends_too_much():
    codec = codecs.get("int8/256")
    largest = max(n for n in range(1, 40_000) if 2 * codec.nbytes(n) <= SMALL_NBYTES)
    assert choose(codec, largest, 3)[0] == "one_shot"
    assert choose(codec, largest + 1, 3)[0] == "two_shot"


@pytest.mark.parametrize("spec", codecs.CODECS)
def test_auto_chooses_what_can_serve(spec):
    codec = codecs.get(spec)
    for numel, world in ((0, 4), (1, 1), (1000, 2), (10**6, 5), (10**8, 64)):
        schedule = choose(codec, numel, world)[0]
        assert not SCHEDULES[schedule].refuses(codec)


# Explanations


@pytest.mark.parametrize("spec", ["int8/256", "fp32", "topk/0.01+ef", "aps/e4m3", "onebit/column+ef"])
@pytest.mark.parametrize("world", [2, 3, 8])
def test_an_explanation_names_the_schedule_the_reason_and_all_choices(spec, world):
    explained = explain(1_000_000, spec, world=world)
    text = str(explained)
    assert text.startswith(f"{explained.schedule}: all_reduce of 1,000,000 elements, {spec}, {world} ranks")
    assert f"because {explained.why}" in text
    can = [
        name
        for name, each in SCHEDULES.items()
        if not each.refuses(codecs.get(spec)) and not world % each.ranks_per_node and name != "low_rank/2"
    ]  # which needs a matrix
    assert [each.schedule for each in explained.choices] == can
    assert explained.chosen.schedule == explained.schedule
    for each in explained.choices:
        assert f"{each.sent_nbytes:,}" in text


def test_an_explanation_of_a_tensor_knows_its_shape():
    assert explain(torch.zeros(64, 1000), "onebit/column", world=4).codec == "onebit/column:64t"
    assert explain(torch.zeros(64_000), "onebit/column", world=4).codec == "onebit/column"


def test_shares_of_fp32_are_right():
    explained = explain(1 << 20, "int8/256", world=4)
    assert explained.fp32_nbytes == 2 * 3 * (4 << 20) // 4
    assert f"{explained.chosen.sent_nbytes / explained.fp32_nbytes:.1%}" in str(explained)


def test_an_explanation_of_nothing_and_of_one_rank_can_be_read():
    assert "0 elements" in str(explain(0, "int8/256", world=4))
    assert "1 ranks" in str(explain(1000, "int8/256", world=1))
