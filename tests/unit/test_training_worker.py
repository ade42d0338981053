"""A rank of the bench of training, alone: how methods are prepared, timed, counted and compared."""

import math

import pytest
import torch
import torch.distributed as dist
from torch import nn

from thinwire.bench import training_worker as worker
from thinwire.bench.training_networks import Network

CPU = torch.device("cpu")
TINY = Network(lambda: nn.Sequential(nn.Flatten(), nn.Linear(12, 7)), batch=3, classes=7, pixels=2)
PARAMS = 12 * 7 + 7


@pytest.fixture(autouse=True)
def alone():
    """A group of one rank."""
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


@pytest.fixture
def ticks(monkeypatch):
    """A clock that goes on by one second whenever somebody looks at it."""
    clock = iter(range(100_000))
    monkeypatch.setattr(worker.time, "perf_counter", lambda: float(next(clock)))


def prepared(method, network=TINY):
    return worker.prepare(method, network, CPU)


def test_methods_get_their_hooks_and_equal_weights():
    trainees = {
        each: prepared(each) for each in (worker.PLAIN, worker.COMPUTE, worker.HALF, worker.POWER, "int8")
    }
    first = trainees[worker.PLAIN].model.module[1].weight
    for method, each in trainees.items():
        assert torch.equal(each.model.module[1].weight, first)
        assert each.method == method
        assert (each.handle is not None) == (method == "int8")
        assert (each.power is not None) == (method == worker.POWER)
        assert isinstance(each.optimizer, torch.optim.SGD)
        assert (each.optimizer.defaults["lr"], each.optimizer.defaults["momentum"]) == (0.01, 0.9)
        assert each.settled
    power = trainees[worker.POWER].power
    assert (power.matrix_approximation_rank, power.start_powerSGD_iter) == (worker.RANK, 2)
    capacities = {method: each.model.bucket_bytes_cap for method, each in trainees.items()}
    assert capacities[worker.POWER] == worker.ONE_BUCKET_MB << 20
    assert capacities[worker.PLAIN] == capacities["int8"] == 25 << 20
    assert all(each.model.gradient_as_bucket_view for each in trainees.values())
    adam = prepared(worker.PLAIN, Network(TINY.build, 3, 7, pixels=2, adam=True)).optimizer
    assert isinstance(adam, torch.optim.AdamW)
    assert (adam.defaults["lr"], adam.defaults["fused"]) == (1e-4, False)


def test_a_step_trains_and_counts():
    trainee, data = prepared(worker.PLAIN), TINY.data(1)
    oracle = TINY.build()
    oracle.load_state_dict(trainee.model.module.state_dict())
    optimizer = torch.optim.SGD(oracle.parameters(), 0.01, 0.9)
    for _ in range(3):
        optimizer.zero_grad()
        nn.functional.cross_entropy(oracle(data[0]), data[1]).backward()
        optimizer.step()
        trainee.step(*data)
    assert trainee.done == 3
    for name, parameter in oracle.named_parameters():
        assert torch.allclose(parameter, dict(trainee.model.module.named_parameters())[name])


def test_only_compute_alone_sends_nothing(monkeypatch):
    sent = []
    for method in (worker.COMPUTE, worker.PLAIN):
        trainee, data = prepared(method), TINY.data(1)
        monkeypatch.setattr(
            trainee.model, "no_sync", lambda method=method: (sent.append(method), worker.nullcontext())[1]
        )
        trainee.step(*data)
    assert sent == [worker.COMPUTE]


@pytest.mark.usefixtures("ticks")
def test_a_turn_is_timed_per_step():
    trainee = prepared(worker.PLAIN)
    assert trainee.turn(TINY.data(1), 4) == 0.25
    assert trainee.done == 4


@pytest.mark.parametrize(
    ("method", "width"), [(worker.PLAIN, 4), (worker.HALF, 2), (worker.BRAIN, 2), (worker.COMPUTE, 0)]
)
def test_torchs_bytes_are_those_of_a_ring(method, width, monkeypatch):
    trainee = prepared(worker.PLAIN)
    trainee.method, trainee.done = method, 10
    monkeypatch.setattr(dist, "get_world_size", lambda: 4)
    assert trainee.sent_nbytes() == 10 * PARAMS * width * 1.5


def test_bytes_of_powersgd_and_of_a_handle_are_their_own(monkeypatch):
    trainee = prepared(worker.POWER)
    trainee.power.total_numel_after_compression = 1000
    monkeypatch.setattr(dist, "get_world_size", lambda: 2)
    assert trainee.sent_nbytes() == 4000
    trainee.handle = type("Handle", (), {"sent_nbytes": 7, "auto": None})
    assert trainee.sent_nbytes() == 7.0
    trainee.handle.auto = type("Auto", (), {"settled": False})
    assert not trainee.settled


def test_the_hooks_seconds_are_added_up_step_by_step(monkeypatch):
    clock = iter([0.0, 1.0, 10.0, 12.0, 20.0, 24.0])
    monkeypatch.setattr(worker.time, "perf_counter", lambda: next(clock))

    class Handle:
        def reduce(self, bucket):
            return f"reduced {bucket.index()}"

    handle, spent = Handle(), []
    worker._watch(handle, spent)
    buckets = [type("Bucket", (), {"index": lambda _, at=at: at})() for at in (0, 1, 0)]
    assert [handle.reduce(each) for each in buckets] == ["reduced 0", "reduced 1", "reduced 0"]
    assert spent == [3.0, 4.0]


class Timed:
    """A trainee whose steps take a given time."""

    def __init__(self, method="int8", step_s=1.0, *, settles=0, handle=None):
        self.method, self.step_s, self.settles, self.handle = method, step_s, settles, handle
        self.done, self.steps, self.turns, self.times, self.host = 0, 1, [], [], []

    @property
    def settled(self):
        return self.done >= self.settles

    def step(self, *_):
        self.done += 1

    def turn(self, _, steps):
        self.turns.append(steps)
        self.done += steps
        self.host += [float(self.done)] * steps
        return self.step_s


@pytest.mark.parametrize(
    ("method", "step_s", "turn_s", "turns", "steps"),
    [
        ("int8", 1.0, 0.5, [1, 1], 1),  # longer than a turn
        ("int8", 0.1, 0.5, [1, 1, 2], 5),
        ("int8", 0.01, 0.5, [1, 1, 2], worker.MOST_STEPS),
        (worker.POWER, 1.0, 0.5, [worker.POWER_WARMUP - 1, 1], 1),
    ],
)
def test_a_warm_up_finds_how_many_steps_fit_into_a_turn(method, step_s, turn_s, turns, steps):
    trainee = Timed(method, step_s)
    worker.warm_up(trainee, TINY.data(1), turn_s)
    assert (trainee.turns, trainee.steps) == (turns, steps)


def test_a_warm_up_waits_for_auto_but_not_for_ever():
    trainee = Timed("auto", settles=50)
    worker.warm_up(trainee, TINY.data(1), 0.5)
    assert trainee.done == 51
    late = Timed("auto", settles=10_000)
    worker.warm_up(late, TINY.data(1), 0.5)
    assert late.done == worker.MOST_WARMUP + 1


@pytest.mark.usefixtures("ticks")
def test_rounds_start_with_another_method_and_end_when_time_is_up():
    said = []

    class Telling(Timed):
        def turn(self, data, steps):
            said.append((self.method, steps))
            return super().turn(data, steps)

    trainees = [Telling("a"), Telling("b"), Telling("c")]
    trainees[1].steps = 3
    worker.take_turns(trainees, TINY.data(1), 0.0)
    assert [method for method, _ in said] == [*"abc", *"bca", *"cab", *"abc"]
    assert {each for each in said if each[0] == "b"} == {("b", 3)}
    assert [each.times for each in trainees] == [[1.0] * 4] * 3
    for each in trainees:
        each.times.clear()
    worker.take_turns(trainees, TINY.data(1), 2.5)  # the clock is looked at from the fourth round on
    assert [len(each.times) for each in trainees] == [6] * 3


def test_the_hosts_time_is_the_median_of_some_steps():
    trainee = Timed(handle=object())
    trainee.host = [100.0] * 9
    worker.time_host(trainee, TINY.data(1))
    assert trainee.turns == [1] * worker.HOST_STEPS
    assert trainee.host_s == 3.0  # of 1, 2, 3, 4, 5
    without = Timed()
    worker.time_host(without, TINY.data(1))
    assert without.turns == []


def test_what_ranks_tell_each_other():
    assert worker.first_says(True) is True
    assert worker.first_says(False) is False
    assert worker.slowest([[1.5, 2.0], [3.0, 0.25]]) == [[1.5, 2.0], [3.0, 0.25]]
    assert worker._here([1], torch.float64).dtype == torch.float64


def test_rank_0_decides_and_the_slowest_counts(monkeypatch):
    def broadcast(decision, source):
        assert (source, decision.dtype) == (0, torch.uint8)
        decision.fill_(1)

    def all_reduce(times, op):
        assert (op, times.dtype) == (dist.ReduceOp.MAX, torch.float64)
        times += 1

    monkeypatch.setattr(dist, "broadcast", broadcast)
    monkeypatch.setattr(dist, "all_reduce", all_reduce)
    assert worker.first_says(False) is True
    assert worker.slowest([[1.0], [2.0]]) == [[2.0], [3.0]]


def test_replicas_are_compared_by_all_their_bits(monkeypatch):
    trainee = prepared(worker.PLAIN)
    assert worker._replicas(trainee.model) == {"replicas_equal": True, "finite": True}
    seen = []
    gather = dist.all_gather
    monkeypatch.setattr(dist, "all_gather", lambda out, own: (seen.append(own.clone()), gather(out, own))[1])
    worker._replicas(trainee.model)
    with torch.no_grad():
        trainee.model.module[1].bias[3] += 1e-3
    worker._replicas(trainee.model)
    assert not torch.equal(seen[0], seen[1])
    assert seen[0].shape == (16,)
    monkeypatch.setattr(dist, "all_gather", lambda out, own: out[0].copy_(own + 1))
    with torch.no_grad():
        trainee.model.module[1].bias[3] = math.inf
    assert worker._replicas(trainee.model) == {"replicas_equal": False, "finite": False}


def test_sums_tell_bits_and_their_places_apart():
    x = torch.tensor([[1.0, 2.0], [3.0, 4.0]])
    bits = x.view(torch.int32).flatten().tolist()
    weighted = sum(bit * place for bit, place in zip(bits, (1, 3, 5, 7), strict=True))
    assert worker._sums(x) == f"{sum(bits)} {weighted}".encode()
    assert worker._sums(x) != worker._sums(x.T)


def test_a_handles_numbers_are_per_step():
    assert worker._handle(None) == {}
    stats = {"steps": 4, "seconds": {"encode": 2.0, "wait": 1.0}, "overlap": 0.5, "buffers_nbytes": 7,
             "residuals_nbytes": 9, "more": 1}  # fmt: skip
    handle = type("Handle", (), {"stats": lambda _: stats})()
    found = {"overlap": 0.5, "buffers_nbytes": 7, "residuals_nbytes": 9}
    assert worker._handle(handle) == {"seconds": {"encode": 0.5, "wait": 0.25}, **found}
    stats["steps"] = 0
    assert worker._handle(handle)["seconds"] == {"encode": 2.0, "wait": 1.0}


def test_buckets_are_counted_from_the_log_of_ddp():
    def model(sizes):
        return type("Model", (), {"_get_ddp_logging_data": lambda _: sizes})()

    assert worker._buckets(model({"rebuilt_bucket_sizes": "40, 8,12"})) == 3
    assert worker._buckets(model({"rebuilt_bucket_sizes": " "})) == 0
    assert worker._buckets(model({})) == 0


def test_one_network_is_measured_with_all_methods(monkeypatch):
    monkeypatch.setattr(worker, "networks", lambda _: {"tiny": TINY})
    methods = [worker.HALF, "int8", worker.PLAIN, "int8", worker.POWER]
    found = worker.measure("tiny", methods, 0.0, CPU)
    assert [row["method"] for row in found["rows"]] == [worker.PLAIN, worker.HALF, "int8", worker.POWER]
    expected = {"network": "tiny", "hosts": 1, "params": PARAMS, "batch": 3}
    assert {key: found[key] for key in expected} == expected
    assert len(found["compute_times_s"]) == worker.FEWEST_ROUNDS
    assert "calls_s" not in found
    for row in found["rows"]:
        assert row["plain_times_s"] == found["rows"][0]["times_s"]
        assert len(row["times_s"]) == worker.FEWEST_ROUNDS
        assert (row["sent_nbytes"], row["params"], row["buckets"]) == (0.0, PARAMS, 1)
        assert row["replicas_equal"]
        assert ("host_s" in row) == ("overlap" in row) == (row["method"] == "int8")
        assert "auto" not in row
        assert row["steps"] >= worker.FEWEST_ROUNDS
        assert row["warm_up_steps"] >= (worker.POWER_WARMUP if row["method"] == worker.POWER else 2)


def test_inputs_are_random_and_of_the_networks_shape():
    x, labels = TINY.data(seed=5)
    assert (x.shape, labels.shape) == ((3, 3, 2, 2), (3,))
    generator = torch.Generator().manual_seed(5)
    assert torch.equal(labels, torch.randint(7, (3,), generator=generator))
    assert torch.equal(x, torch.randn(3, 3, 2, 2, generator=generator))
    words, following = Network(TINY.build, batch=2, classes=9, tokens=4).data(seed=5)
    assert words.shape == following.shape == (2, 4)
    assert max(words.max(), following.max()) < 9
    assert not torch.equal(words, following)
