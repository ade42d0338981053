"""Sub-batches without other processes: what is refused, how layers are split, what a timeline says."""

import time
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch import nn

from thinwire.errors import CodecError, CommError, InputError
from thinwire.parallel import SubBatches, Timeline
from thinwire.parallel.sub_batches_layers import Draw, even, joined, mask, split
from thinwire.parallel.sub_batches_wires import Wire
from thinwire.rounding import Stream


@pytest.fixture
def alone():
    """A group of one rank."""
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


def layers():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(8, 7), nn.ReLU(inplace=True), nn.Dropout(0.5), nn.Linear(7, 5, bias=False))


def test_slices_of_all_ranks_are_the_whole_layer():
    whole = layers()
    parts = [split(whole, rank, 3) for rank in range(3)]
    for i in (0, 3):
        stacked = torch.cat([net[i].weight for net, _ in parts])
        assert torch.equal(stacked, whole[i].weight)
    assert [block.sizes for block in parts[0][1]] == [(3, 2, 2), (2, 2, 1)]
    assert [block.name for block in parts[0][1]] == ["0", "3"]
    assert not parts[0][0][1].inplace, "a gathered input is needed again"
    state = [dict(whole[i].state_dict()) for i in (0, 3)]
    again = joined(parts[1][0], state)
    assert all(map(torch.equal, again.parameters(), whole.parameters()))


def test_columns_of_all_ranks_are_the_output_of_the_whole_layer_with_its_dropout():
    x, draw = torch.randn(4, 8), Draw(1, 2, 3)
    outputs = {}
    for world in (1, 2, 3):
        blocks = [split(layers(), rank, world)[1][0] for rank in range(world)]
        outputs[world] = torch.cat([each.leave(each.linear(x), draw) for each in blocks], 1)
    assert torch.allclose(outputs[1], outputs[2])
    assert torch.allclose(outputs[1], outputs[3])
    assert (outputs[1] == 0).any()


def test_masks_keep_the_mean_and_are_named_by_their_stream():
    like = torch.zeros(())
    first, again, other = (mask(Stream(seed), 100, 100, 0.25, like) for seed in (0, 0, 1))
    assert torch.equal(first, again)
    assert not torch.equal(first, other)
    assert abs(first.mean() - 1) < 0.03
    assert first.unique().tolist() == [0.0, pytest.approx(4 / 3)]
    assert mask(Stream(0), 2, 2, 1.0, like).eq(0).all()


def test_even_parts_add_up():
    for size, count in ((10, 4), (4, 4), (3, 2)):
        parts = even(size, count)
        assert sum(parts) == size
        assert max(parts) - min(parts) <= 1


@pytest.mark.parametrize(
    ("classifier", "said"),
    [
        (nn.Linear(4, 4), "nn.Sequential"),
        (nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4)), "module 1 .* BatchNorm1d"),
        (nn.Sequential(nn.Linear(4, 4), nn.Softmax(1)), "apply them to the result"),
        (nn.Sequential(nn.ReLU()), "no nn.Linear"),
        (nn.Sequential(nn.Linear(4, 2)), "3 ranks cannot share the 2 outputs"),
        (nn.Sequential(nn.Linear(4, 8), nn.Linear(9, 4)), "other inputs"),
        (nn.Sequential(nn.Linear(4, 8).double()), "not torch.float64"),
    ],
)
def test_layers_that_cannot_be_split_are_refused(classifier, said):
    with pytest.raises(InputError, match=said):
        split(classifier, 0, 3)


@pytest.mark.parametrize(
    ("options", "error", "said"),
    [
        ({"count": 0}, InputError, "at least 1"),
        ({"count": True}, InputError, "at least 1"),
        ({"min_numel": -1}, InputError, "min_numel"),
        ({"forward": "int8+ef"}, CodecError, "use 'int8/256'"),
        ({"backward": "aps/e5m2"}, CodecError, "backward=.*agree on"),
        ({"output": "nothing"}, CodecError, "unknown codec"),
    ],
)
@pytest.mark.usefixtures("alone")
def test_wrong_options_are_refused(options, error, said):
    with pytest.raises(error, match=said):
        SubBatches(nn.Flatten(), layers(), **options)


def test_a_network_needs_a_group():
    with pytest.raises(CommError, match="init_process_group"):
        SubBatches(nn.Flatten(), layers())


@pytest.mark.parametrize(
    ("x", "said"),
    [
        (torch.zeros(4, 9), r"\[samples, 8\], not \[4, 9\]"),
        (torch.zeros(4, 2, 4), "nn.Flatten"),
        (torch.zeros(2, 8), "2 samples of a rank do not make 3 sub-batches"),
        (torch.zeros(4, 8).double(), "float32, bfloat16 or float16"),
    ],
)
@pytest.mark.usefixtures("alone")
def test_features_that_do_not_fit_are_refused(x, said):
    net = SubBatches(nn.Identity(), layers(), 3)
    with pytest.raises(InputError, match=said):
        net(x)


@pytest.mark.usefixtures("alone")
def test_updates_need_the_layers_optimizer_and_equal_sub_batches():
    net = SubBatches(nn.Linear(8, 8), layers(), 3)
    y = torch.zeros(4, dtype=torch.long)
    both = torch.optim.SGD(net.parameters(), 0.1)
    layer = torch.optim.SGD(net.classifier.parameters(), 0.1)
    how = {"loss": nn.functional.cross_entropy, "labels": y}
    with pytest.raises(InputError, match=r"net.classifier alone"):
        net.update_each(torch.zeros(4, 8), optimizer=both, **how)
    with pytest.raises(InputError, match="4 samples do not make 3 equal"):
        net.update_each(torch.zeros(4, 8), optimizer=layer, **how)
    with pytest.raises(InputError, match="4 labels do not fit 6 samples"):
        net.update_each(torch.zeros(6, 8), optimizer=layer, **how)


@pytest.mark.usefixtures("alone")
def test_codecs_are_for_large_tensors_and_the_last_layer_is_exempt():
    net = SubBatches(nn.Identity(), layers(), 2, forward="int4", backward=None, seed=7)
    assert "forward int4/128, backward unchanged, output unchanged" in repr(net)
    wire = Wire(None, 100)
    message = type("Message", (), {"codec": "int8/256"})
    assert wire._codec(message, 99, torch.bfloat16) == "bf16"
    assert wire._codec(message, 100, torch.bfloat16) == "int8/256"


@pytest.mark.usefixtures("alone")
def test_the_rest_of_a_program_keeps_its_random_numbers():
    net = SubBatches(nn.Identity(), layers(), 2)
    torch.manual_seed(3)
    net(torch.randn(4, 8)).sum().backward()
    found = torch.rand(())
    torch.manual_seed(3)
    torch.randn(4, 8)
    assert torch.equal(found, torch.rand(()))


def test_hidden_is_what_no_wait_covers():
    timeline = Timeline(torch.device("cpu"))
    start = timeline._host_origin
    for kind, began, ended in (
        ("transfer", 1.0, 3.0), ("transfer", 2.0, 5.0), ("wait", 4.0, 5.5), ("compute", 0.0, 4.0),
    ):  # fmt: skip
        timeline._noted.append((kind, "x", 1, start + began, start + ended))
    assert timeline.hidden_share() == pytest.approx(3 / 4)
    assert timeline.exposed_s() == pytest.approx(1.5)
    (first, *_) = timeline.chrome_trace(rank=2)
    assert (first["name"], first["pid"], first["ph"]) == ("x [1]", 2, "X")
    assert first["dur"] == pytest.approx(4e6)
    assert [each.kind for each in timeline.records()] == ["compute", "transfer", "transfer", "wait"]


def test_spans_are_measured():
    timeline = Timeline(torch.device("cpu"))
    with timeline.span("wait", "gather", 2):
        time.sleep(0.01)
    (record,) = timeline.records()
    assert record.end_s - record.start_s >= 0.01
    assert timeline.hidden_share() is None


@pytest.fixture
def benchmarks(monkeypatch):
    monkeypatch.syspath_prepend(Path(__file__).parents[2] / "benchmarks")


@pytest.mark.usefixtures("benchmarks")
def test_the_study_compares_each_arm_with_one_device_that_updates_as_often():
    import sub_batch_accuracy as study

    rows = [
        {"kind": "sub-batches", "network": "cnn", "method": name, "seed": seed, "encoded": None,
         "sent_share": 0.25 if arm.codec else None, "value": 0.5 + 0.2 * arm.updates + seed / 10}
        for seed in (0, 1) for name, arm in study.ARMS.items()
    ]  # fmt: skip
    settings = {"cnn": {"steps": 7, "batch": 8, "data": "digits"}}
    once, each = study.tables({"rows": rows, "settings": settings})
    assert [line[0] for line in once[2]][:2] == ["one device", "32 bits, K = 1"]
    assert [line[0] for line in each[2]] == [
        "one device",
        "32 bits, K = 4, 4 updates",
        "8 bits, K = 4, 4 updates",
    ]
    assert once[1][3] == "points from one device"
    assert {line[3] for line in (*once[2][1:], *each[2][1:])} == {"+0.00"}
    assert "after each sub-batch" in each[0]


@pytest.mark.usefixtures("alone", "benchmarks")
def test_a_timeline_can_be_drawn(tmp_path):
    import sub_batch_timeline

    net = SubBatches(nn.Identity(), layers(), 2)
    with net.record() as timeline:
        net(torch.randn(4, 8)).sum().backward()
    events = timeline.chrome_trace()
    assert {sub_batch_timeline.sub_batch(each["name"]) for each in events} == {0, 1, 2}
    figure = sub_batch_timeline.drawn({"one": events, "two": events})
    assert len(figure.axes) == 2
    assert all(len(axis.collections) == len(events) for axis in figure.axes)
    figure.savefig(tmp_path / "timeline.svg")


@pytest.mark.parametrize("split_each", [False, True])
@pytest.mark.usefixtures("alone")
def test_one_rank_is_one_device(split_each):
    """The arithmetic of passes, without any communication."""
    torch.manual_seed(0)
    whole = nn.Sequential(nn.Linear(6, 8), nn.Sequential(nn.Linear(8, 7), nn.ReLU(), nn.Linear(7, 5)))
    net = SubBatches(nn.Linear(6, 8), whole[1], 2)
    net.features.load_state_dict(whole[0].state_dict())
    x, y = torch.randn(4, 6), torch.tensor([0, 1, 2, 3])
    optimizer = torch.optim.SGD(net.classifier.parameters(), 0.0)
    if split_each:
        loss = net.update_each(x, labels=y, loss=nn.functional.cross_entropy, optimizer=optimizer)
    else:
        loss = nn.functional.cross_entropy(net(x), y)
    loss.backward()
    nn.functional.cross_entropy(whole(x), y).backward()
    for mine, wanted in zip(net.features.parameters(), whole[0].parameters(), strict=True):
        assert torch.allclose(mine.grad, wanted.grad, atol=1e-7)
    assert split_each == (net.classifier[0].weight.grad is None)
