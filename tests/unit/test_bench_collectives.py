"""The bench of collectives: what is asked of the lab, what ranks measure, and what the tables say."""

import json
import statistics
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

from thinwire.bench import collective_worker as worker
from thinwire.bench import collectives as bench
from thinwire.errors import LabError, UnknownCodecError
from thinwire.runtimes.trace import trace

HEADER = ("method", "schedule", "ms", "algbw MB/s", "busbw MB/s", "ratio to fp32", "relative error")


@pytest.fixture
def asked(monkeypatch):
    """What `measure` is asked for; it finds nothing."""
    calls = []

    def measure(hosts, link, numels, specs, seconds, **more):
        calls.append((hosts, link, list(numels), list(specs), seconds, more))
        return [{"hosts": hosts}]

    monkeypatch.setattr(bench, "measure", measure)
    return calls


def test_every_place_is_measured_and_then_every_size_on_loopback(asked):
    said = []
    found = bench.run(progress=said.append, seconds=8.0)
    places, sizes = asked[: len(bench.PLACES)], asked[len(bench.PLACES) :]
    for (hosts, link), call in zip(bench.PLACES, places, strict=True):
        specs = list(bench.LEVEL_SPECS if link == bench.LEVELS else bench.SPECS)
        hooks = {"hooks": [] if link == bench.LEVELS else [bench.CORE_NUMEL]}
        assert call == (hosts, link, [bench.CORE_NUMEL], specs, 8.0, hooks)
    assert sizes == [(world, "loopback", list(bench.SIZES), ["int8/256"], 2.0, {}) for world in bench.WORLDS]
    assert said[0] == "2 hosts, 100mbit"
    assert said[-1] == "sizes on loopback, 8 ranks"
    assert len(said) == len(asked) == len(found["rows"])
    assert (found["device"], found["absent"]) == ("cpu", {})
    assert found["commit"]


def test_chosen_places_codecs_and_sizes_are_all_that_is_measured(asked):
    bench.run(places=[(3, "1gbit")], specs=["bf16@ring"], seconds=1.0, sizes=[7])
    assert asked == [(3, "1gbit", [bench.CORE_NUMEL], ["bf16@ring"], 1.0, {"hooks": [bench.CORE_NUMEL]})]
    asked.clear()
    bench.run(sizes=[7])
    assert [call[2] for call in asked[-3:]] == [[7]] * 3
    with pytest.raises(UnknownCodecError):
        bench.run(specs=["itn8@ring"])


def test_a_gpu_shares_the_time_between_sizes_and_ends_with_stages(asked, monkeypatch):
    monkeypatch.setattr(bench.machine, "default_numel", lambda _: 1)
    said = []
    bench.run("cuda", progress=said.append, seconds=20.0)
    for (hosts, link), call in zip(bench.GPU_PLACES, asked[:-1], strict=True):
        each = 20.0 / len(bench.GPU_SIZES)
        assert call == (
            hosts, link, list(bench.GPU_SIZES), list(bench.GPU_SPECS), each, {"device": "cuda"}
        )  # fmt: skip
    stages = {"device": "cuda", "stages": bench.STAGES}
    assert asked[-1] == (1, "loopback", [], list(bench.SPECS), 20.0, stages)
    assert said[0] == "2 hosts that share a GPU, 10gbit"
    asked.clear()
    bench.run("cuda", [(2, "10gbit")], ["bf16"], seconds=6.0, sizes=[8, 9])
    assert asked == [(2, "10gbit", [8, 9], ["bf16"], 3.0, {"device": "cuda"})]


class FakeLab:
    """Takes a lab's options and says what a rank would."""

    options: dict
    ended: SimpleNamespace

    def __init__(self, **options):
        type(self).options = options

    def __enter__(self):
        return self

    def __exit__(self, *_):
        pass

    def run(self, command, **how):
        type(self).command, type(self).how = command, how
        return self.ended


def test_a_lab_is_opened_for_every_place(monkeypatch):
    monkeypatch.setattr(bench, "Lab", FakeLab)
    FakeLab.ended = SimpleNamespace(
        ok=True, outputs=('words\nRESULT [{"method": "a"}, {"method": "b"}]\n', "")
    )
    found = bench.measure(4, "1gbit", (5,), ("bf16",), 2.0, hooks=(6,), device="cuda", stages=(7,))
    assert found == [{"link": "1gbit", "method": "a"}, {"link": "1gbit", "method": "b"}]
    assert FakeLab.options == {"hosts": 4, "link": "1gbit", "device": "cuda"}
    assert FakeLab.command[1:3] == ["-m", "thinwire.bench.collective_worker"]
    assert json.loads(FakeLab.command[3]) == {
        "numels": [5], "specs": ["bf16"], "seconds": 2.0, "hooks": [6], "device": "cuda", "stages": [7],
    }  # fmt: skip
    assert FakeLab.how == {"timeout_s": bench.TIMEOUT_S, "echo": False}
    bench.measure(4, bench.LEVELS, (5,), ("bf16",), 2.0)
    levels = {"nodes": 2, "per_node": 2, "inside": "10gbit", "between": "100mbit", "device": "cpu"}
    assert FakeLab.options == levels
    FakeLab.ended = SimpleNamespace(ok=False, outputs=("x" * 3000 + "Boom", "fine"))
    with pytest.raises(LabError, match=r"4 hosts on 1gbit: a rank failed:\nx{1996}Boom$"):
        bench.measure(4, "1gbit", (5,), ("bf16",), 2.0)


def row(method, schedule="two_shot", *, link="1gbit", world=2, numel=bench.CORE_NUMEL, **more):
    found = {"method": method, "schedule": schedule, "link": link, "world": world, "numel": numel}
    speed = {"seconds": 0.5, "algbw_bytes_per_s": 5e7, "busbw_bytes_per_s": 7.5e7, "ratio_to_fp32": 2.0}
    return {**found, **speed, "error": 0.0123, **more}


def hook(method):
    kept = ("method", "schedule", "link", "world", "numel", "seconds", "ratio_to_fp32")
    return {key: value for key, value in row(method, "hook", numel=6_250_000).items() if key in kept}


def test_a_place_has_a_table_with_every_method_once():
    rows = [row("torch fp32", "torch", ratio_to_fp32=1.0), row("torch fp16", "torch"), row("int8/256")]
    rows += [row("onebit/512", error=None), row("int8/256", seconds=9.0), hook("DDP fp32")]
    ((title, header, cells),) = bench.tables({"rows": rows})
    assert (title, header) == ("25 MB of float32, 2 hosts, 1gbit", HEADER)
    assert cells == [
        ("torch fp32", "torch", "500.00", "50.0", "75.0", "1.00", "0.012"),
        ("torch fp16", "torch", "500.00", "50.0", "75.0", "2.00", "0.012"),
        ("int8/256", "two_shot", "500.00", "50.0", "75.0", "2.00", "0.012"),
        ("onebit/512", "two_shot", "500.00", "50.0", "75.0", "2.00", ""),
        ("DDP fp32", "hook", "500.00", "", "", "2.00", ""),
    ]


def test_places_have_tables_of_their_own_and_three_methods_make_none():
    methods = ("torch fp32", "torch fp16", "int8/256", "bf16")
    rows = [row(each, link=link, world=world) for link, world in (("a", 2), ("a", 4)) for each in methods]
    rows += [row(each, link="few") for each in methods[:3]]
    found = bench.tables({"rows": rows})
    assert [title for title, *_ in found] == [f"25 MB of float32, {world} hosts, a" for world in (2, 4)]


def test_sizes_have_a_table_where_there_are_several():
    rows = [row("int8/256", link="loopback", numel=numel) for numel in (256, bench.CORE_NUMEL)]
    rows += [row("bf16", link="loopback", numel=999), row("int8/256", "hook", link="loopback", numel=5)]
    rows += [row("int8/256", link="10gbit", numel=numel, world=4) for numel in (bench.CORE_NUMEL, 500)]
    first, second = bench.tables({"rows": rows})
    assert first == (
        "int8/256 by size on loopback",
        ("KB", "ranks", "schedule", "ms", "algbw MB/s", "busbw MB/s", "ratio to fp32"),
        [
            ("1", "2", "two_shot", "500.00", "50.0", "75.0", "2.00"),
            ("25,000", "2", "two_shot", "500.00", "50.0", "75.0", "2.00"),
        ],
    )
    assert second[0] == "int8/256 by size over 10gbit"
    assert [each[:2] for each in second[2]] == [("25,000", "4"), ("2", "4")]


def test_stages_have_a_table_for_each_size():
    def stages(method, numel, *seconds):
        taken = dict(zip(("encode", "decode"), seconds, strict=True))
        return {
            "method": method,
            "schedule": "stages",
            "link": "x",
            "world": 1,
            "numel": numel,
            "stages_s": taken,
        }

    rows = [stages("bf16", 1_000_000, 1e-3, 2e-3), stages("int8/256", 1_000_000, 3e-3, 4.5e-3)]
    found = bench.tables({"rows": [*rows, stages("bf16", bench.CORE_NUMEL, 1.0, 2.0)]})
    columns = ("codec", "encode ms", "decode ms")
    assert found == [
        ("stages of 4 MB on the GPU", columns, [("bf16", "1.000", "2.000"), ("int8/256", "3.000", "4.500")]),
        ("stages of 25 MB on the GPU", columns, [("bf16", "1000.000", "2000.000")]),
    ]


# Ranks


@pytest.fixture
def alone():
    """A group of one rank."""
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


@pytest.fixture
def four(monkeypatch):
    """A world of four ranks, whose sums are four times one of them."""
    monkeypatch.setattr(dist, "get_world_size", lambda: 4)
    monkeypatch.setattr(dist, "all_reduce", lambda x, **_: x.mul_(4))


@pytest.mark.usefixtures("four")
def test_all_of_torchs_methods_are_means():
    x = torch.tensor([1.0, -2.0, 3.5])
    assert torch.equal(worker._exact(x), x.double())
    assert worker._exact(x).dtype == torch.float64
    for method in (worker._torch_fp32, worker._torch_fp16):
        found = x.clone()
        method(found)
        assert torch.equal(found, x)
    third = torch.tensor([1 / 3])
    worker._torch_fp16(third)
    assert third.item() == torch.tensor(1 / 3).half().item()


def test_the_exact_mean_of_much_is_not_computed(monkeypatch):
    monkeypatch.setattr(worker, "LARGEST_CHECKED", 3)
    monkeypatch.setattr(dist, "get_world_size", lambda: 1)
    monkeypatch.setattr(dist, "all_reduce", lambda _: None)
    assert worker._exact(torch.ones(3)).tolist() == [1.0] * 3
    assert worker._exact(torch.ones(4)).numel() == 0


def test_an_error_is_relative_to_the_exact_mean():
    x, source, exact = torch.empty(2), torch.tensor([1.0, 1.0]), torch.tensor([3.0, 4.0]).double()

    def method(found):
        assert torch.equal(found, source)
        found.copy_(torch.tensor([3.0, 3.0]))

    assert worker._error(method, x, source, exact) == pytest.approx(0.2)
    assert worker._error(method, x, source, torch.zeros(2)) == 0.0
    assert worker._error(method, x, source, torch.empty(0)) is None


def test_a_row_has_medians_and_what_a_ring_would_send(monkeypatch):
    monkeypatch.setattr(dist, "get_world_size", lambda: 4)
    times = {worker.FP32: [4.0, 4.0, 6.0], "int8/256@ring": [1.0, 2.0, 4.0]}
    found = worker._row("int8/256@ring", 1000, times, 0.5)
    wire = trace(1000, "int8/256", 4, "ring")
    assert found.pop("peak_rss_nbytes") > 50e6  # of this process, which has torch loaded
    assert found == {
        "method": "int8/256@ring", "schedule": "ring", "world": 4, "numel": 1000, "rounds": 3,
        "seconds": 2.0, "best_s": 1.0, "algbw_bytes_per_s": 2000.0, "busbw_bytes_per_s": 3000.0,
        "ratio_to_fp32": 2.0, "error": 0.5, "sent_nbytes": wire.sent_nbytes,
    }  # fmt: skip
    plain = worker._row(worker.FP32, 1000, times, None)
    assert (plain["schedule"], plain["sent_nbytes"], plain["ratio_to_fp32"]) == ("torch", None, 1.0)
    times["int8/256"] = [1.0, 1.0, 1.0]
    chosen = worker._row("int8/256", 1000, times, None)
    assert chosen["schedule"] == trace(1000, "int8/256", 4, "auto").schedule


@pytest.mark.usefixtures("alone")
def test_methods_take_turns_on_the_same_input():
    said, source = [], torch.tensor([1.0, 2.0])

    def method(name):
        def run(x):
            assert torch.equal(x, source)
            said.append(name)
            x += 1

        return run

    found = worker._take_turns({"a": method("a"), "b": method("b")}, torch.empty(2), source, 0.0)
    assert said == ["a", "b"] * 3
    assert set(found) == {"a", "b"}
    assert all(len(each) == 3 and min(each) > 0 for each in found.values())


@pytest.mark.usefixtures("alone")
def test_time_is_up_when_it_is_up(monkeypatch):
    clock = iter(range(10_000))
    monkeypatch.setattr(worker.time, "perf_counter", lambda: next(clock))
    found = worker._take_turns({"a": lambda _: None}, torch.empty(1), torch.zeros(1), 14.5)
    assert found == {"a": [1.0] * 6}  # from the third on, every round looks at the clock three times


@pytest.mark.usefixtures("alone")
def test_one_size_is_measured_with_all_methods():
    rows = worker.measure(5000, ["int8/256", "bf16@two_shot"], 0.0, torch.device("cpu"))
    assert [each["method"] for each in rows] == [worker.FP32, worker.FP16, "int8/256", "bf16@two_shot"]
    assert {each["device"] for each in rows} == {"cpu"}
    assert {each["numel"] for each in rows} == {5000}
    assert rows[0]["error"] == 0
    assert rows[1]["error"] == pytest.approx(3e-4, rel=0.5)
    assert all(each["buffers_grown_nbytes"] <= each["buffers_nbytes"] for each in rows)
    assert [each["rounds"] for each in rows] == [3] * 4


def test_stages_are_those_of_codecs_that_one_rank_can_use(monkeypatch):
    timed = []

    def seconds(call, device):
        timed.append((call, device))
        call()
        return float(len(timed))

    monkeypatch.setattr(worker.timing, "seconds", seconds)
    specs = ["int8/256", "int8/256@ring", "qsgd4/512", "int8/tensor~shared", "bf16"]
    rows = worker.measure_stages(1000, specs, torch.device("cpu"))
    names = ("encode", "to the host", "from the host", "decode", "decode and add")
    assert rows == [
        {
            "method": method, "schedule": "stages", "numel": 1000, "world": 1,
            "stages_s": dict(zip(names, range(first, first + 5), strict=True)),
        }
        for method, first in (("int8/256", 1), ("bf16", 6))
    ]  # fmt: skip
    assert {device for _, device in timed} == {torch.device("cpu")}


@pytest.mark.usefixtures("alone")
def test_hooks_are_timed_on_one_layer():
    rows = worker.measure_hooks(105, 0.0)
    assert [each["method"] for each in rows] == [
        "DDP fp32", "DDP fp16_compress_hook", "DDP powerSGD_hook rank 4", "DDP thinwire int8/256",
        "DDP thinwire int4/128",
    ]  # fmt: skip
    assert {(each["schedule"], each["numel"], each["world"], each["rounds"]) for each in rows} == {
        ("hook", 100, 1, 3)
    }
    assert rows[0]["ratio_to_fp32"] == 1.0
    assert all(0 < each["best_s"] <= each["seconds"] for each in rows)
    assert worker.measure_hooks(1, 0.0)[0]["numel"] == 4


@pytest.mark.usefixtures("alone")
def test_a_hook_sends_the_gradient_through_its_codec(monkeypatch):
    calls, inner = [], worker.collectives.all_reduce

    def all_reduce(x, channel, op, **how):
        calls.append((x.numel(), channel.codec.spec, op, how))
        return inner(x, channel, op, **how)

    monkeypatch.setattr(worker.collectives, "all_reduce", all_reduce)
    model = DistributedDataParallel(torch.nn.Linear(30, 30, bias=False))
    model.register_comm_hook(None, worker._hook("int4/128"))
    worker._backward(model, 30)
    assert calls == [(900, "int4/128", "avg", {"name": "0", "async_op": True})] * 4


@pytest.mark.usefixtures("alone")
def test_a_backward_pass_is_warmed_up_past_the_first_two_of_powersgd():
    model = DistributedDataParallel(torch.nn.Linear(8, 8, bias=False))
    states, register = [], model.register_comm_hook
    model.register_comm_hook = lambda state, hook: (states.append(state), register(state, hook))
    worker._power_sgd(model)
    assert (states[0].matrix_approximation_rank, states[0].start_powerSGD_iter) == (4, 2)
    seen = []
    model.module.register_forward_hook(lambda _, inputs, __: seen.append(inputs[0].shape))
    step = worker._backward(model, 8)
    assert states[0].iter == 4
    assert seen == [(1, 8)] * 4
    first = (step(torch.empty(0)), model.module.weight.grad.clone())[1]
    step(torch.empty(0))
    assert torch.allclose(model.module.weight.grad, first, atol=1e-4)  # of one pass: they do not add up


@pytest.mark.rest
def test_two_ranks_on_loopback(monkeypatch):
    """Real ranks: methods, codecs on schedules, hooks."""
    monkeypatch.setattr(bench, "CORE_NUMEL", 20_000)
    found = bench.run(places=[(2, "loopback")], specs=["int8/256", "bf16@ring"], seconds=0.0)
    rows = {each["method"]: each for each in found["rows"]}
    assert list(rows)[:4] == [worker.FP32, worker.FP16, "int8/256", "bf16@ring"]
    assert len(rows) == 9
    assert {each["link"] for each in found["rows"]} == {"loopback"}
    assert {each["world"] for each in found["rows"]} == {2}
    assert rows["bf16@ring"]["schedule"] == "ring"
    assert rows["bf16@ring"]["sent_nbytes"] == trace(20_000, "bf16", 2, "ring").sent_nbytes
    errors = [rows[each]["error"] for each in (worker.FP32, worker.FP16, "bf16@ring", "int8/256")]
    assert 0 < errors[0] < 1e-6 < errors[1] < errors[2] < errors[3] < 0.02
    for each in found["rows"]:
        assert each["rounds"] == 3
        assert each["best_s"] <= each["seconds"]
        if each["schedule"] != "hook":
            assert each["numel"] == 20_000
            assert each["busbw_bytes_per_s"] == each["algbw_bytes_per_s"] == 80_000 / each["seconds"]
    assert statistics.median(each["seconds"] for each in found["rows"]) < 60
    assert len(bench.tables(found)[0][2]) == 9
