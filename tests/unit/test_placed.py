"""Plans of placed networks: names, ranks of operations, and the one list that all ranks walk."""

import random

import pytest
import torch
from torch import nn

from thinwire.errors import CommError, InputError
from thinwire.parallel import Placed
from thinwire.parallel.placed_batch import joined, parted, sizes_of
from thinwire.parallel.placed_graph import traced
from thinwire.parallel.placed_list import Message, Stretch, lists
from thinwire.parallel.placed_names import Names, checked
from thinwire.parallel.placed_order import SHARED, Program, order_of
from thinwire.parallel.placed_post import as_words, words
from thinwire.parallel.placed_ranks import ranks_of
from thinwire.parallel.placed_record import Record
from thinwire.parallel.placed_state import Elsewhere, prune
from thinwire.parallel.placed_values import Form, Skeleton


class Net(nn.Module):
    """A stem that two branches read, a residual, a concatenation and a head."""

    def __init__(self):
        super().__init__()
        self.stem, self.head = nn.Linear(4, 8), nn.Linear(16, 2)
        self.left = nn.Sequential(nn.Linear(8, 8), nn.ReLU())
        self.right = nn.Sequential(nn.Linear(8, 8), nn.ReLU())

    def forward(self, x):
        x = self.stem(x)
        one, two = self.left(x), self.right(x)
        return self.head(torch.cat([one + x, two + x], dim=1))


def program(net, placement, world, chunks=1, rows=4, width=4):
    graphs = traced(net, checked(placement, world))
    x = torch.ones(rows, width)
    [name] = (node.name for node in graphs.graphs[True].nodes if node.op == "placeholder")
    values = Skeleton(net).values(graphs.graphs[True], {name: x}, True)
    ranks = ranks_of(graphs.graphs[True], values, graphs.wanted[True], world)
    return Program(graphs.graphs[True], [values] * chunks, ranks, world)


def check(found, made):
    """Every rank has what it needs, whenever it needs it; nothing is sent twice."""
    have, sent, computed = set(), set(), []
    for item in made.forward:
        if isinstance(item, Message):
            assert (item.spot, item.source) in have
            assert (item.spot, item.to) not in have | sent
            sent.add((item.spot, item.to))
            continue
        inside = set()
        for name in item.nodes:
            for each in found.inputs[name]:
                spot = found.spot(each, item.chunk)
                assert each in inside or (spot, item.rank) in have | sent, (name, each)
            inside.add(name)
            computed.append((name, item.chunk, item.rank))
        have |= {((name, item.chunk), item.rank) for name in item.kept}
    wanted = [
        (node.name, chunk, rank)
        for node in found.order
        for chunk in ([SHARED] if node.name in found.shared else range(found.chunks))
        for rank in found.ranks[node.name]
    ]
    assert sorted(computed) == sorted(wanted)
    for name in found.outputs:
        for chunk in range(found.chunks):
            spot = found.spot(name, chunk)
            assert all((spot, rank) in have | sent for rank in range(found.world))
    check_back(found, made)


def check_back(found, made):
    """A gradient is sent after all that add to it, and before the computation that it is for."""
    at = {id(item): i for i, item in enumerate(made.backward) if isinstance(item, Stretch)}
    forward = [item for item in made.forward if isinstance(item, Stretch)]
    assert sorted(at) == sorted(id(item) for item in forward)
    for item in forward:
        for other in forward:
            if other.rank == item.rank and {(n, other.chunk) for n in other.kept} & set(item.uses):
                assert at[id(item)] < at[id(other)]
    used = {
        (spot, item.rank)
        for item in forward
        for spot in item.uses
        if item.rank not in found.ranks[spot[0]] and found.value(spot).grad
    }
    messages = [(i, item) for i, item in enumerate(made.backward) if isinstance(item, Message)]
    assert sorted((item.spot, item.to) for _, item in messages) == sorted(used)
    for i, item in messages:
        assert all(at[id(each)] < i for each in forward if each.rank == item.to and item.spot in each.uses)
        assert all(
            at[id(each)] > i
            for each in forward
            if each.rank == item.source and item.chunk == each.chunk and item.node in each.nodes
        )


def test_one_message_for_a_value_and_a_rank():
    found = program(Net(), {"*": 0, "right": 1}, 2)
    made = lists(found)
    check(found, made)
    messages = [(each.node, each.source, each.to) for each in made.forward if isinstance(each, Message)]
    assert messages == [("stem", 0, 1), ("add_1", 1, 0), ("head", 0, 1)], (
        "x is used twice on rank 1, sent once"
    )
    back = [(each.node, each.source, each.to) for each in made.backward if isinstance(each, Message)]
    assert back == [("add_1", 1, 0), ("stem", 0, 1)]


def test_operations_go_where_the_fewest_bytes_are_sent():
    found = program(Net(), {"*": 0, "right": 1}, 2)
    assert found.ranks["add"] == (0,)
    assert found.ranks["add_1"] == (1,), "the stem's output is there already"
    assert found.ranks["cat"] == (0,), "equal bytes: the lowest rank"


def test_an_operation_can_be_named():
    assert program(Net(), {"*": 0, "right": 1, "cat": 1, "add_1": 0}, 2).ranks["cat"] == (1,)
    found = program(Net(), {"*": 0, "left_0": 1, "left_1": 1}, 2)
    assert found.ranks["left_0"] == found.ranks["left_1"] == (1,)
    with pytest.raises(InputError, match=r"operation 'left_0' on rank 1 is 'left\.0', which is on rank 0"):
        traced(Net(), checked({"*": 0, "left.0": 0, "left_0": 1}, 2))
    with pytest.raises(InputError, match=r"'catt'; did you mean 'cat'"):
        traced(Net(), checked({"*": 0, "right": 1, "catt": 1}, 2))


def test_what_follows_from_the_inputs_is_computed_where_it_is_used():
    class Masked(nn.Module):
        def __init__(self):
            super().__init__()
            self.one, self.two = nn.Linear(4, 4), nn.Linear(4, 4)

        def forward(self, x):
            mask = (x > 0).float()
            return self.two(self.one(x) * mask) * mask

    found = program(Masked(), {"one": 0, "two": 1}, 3)
    assert found.ranks["gt"] == found.ranks["float_1"] == (0, 1)
    assert {each.node for each in lists(found).forward if isinstance(each, Message)} == {"mul", "mul_1"}


def test_constants_are_not_sent():
    class Sized(nn.Module):
        def __init__(self):
            super().__init__()
            self.one, self.two = nn.Linear(4, 4), nn.Linear(4, 4)

        def forward(self, x):
            return self.two(self.one(x).view(x.shape[0], -1))

    assert "getattr_1" not in program(Sized(), {"one": 0, "two": 1}, 2).ranks


def test_micro_batches_fill_a_pipeline():
    """The first rank goes on with the next micro-batch; the last one begins when the first is done."""
    net = nn.Sequential(*(nn.Linear(64, 64) for _ in range(4)))
    found = program(net, {"0": 0, "1": 0, "2": 1, "3": 1}, 2, chunks=3, rows=4096, width=64)
    made = lists(found)
    check(found, made)
    order = [(each.rank, each.chunk) for each in made.forward if isinstance(each, Stretch)]
    assert order.index((0, 1)) < order.index((1, 1))
    assert order.index((1, 0)) < order.index((0, 2)) + 2
    assert [chunk for rank, chunk in order if rank == 0] == [0, 1, 2]
    back = [(each.rank, each.chunk) for each in made.backward if isinstance(each, Stretch)]
    assert back == order[::-1]


def test_a_rank_with_both_ends_does_not_wait_for_the_way_around():
    net = nn.Sequential(*(nn.Linear(64, 64) for _ in range(3)))
    found = program(net, {"0": 0, "1": 1, "2": 0}, 2, chunks=3, rows=4096, width=64)
    made = lists(found)
    check(found, made)
    first = [each.nodes for each in made.forward if isinstance(each, Stretch) and each.rank == 0]
    assert first[:2] == [("_0",), ("_0",)], "the second micro-batch begins before the first is back"


class Random(nn.Module):
    """A network drawn at random: layers and sums of earlier values."""

    def __init__(self, seed, count=12):
        super().__init__()
        self.draw, self.count = random.Random(seed), count
        self.layers = nn.ModuleList(nn.Linear(4, 4) for _ in range(count))
        self.weight = nn.Parameter(torch.ones(4))
        self.picks = [
            (self.draw.randrange(i + 1), self.draw.randrange(i + 1), self.draw.random()) for i in range(count)
        ]

    def forward(self, x):
        values = [x]
        for layer, (one, two, kind) in zip(self.layers, self.picks, strict=True):
            mixed = values[one] + values[two] if kind < 0.7 else values[one] * self.weight
            values.append(layer(mixed) if kind > 0.2 else mixed.tanh())
        return {"last": values[-1], "some": (values[-2], values[self.count // 2])}


@pytest.mark.parametrize("seed", range(30))
def test_any_network_and_placement_gives_a_right_list(seed):
    draw = random.Random(1000 + seed)
    world, chunks = draw.randint(1, 4), draw.randint(1, 3)
    placement = {f"layers.{i}": draw.randrange(world) for i in range(12)} | {"weight": draw.randrange(world)}
    found = program(Random(seed), placement, world, chunks)
    check(found, lists(found))
    assert order_of(found) == order_of(found)


def test_the_key_with_the_most_letters_wins():
    names = Names({"": 3, "*": 0, "blocks": 1, "blocks.[4-7]": 2, "blocks.7": 4, "blocks.*.mlp": 5})
    ranks = [
        names.rank_of(each)
        for each in ("head", "blocks.0.fc", "blocks.5.fc", "blocks.7.fc", "blocks.5.mlp.up")
    ]
    assert ranks == [3, 1, 2, 4, 5] or ranks == [0, 1, 2, 4, 5]


@pytest.mark.parametrize(
    ("placement", "said"),
    [
        ({}, "must map names to ranks"),
        ({"stem": 2}, "'stem' is on rank 2, but this group has ranks 0 to 1"),
        ({"stem": -1}, "rank -1"),
        ({"stem": True}, "rank True"),
        ({3: 0}, "3 is no name"),
        ({"stem": 0, "left": 0, "right": 1}, "'head' has no rank"),
        ({"*": 0, "steam": 1}, "did you mean 'stem'"),
        ({"*": 0, "left.?": 1, "left.*": 0}, "equally well"),
    ],
)
def test_refused_placements(placement, said):
    with pytest.raises(InputError, match=said):
        traced(Net(), checked(placement, 2))


def test_a_module_of_torch_is_not_split():
    net = nn.Sequential(nn.TransformerEncoderLayer(8, 2, 8))
    with pytest.raises(InputError, match="TransformerEncoderLayer of torch"):
        traced(net, checked({"*": 0, "0.linear1": 1}, 2))


def test_data_dependent_shapes_are_refused():
    class Picks(nn.Module):
        def __init__(self):
            super().__init__()
            self.one, self.two = nn.Linear(4, 4), nn.Linear(4, 4)

        def forward(self, x):
            x = self.one(x)
            return self.two(x[x.sum(1) > 0])

    with pytest.raises(InputError, match="does not follow from the shapes"):
        program(Picks(), {"one": 0, "two": 1}, 2)


def test_variable_inputs_are_refused():
    class Any(nn.Module):
        def forward(self, *xs):
            return xs[0]

    with pytest.raises(InputError, match=r"forward\(..., \*xs\)"):
        traced(Any(), checked({"*": 0}, 1))


def test_training_and_evaluation_have_their_own_graphs():
    class Dropped(nn.Module):
        def __init__(self):
            super().__init__()
            self.one, self.two = nn.Linear(4, 4), nn.Linear(4, 4)

        def forward(self, x):
            return self.two(nn.functional.dropout(self.one(x), 0.5, self.training))

    net = Dropped().eval()
    graphs = traced(net, checked({"one": 0, "two": 1}, 2)).graphs
    assert not net.training
    found = {
        mode: next(each for each in graph.nodes if each.name == "dropout").kwargs["training"]
        for mode, graph in graphs.items()
    }
    assert found == {True: True, False: False}
    values = Skeleton(net).values(graphs[True], {"x": torch.ones(2, 4)}, True)
    assert values["dropout"].random
    assert not values["one"].random


@pytest.mark.parametrize(
    "dtype", [torch.float32, torch.bfloat16, torch.int64, torch.bool, torch.float64, torch.int8]
)
@pytest.mark.parametrize("shape", [(), (0,), (3,), (5, 7)])
def test_bytes_travel_as_they_are(dtype, shape):
    x = torch.randint(0, 2, (2 * 8 * 35,), dtype=torch.uint8).view(torch.uint8)
    x = torch.randint(0, 256, (8 * 35,), dtype=torch.uint8)
    numel = torch.Size(shape).numel()
    x = (x[:numel] > 128).view(shape) if dtype == torch.bool else x.view(dtype)[:numel].view(shape)
    room, back = words(Form.of(x))
    assert room.numel() == as_words(x).numel()
    room.copy_(as_words(x).reshape(-1))
    assert back.dtype == dtype
    assert torch.equal(back.reshape(-1).view(torch.uint8), x.reshape(-1).view(torch.uint8))


def test_micro_batches_are_cut_and_joined():
    assert sizes_of({"x": torch.ones(7, 2), "y": torch.tensor(1.0)}, 3) == (3, 2, 2)
    assert sizes_of({"x": torch.ones(2, 2)}, 3) == (1, 1)
    assert sizes_of({"x": torch.ones(2, 2), "y": torch.ones(3)}, 1) == (1,)
    with pytest.raises(InputError, match="rows differ"):
        sizes_of({"x": torch.ones(2, 2), "y": torch.ones(3)}, 2)
    x = torch.randn(5, 3)
    parts = list(x.split([2, 3]))
    assert torch.equal(joined(parts, (2, 3)), x)
    forms = [Form.of(each) for each in parts]
    assert all(map(torch.equal, parted(x, forms, (2, 3)), parts))
    one = [Form.of(torch.tensor(0.0))] * 2
    assert sum(parted(torch.tensor(1.0), one, (2, 3))) == 1.0


def test_what_others_have_is_let_go():
    net = Net()
    owners = traced(net, checked({"*": 0, "right": 1}, 2)).owners
    prune(net, owners, 1)
    assert [name for name, _ in net.named_parameters()] == ["right.0.weight", "right.0.bias"]
    assert isinstance(net.stem, Elsewhere)
    assert "Linear on rank 0" in repr(net)


def test_nothing_is_recorded_unless_asked_for():
    record = Record(3)
    with record.span("forward", "a", 0):
        pass
    assert record.trace() == []
    record.on = True
    with record.span("forward", "a", 1):
        pass
    [event] = record.trace()
    assert (event["name"], event["cat"], event["pid"], event["args"]) == (
        "a",
        "forward",
        3,
        {"micro-batch": 1},
    )
    assert event["dur"] >= 0


def test_it_needs_a_process_group():
    with pytest.raises(CommError, match="init_process_group"):
        Placed(Net(), {"*": 0})
