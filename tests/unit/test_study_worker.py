"""A rank of a study, alone: order of examples, accuracy, curves, and what a record says."""

import hashlib
import json
import math
import statistics
from dataclasses import replace

import pytest
import torch
import torch.distributed as dist
from torch import nn

from thinwire import data
from thinwire.errors import InputError
from thinwire.integrations import attach
from thinwire.runtimes.trace import trace
from thinwire.study import Trial, worker
from thinwire.study.run import FAILED, RECORD, STEP
from thinwire.zoo import small

TRIAL = Trial("test", "digits", "mlp", "int8", 3, 1, "loopback", 8, 16, 0.05)


@pytest.fixture
def alone():
    """A group of one rank."""
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()
    worker._warm_up.cache_clear()


@pytest.fixture
def second(monkeypatch):
    """The second of three ranks."""
    monkeypatch.setattr(dist, "get_rank", lambda: 1)
    monkeypatch.setattr(dist, "get_world_size", lambda: 3)


def steps(count, trial, examples):
    found = worker.order(trial, examples)
    return [next(found) for _ in range(count)]


def test_ranks_take_their_share_of_one_shuffle(monkeypatch):
    trial = replace(TRIAL, hosts=2, batch=3)
    taken = []
    for rank in (0, 1):
        monkeypatch.setattr(dist, "get_rank", lambda rank=rank: rank)
        taken.append(steps(5, trial, 15))
    generator = torch.Generator().manual_seed(trial.seed)
    first, second, third = (torch.randperm(15, generator=generator) for _ in range(3))
    both = [torch.cat(pair) for pair in zip(*taken, strict=True)]
    expected = [first[:6], first[6:12], second[:6], second[6:12], third[:6]]  # what is left over is left out
    assert all(torch.equal(*pair) for pair in zip(both, expected, strict=True))


def test_a_step_may_take_all_examples_but_not_more(monkeypatch):
    monkeypatch.setattr(dist, "get_rank", lambda: 0)
    assert sorted(steps(2, TRIAL, 16)[1].tolist()) == list(range(16))
    with pytest.raises(InputError, match="digits has 15 examples, a step takes 16: use smaller batches"):
        steps(1, TRIAL, 15)


def test_gradients_are_those_of_one_batch():
    net = nn.Sequential(nn.Flatten(), nn.Linear(4, 3))
    x, y = torch.randn(5, 2, 2), torch.tensor([0, 1, 2, 1, 0])
    worker.backward(net, x, y)
    loss = worker.backward(net, x, y)
    found = net[1].weight.grad.clone()
    net.zero_grad()
    expected = nn.functional.cross_entropy(net(x), y)
    expected.backward()
    assert loss == expected
    assert not loss.requires_grad
    assert torch.equal(found, net[1].weight.grad)


class Echo(nn.Module):
    """Says the class that is written in its input; in training it would be wrong."""

    def forward(self, x):
        assert not self.training
        return nn.functional.one_hot(x, 5).float()


class Labelled:
    """Examples whose labels are right three times of four."""

    def __init__(self, count):
        self.x = torch.arange(count) % 5
        self.y = torch.where(torch.arange(count) % 4 == 0, (self.x + 1) % 5, self.x)

    def __len__(self):
        return len(self.y)

    def batch(self, which):
        return self.x[which], self.y[which]


@pytest.mark.usefixtures("alone")
def test_accuracy_is_the_share_of_all_tests(monkeypatch):
    net = Echo().train()
    assert worker.evaluate(net, Labelled(1200)) == 0.75
    assert net.training
    monkeypatch.setattr(worker, "AT_ONCE", 7)
    assert worker.evaluate(net, Labelled(20)) == 0.75


@pytest.mark.usefixtures("second")
def test_every_rank_evaluates_its_share(monkeypatch):
    monkeypatch.setattr(worker, "AT_ONCE", 4)
    seen = []

    class Seen(Labelled):
        def batch(self, which):
            seen.append(which)
            return super().batch(which)

    monkeypatch.setattr(dist, "all_reduce", lambda x: None if x == 6 else pytest.fail(f"{x} are right"))
    assert worker.evaluate(Echo(), Seen(20)) == 6 / 20
    assert seen == [slice(4, 8), slice(16, 20)]


@pytest.mark.usefixtures("alone")
def test_a_curve_has_points_and_says_them(capsys):
    model, _ = worker.build(TRIAL, data.examples("digits")[0])
    course = worker.Course(times_s=[1.0, 2.0], losses=[1.0, 2.0])
    worker._note(course, TRIAL, 5, model, 77, 0.5)
    course.times_s.append(4.0)
    course.losses.append(0.123456)
    worker._note(course, TRIAL, 6, model, 88, None)
    assert [tuple(vars(each).values()) for each in course.points] == [
        (5, 3.0, 77, 1.5, 0.5),
        (6, 7.0, 88, 0.123456, None),
    ]
    assert (course.losses, course.equal) == ([], True)
    said = [json.loads(line.removeprefix(STEP)) for line in capsys.readouterr().out.splitlines()]
    assert said == [
        {"trial": TRIAL.key, "step": 5, "loss": 1.5, "accuracy": 0.5},
        {"trial": TRIAL.key, "step": 6, "loss": 0.1235, "accuracy": None},
    ]


@pytest.mark.usefixtures("alone")
def test_replicas_that_differ_once_are_not_equal_later(monkeypatch):
    model, _ = worker.build(TRIAL, data.examples("digits")[0])
    course = worker.Course(times_s=[1.0], losses=[1.0])
    gather = dist.all_gather
    monkeypatch.setattr(dist, "all_gather", lambda out, own: out[0].copy_(own + 1))
    worker._note(course, TRIAL, 1, model, 0, None)
    monkeypatch.setattr(dist, "all_gather", gather)
    course.losses.append(1.0)
    worker._note(course, TRIAL, 2, model, 0, None)
    assert not course.equal


@pytest.mark.usefixtures("alone")
def test_weights_are_those_of_the_seed():
    examples = data.examples("digits")[0]
    nets = {}
    for codec, seed in (("plain", 3), ("int8", 3), ("int8", 4)):
        model, handle = worker.build(replace(TRIAL, codec=codec, seed=seed), examples)
        assert (handle is None) == (codec == "plain")
        nets[codec, seed] = worker._digest(model)
    torch.manual_seed(3)
    net = small.get("mlp", examples.shape, examples.classes)
    expected = hashlib.sha256(b"".join(each.detach().numpy().tobytes() for each in net.parameters()))
    assert nets["plain", 3] == nets["int8", 3] == expected.digest() != nets["int8", 4]


@pytest.mark.usefixtures("alone")
def test_bytes_are_those_of_ddp_or_of_the_handle(monkeypatch):
    model, handle = worker.build(TRIAL, data.examples("digits")[0])
    numel = sum(each.numel() for each in model.parameters())
    handle.metrics.sent_nbytes = 99
    assert worker._sent(handle, model, 5) == 99
    monkeypatch.setattr(dist, "get_world_size", lambda: 4)
    plain = trace(numel, "fp32", 4, "native").sent_nbytes
    assert plain == pytest.approx(4 * numel * 1.5, rel=0.01)
    assert worker._plain_nbytes(model) == plain
    assert worker._sent(None, model, 5) == 5 * plain


@pytest.mark.usefixtures("alone")
def test_one_run_makes_a_record(monkeypatch, capsys):
    monkeypatch.setenv("THINWIRE_LAB", '{"gpus": ["H200"]}')
    worker._environment.cache_clear()
    rates = []

    class Kept(torch.optim.SGD):
        def step(self):
            rates.append(self.param_groups[0]["lr"])
            super().step()

    monkeypatch.setattr(small, "optimizer", lambda _, parameters, lr: Kept(parameters, lr, 0.9))
    monkeypatch.setattr(worker, "POINTS", 2)
    found = worker.train(TRIAL)
    assert [point.step for point in found.points] == [2, 4, 6, 8]
    assert all(point.accuracy is not None for point in found.points)
    assert rates == pytest.approx([0.05 * (1 - at / 8) for at in range(8)])
    assert found.points[-1].loss < found.points[0].loss
    assert found.accuracy == found.points[-1].accuracy > 0.2
    assert found.samples_per_s == 16 / found.step_s
    assert found.trial == TRIAL
    assert (found.sent_nbytes_per_step, found.replicas_equal) == (0.0, True)
    assert [layer.name for layer in found.layers] == [
        "1.weight",
        "1.bias",
        "3.weight",
        "3.bias",
        "5.weight",
        "5.bias",
    ]
    assert (found.predicted_step_s, found.choice) == (None, None)
    assert found.environment["lab"] == {"gpus": ["H200"]}
    assert {"date", "commit", "cores"} <= found.environment.keys()
    assert "--codec int8 --seed 3" in found.command
    assert len([line for line in capsys.readouterr().out.splitlines() if line.startswith(STEP)]) == 4
    worker._environment.cache_clear()


@pytest.mark.usefixtures("alone")
def test_numbers_of_a_record_are_medians_and_means(monkeypatch):
    model, handle = worker.build(TRIAL, data.examples("digits")[0])
    course = worker.Course(times_s=[1.0, 2.0, 9.0])
    course.points.append(worker.Point(8, 12.0, 1, 0.5, 0.875))
    trial = replace(TRIAL, hosts=2)
    auto = {"predicted_step_s": 0.25, "chosen": "int4"}
    layer = {
        "codec": "int8/256",
        "numel": 5,
        "wire_nbytes": 7,
        "error": math.nan,
        "snr_db": 30.0,
        "residual_norm": None,
    }
    stats = {"auto": auto, "seconds": {"wait": 3.0, "encode": 6.0}, "overlap": 0.5, "layers": {"a": layer}}
    monkeypatch.setattr(handle, "stats", lambda: stats)
    handle.metrics.sent_nbytes = 80
    monkeypatch.setattr(worker, "_plain_nbytes", lambda _: 40)
    found = worker._record(trial, course, model, handle, 0.5)
    assert (found.step_s, found.samples_per_s, found.accuracy, found.overlap) == (2.0, 16.0, 0.875, 0.5)
    assert (found.sent_nbytes_per_step, found.fp32_nbytes_per_step) == (10.0, 40.0)
    assert found.seconds == {"compute": 3.0, "wait": 1.0, "encode": 2.0}
    assert found.layers == (worker.Layer("a", "int8/256", 5, 7, None, 30.0, None),)
    assert (found.predicted_step_s, found.choice) == (0.25, auto)
    course.equal = False
    plain = worker._record(trial, course, model, None, 0.5)
    assert (plain.overlap, plain.layers, plain.choice, plain.replicas_equal) == (0.0, (), None, False)
    assert plain.seconds == {"compute": 0.5, "wait": 3.5}


@pytest.mark.usefixtures("alone")
def test_computing_is_timed_without_communication(monkeypatch):
    clock, synced = iter([0.0, 1.0, 10.0, 13.0, 20.0, 22.0]), []
    monkeypatch.setattr(worker, "_now", lambda _: next(clock))
    inner = worker.backward

    def backward(model, *batch):
        synced.append((model.require_backward_grad_sync, len(batch[0])))
        return inner(model, *batch)

    monkeypatch.setattr(worker, "backward", backward)
    worker._warm_up.cache_clear()
    assert worker._warm_up("digits", "mlp", "int8", 16, "cpu") == statistics.median([1.0, 3.0, 2.0])
    assert synced == [(True, 16)] * 2 + [(False, 16)] * 3


class Ended(BaseException):
    """The process would end here."""


def test_a_worker_says_records_and_what_failed(monkeypatch, capsys):
    done = []
    monkeypatch.setattr(
        worker.sys, "argv", ["worker", json.dumps([vars(TRIAL), vars(replace(TRIAL, seed=4))])]
    )
    monkeypatch.setattr(worker, "start", done.append)
    monkeypatch.setattr(dist, "barrier", lambda: done.append("barrier"))
    monkeypatch.setattr(dist, "destroy_process_group", lambda: done.append("destroyed"))
    monkeypatch.setattr(dist, "get_rank", lambda: 0)
    monkeypatch.setattr(worker.torch, "set_num_threads", lambda count: done.append(count))

    def leave(code):
        raise Ended(code)

    monkeypatch.setattr(worker.os, "_exit", leave)

    class Found:
        def __init__(self, trial):
            self.trial = trial

        def to_json(self):
            return str(self.trial.seed)

    monkeypatch.setattr(worker, "train", Found)
    with pytest.raises(Ended, match="0"):
        worker.main()
    assert capsys.readouterr().out == f"{RECORD}3\n{RECORD}4\n"
    assert done == [1, "cpu", "barrier", "destroyed"]
    monkeypatch.setattr(dist, "get_rank", lambda: 1)
    with pytest.raises(Ended):
        worker.main()
    assert capsys.readouterr().out == ""

    def fail(trial):
        raise ValueError(f"two\n lines of {trial.seed}")

    monkeypatch.setattr(worker, "train", fail)
    with pytest.raises(SystemExit, match="1"):
        worker.main()
    said = capsys.readouterr()
    assert said.out == f"{FAILED}int8, seed 3: ValueError: two lines of 3\n"
    assert "Traceback" in said.err


def test_a_rank_joins_the_group_of_its_device(monkeypatch):
    joined = []
    monkeypatch.setattr(dist, "init_process_group", lambda *given, **how: joined.append((given, how)))
    worker.start("cpu")
    assert joined == [(("gloo",), {"timeout": worker.PATIENCE})]
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(InputError, match="this rank sees no CUDA device; train with --device cpu"):
        worker.start("cuda")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "set_device", joined.append)
    monkeypatch.setattr(torch, "set_float32_matmul_precision", joined.append)
    monkeypatch.setenv("LOCAL_RANK", "2")
    worker.start("cuda")
    mine = torch.device("cuda", 2)
    assert joined[1:] == [mine, "high", (("nccl",), {"timeout": worker.CUDA_PATIENCE, "device_id": mine})]
    monkeypatch.delenv("LOCAL_RANK")
    worker.start("cuda")
    assert joined[4] == torch.device("cuda", 0)


def test_time_on_a_gpu_is_that_of_finished_work(monkeypatch):
    said = []
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: said.append("synchronized"))
    monkeypatch.setattr(worker.time, "perf_counter", lambda: 5.0)
    assert worker._now("cpu") == 5.0
    assert said == []
    assert worker._now("cuda") == 5.0
    assert said == ["synchronized"]


@pytest.mark.usefixtures("alone")
def test_a_seed_is_also_that_of_random_rounding(monkeypatch):
    given = []
    monkeypatch.setattr(
        worker, "attach", lambda model, codec, seed: (given.append((codec, seed)), attach(model, codec))[1]
    )
    worker.build(TRIAL, data.examples("digits")[0])
    assert given == [("int8", 3)]
