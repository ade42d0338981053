"""Plans of buckets, on ranks of one process: where gradients lie, what is copied, and what is kept."""

import pytest
import torch

from thinwire.channel import Channel
from thinwire.integrations import routes
from thinwire.integrations.routes import GradientPlace, Route, RoutedTensor, Router
from thinwire.policy import Policy, Rule, TensorInfo
from thinwire.rounding import Stream
from thinwire.runtimes import local
from thinwire.runtimes.trace import trace

WORLD = 3
SHAPES = {"a": (20, 30), "turned": (40, 16), "b": (500,)}
STRIDES = {"a": (30, 1), "turned": (1, 40), "b": (1,)}
MANY = 1240 + 500


class Runtime:
    """One rank; jobs that it gets are run with those of the others."""

    world, together, number = WORLD, 0, 0

    def __init__(self, rank):
        self.rank, self.jobs, self.asked = rank, [], 0

    def ranks_per_node(self):
        return 1

    def replay(self, *_):
        self.asked += 1

    def submit(self, job):
        self.jobs.append(job)


def buffer(rank, dtype=torch.float32):
    return torch.randn(MANY, generator=torch.Generator().manual_seed(rank)).to(dtype)


def places():
    offset, made = 0, []
    for name, shape in SHAPES.items():
        made.append(GradientPlace(offset, shape, STRIDES[name]))
        offset += made[-1].numel
    return made


def sent(codecs, schedule="two_shot"):
    return [
        RoutedTensor(TensorInfo(name, "weight", shape), Rule(codec, schedule), Route(codec, schedule))
        for (name, shape), codec in zip(SHAPES.items(), codecs, strict=True)
    ]


def planned(codecs, schedule="two_shot", dtype=torch.float32):
    """Runtimes, buffers and plans of all ranks."""
    runtimes = [Runtime(rank) for rank in range(WORLD)]
    buffers = [buffer(rank, dtype) for rank in range(WORLD)]
    plans = []
    for runtime, own in zip(runtimes, buffers, strict=True):
        channels = {codec: Channel(codec) for codec in codecs}
        plans.append(routes.make(sent(codecs, schedule), places(), own, runtime, channels.__getitem__))
    return runtimes, buffers, plans


def reduce(runtimes, buffers, plans, rng=None):
    for runtime, own, plan in zip(runtimes, buffers, plans, strict=True):
        for part in plan.calls.parts:
            part.start(runtime, [own], rng)
    for jobs in zip(*(runtime.jobs for runtime in runtimes), strict=True):
        local.run(list(jobs))


def alone(name, place, codec, schedule, dtype=torch.float32):
    """The mean of one tensor, sent by itself."""
    ranks = [place.of(buffer(rank, dtype)).contiguous() for rank in range(WORLD)]
    local.all_reduce(ranks, codec, "avg", schedule, name=name)
    return ranks[0]


@pytest.mark.parametrize(
    ("codecs", "schedule", "parts"),
    [
        (("int8/256", "int8/256", "int8/256"), "two_shot", 1),
        (("int8/256", "e5m2/128", "fp32"), "two_shot", 1),
        (("int8/256", "bf16", "int8/256"), "tree", 2),
    ],
)
def test_every_tensor_gets_its_mean_in_its_place(codecs, schedule, parts):
    runtimes, buffers, plans = planned(codecs, schedule)
    assert [len(plan.calls.parts) for plan in plans] == [parts] * WORLD, "codecs share a call if they can"
    reduce(runtimes, buffers, plans)
    for (name, codec), place in zip(zip(SHAPES, codecs, strict=True), places(), strict=True):
        wanted = alone(name, place, codec, schedule)
        for own in buffers:
            assert torch.equal(place.of(own), wanted), name


def test_gradients_of_other_dtypes_are_copied_there_and_back():
    runtimes, buffers, plans = planned(("int8/256",) * 3, dtype=torch.bfloat16)
    reduce(runtimes, buffers, plans)
    for name, place in zip(SHAPES, places(), strict=True):
        wanted = alone(name, place, "int8/256", "two_shot", torch.bfloat16)
        for own in buffers:
            assert own.dtype == torch.bfloat16
            assert torch.equal(place.of(own), wanted), name


def test_a_gradient_inside_a_larger_storage_is_found():
    whole = torch.arange(40.0)
    own = whole[10:]
    gradient = own[4:16].view(3, 4)
    place = routes.place(gradient, own)
    assert (place.offset, place.size, place.stride, place.numel) == (4, (3, 4), (4, 1), 12)
    assert place.of(own).data_ptr() == gradient.data_ptr()
    assert torch.equal(place.of(own), gradient)


@pytest.mark.parametrize(
    ("size", "stride", "contiguous"),
    [
        ((3, 4), (4, 1), True),
        ((3, 4), (1, 3), False),
        ((1, 4), (99, 1), True),
        ((3, 1), (1, 7), True),
        ((3, 4), (5, 1), False),
        ((), (), True),
        ((2, 3, 4), (12, 4, 1), True),
        ((2, 3, 4), (12, 1, 3), False),
    ],
)
def test_what_is_contiguous_is_what_torch_says(size, stride, contiguous):
    place = GradientPlace(0, size, stride)
    assert place.is_contiguous == contiguous
    assert place.of(torch.zeros(200)).is_contiguous() == contiguous


def test_bytes_are_those_of_the_calls():
    codecs = ("int8/256", "int8/256", "fp32")
    _, _, plans = planned(codecs)
    pairs = zip(places(), codecs, strict=True)
    expected = sum(trace(place.numel, codec, WORLD, "two_shot").sent_nbytes for place, codec in pairs)
    for plan in plans:
        assert 0.9 * expected < plan.sent_nbytes <= expected, "the rank that sends most sends that"
        assert plan.fp32_nbytes == trace(MANY, "fp32", WORLD, "native").sent_nbytes
        assert not plan.plain
        assert plan.wire_nbytes == plans[0].wire_nbytes > 0
    _, _, plain = planned(("fp32",) * 3, "native")
    assert plain[0].plain
    assert plain[0].calls.parts == ()
    assert (plain[0].sent_nbytes, plain[0].wire_nbytes) == (plain[0].fp32_nbytes, 4 * MANY)
    _, _, half = planned(("fp32",) * 3, "native", torch.bfloat16)
    assert (half[0].sent_nbytes, half[0].wire_nbytes) == (half[0].fp32_nbytes // 2, 2 * MANY)


def test_only_calls_without_copies_are_replayed():
    for codecs, asked in ((("int8/256",) * 3, 0), (("int8/256",) * 3, 0)):
        runtimes, buffers, plans = planned(codecs)
        reduce(runtimes, buffers, plans)
        assert {runtime.asked for runtime in runtimes} == {asked}, "one gradient is turned, and copied"
    runtime, own = Runtime(0), torch.zeros(100)
    tensor = RoutedTensor(TensorInfo("a", "weight", (100,)), Rule("int8/256"), Route("int8/256", "two_shot"))
    plan = routes.make([tensor], [GradientPlace(0, (100,), (1,))], own, runtime, Channel)
    plan.calls.parts[0].start(runtime, [own], None)
    assert runtime.asked == 1
    assert runtime.jobs[0].result is own


@pytest.mark.parametrize(("codec", "random"), [("int8/256", False), ("qsgd4/512", True)])
def test_calls_that_round_at_random_say_so(codec, random):
    runtimes, buffers, plans = planned((codec, "int8/256", "int8/256"))
    assert {plan.calls.random for plan in plans} == {random}
    assert {part.plan.call.random for plan in plans for part in plan.calls.parts} == {random}
    reduce(runtimes, buffers, plans, Stream(3) if random else None)


def test_ranks_compare_names_codecs_and_shapes():
    def call(codecs, schedule="two_shot"):
        return planned(codecs, schedule)[2][0].calls.parts[0].plan.call

    one, other = call(("int8/256", "int8/256", "e5m2/128")), call(("int8/256", "e5m2/128", "e5m2/128"))
    assert one != other
    assert "codecs by tensor 001" in one.detail
    assert "codecs by tensor 011" in other.detail
    assert "named 'a' and 2 more" in one.detail
    assert one.numels == (600, 640, 500)
    assert "shapes" not in one.detail
    assert "codecs by tensor" not in call(("int8/256",) * 3).detail
    assert "shapes (20, 30), (40, 16)" in call(("int8/256",) * 3, "tree").detail


def test_neighbours_that_the_network_adds_travel_as_one():
    plain = routes.make(sent(("bf16",) * 3, "native"), places(), buffer(0), Runtime(0), Channel)
    (part,) = plain.calls.parts
    assert [item.numel for item in part.plan.items] == [600, 640, 500], "a turned one is between them"
    flat = [GradientPlace(at, (50,), (1,)) for at in (0, 50, 120)]
    tensors = [
        RoutedTensor(TensorInfo(name, "weight", (50,)), Rule("bf16"), Route("bf16", "native"))
        for name in "abc"
    ]
    joined = routes.make(tensors, flat, torch.zeros(200), Runtime(0), Channel).calls.parts[0].plan.items
    assert [(item.start, item.numel) for item in joined] == [(0, 100), (120, 50)], "not over a gap"


def router(codec="int8/256", **more):
    return Router(Policy(codec, (Rule(codec, "two_shot"),)), None, Channel, **more)


def test_plans_are_kept_until_their_tensors_are_planned_anew():
    _, _, (one, other, third) = planned(("int8/256",) * 3)
    third.sent = tuple(each._replace(tensor=TensorInfo("other", "weight", (5,))) for each in third.sent[:1])
    keeps = router()
    assert keeps.find("first", 1, 0) is None
    keeps.keep("first", one, 1, 0)
    assert keeps.find("first", 2, 0) is one
    keeps.keep("apart", third, 1, 0)
    assert keeps.find("first", 1, 0) is one
    keeps.keep("rebuilt", other, 2, 0)
    assert keeps.find("first", 2, 0) is None, "its tensors are in another bucket now"
    assert keeps.find("rebuilt", 2, 0) is other
    assert keeps.find("apart", 2, 0) is third
    keeps.follow(Policy("fp32", (Rule("fp32", "two_shot"),)))
    assert keeps.find("rebuilt", 2, 0) is None
    assert keeps.policy.name == "fp32"
    assert keeps.level == 0


def test_plans_of_other_phases_are_others():
    policy = Policy("two", (Rule("fp32", "two_shot", last_step=9), Rule("int8/256", "two_shot")))
    keeps = Router(policy, None, Channel)
    _, _, (plan, *_) = planned(("fp32",) * 3)
    keeps.keep("bucket", plan, 3, 0)
    assert keeps.find("bucket", 9, 0) is plan
    assert keeps.find("bucket", 10, 0) is None
    tensor = TensorInfo("a", "weight", (700,))
    assert [keeps.route(tensor, step, 0, 4).route.codec for step in (9, 10)] == ["fp32", "int8/256"]


def test_calls_of_buckets_that_are_sent_together_are_made_once():
    _, (own, second, _), (one, other, _) = planned(("int8/256",) * 3)
    keeps = router()
    keeps.keep("first", one, 1, 0)
    assert keeps.calls([one], [own]) is one.calls
    keeps._plans["second"] = other
    both = keeps.calls([one, other], [own, second])
    assert keeps.calls([one, other], [own, second]) is both
    (part,) = both.parts
    assert [item.vector for item in part.plan.items if item.name != "turned"] == [0, 0, 1, 1]
    assert {each.bucket for each in part.copied} == {0, 1}
    keeps.forget()
    assert keeps.calls([one, other], [own, second]) is not both


def test_the_future_of_a_buffer_is_made_once():
    _, (own, second, _), (plan, *_) = planned(("int8/256",) * 3)
    first = plan.given(own)
    assert first.value() is own
    assert plan.given(own) is first
    assert plan.given(second).value() is second
    gradients = [gradient for _, gradient in plan.gradients(own)]
    assert [tuple(each.shape) for each in gradients] == list(SHAPES.values())
    assert gradients[2].data_ptr() == own[1240:].data_ptr()
