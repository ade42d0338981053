"""The benchmark of `simulate` measures what it names and says so in tables; its speed is not tested."""

import copy
import json
import math
from dataclasses import replace

import pytest
import torch
from typer.testing import CliRunner

from thinwire import cli, simulate
from thinwire.bench import cuda_graphs, qtorch_peer
from thinwire.bench import simulate as bench_simulate
from thinwire.bench import simulate_tables as bench_simulate_tables
from thinwire.errors import InputError

SIZES = bench_simulate.Sizes(
    side=32,
    reference_steps=32,
    torch_steps=4,
    numel=1 << 12,
    peer_numel=1 << 12,
    network="resnet8",
    pixels=8,
    nodes=4,
    samples=1,
    group=2,
    small_nodes=4,
    together=(2, 4),
    budget_s=0.0,
    least=1,
)


@pytest.fixture(scope="module")
def record():
    before = torch.get_num_threads()
    result = bench_simulate.run("cpu", sizes=SIZES)
    assert torch.get_num_threads() == before
    return result


@pytest.fixture(scope="module")
def quant():
    try:
        return qtorch_peer.load()
    except qtorch_peer.FAILURES as error:
        pytest.skip(f"qtorch is not here: {error}")


def test_a_record_says_where_it_was_made_and_how_much_was_measured(record):
    assert record["device"] == "cpu"
    assert record["commit"]
    assert record["machine"]["processor"]
    assert record["sizes"]["side"] == 32
    assert record["quick"] is False


def test_every_product_has_a_complete_row(record):
    assert [row["product"] for row in record["products"]] == list(bench_simulate.PRODUCTS)
    for row in record["products"]:
        assert row["side"] == 32
        assert math.isclose(row["macs_per_s"], 32**3 / row["seconds"])
        assert math.isclose(row["times_reference"], row["macs_per_s"] / row["reference_macs_per_s"])
        assert math.isclose(row["times_torch"], row["macs_per_s"] / row["torch_macs_per_s"])
        assert math.isclose(row["slower_than_torch"], row["seconds"] * record["torch_macs_per_s"] / 32**3)
    kernels = {row["product"]: row["kernel"] for row in record["products"]}
    assert kernels["e5m2, e5m10 sequential"]
    assert {row["rounded"] for row in record["products"]} == {"every step", "once"}


@pytest.mark.parametrize("name", bench_simulate.PRODUCTS)
def test_what_is_compared_has_the_same_bits(name):
    how = bench_simulate.PRODUCTS[name]
    generator = torch.Generator().manual_seed(0)
    a, b = torch.randn(5, 67, generator=generator), torch.randn(67, 9, generator=generator)
    rng = bench_simulate.STREAM if how.rounding == "stochastic" else None
    product = simulate.matmul(a, b, how, rng=rng)
    for in_torch in (False, True):
        again = bench_simulate.step_by_step(how, a, b, rng, in_torch=in_torch)
        assert torch.equal(product.view(torch.int32), again.view(torch.int32))


def test_quantizers_are_measured_both_ways_with_and_without_counters(record):
    rows = record["quantizers"]
    measured = {(row["format"], row["way"], row["counted"]) for row in rows}
    ways = {
        (spec, way, counted)
        for spec in bench_simulate.QUANTIZERS
        for way in ("forward", "forward and backward")
        for counted in (False, True)
    }
    assert measured == {("float32", "clone", False), *ways}
    for row in rows:
        passes = 2 if row["way"] == "forward and backward" else 1
        assert math.isclose(row["bandwidth_ratio"], passes * row["copy_s"] / row["seconds"])


def test_nodes_are_measured_beside_a_plain_loop(record):
    expected = ["accumulate/2", *bench_simulate.SCHEDULES]
    assert [row["schedule"] for row in record["nodes"]] == expected
    for row in record["nodes"]:
        assert row["network"] == "resnet8"
        assert row["parameters"] > 70_000
        assert math.isclose(row["ratio"], row["seconds"] / row["plain_s"])
    assert [row["together"] for row in record["together"]] == [1, 2, 4]
    assert record["together"][0]["times_loop"] == 1


@pytest.mark.parametrize("case", cuda_graphs.CASES, ids=lambda case: case.what)
def test_steps_that_are_recorded_on_a_gpu_train_as_usual(case):
    step = cuda_graphs._step(replace(case, samples=1), torch.device("cpu"), recorded=False)
    first, second = step(), step()
    assert first.isfinite()
    assert second.isfinite()
    assert first > 0


def test_recorded_steps_have_a_table_where_there_is_a_gpu(record):
    assert record["recorded"] == []
    row = {"what": "a step", "usual_s": 0.01, "recorded_s": 0.002, "times": 5.0}
    titled = {title: rows for title, _, rows in bench_simulate.tables({**record, "recorded": [row]})}
    assert titled["steps of small networks, replayed from a CUDA graph"] == [
        ("a step", "10.00", "2.00", "5.0")
    ]


def test_the_plain_loop_has_the_gradients_of_nodes_in_float32():
    model, batch = bench_simulate._job("cnn-small", 1, 28, 8, torch.device("cpu"))
    bench_simulate.plain_step(model, 4, *batch)
    plain = [each.grad.clone() for each in model.parameters()]
    simulate.Nodes(model, 4).backward(bench_simulate._loss, *batch)
    for one, other in zip(plain, (each.grad for each in model.parameters()), strict=True):
        assert torch.allclose(one, other, rtol=1e-4, atol=1e-6)


def test_calls_take_turns_and_the_warm_up_does_not_count():
    seen = []
    calls = {name: lambda name=name: seen.append(name) for name in "ab"}
    taken = bench_simulate.in_turns(calls, torch.device("cpu"), replace(SIZES, least=2))
    assert taken.keys() == {"a", "b"}
    assert all(each > 0 for each in taken.values())
    assert seen[:4] == ["a", "a", "b", "b"]
    turns = [name for i, name in enumerate(seen[4:]) if i == 0 or name != seen[3 + i]]
    assert turns == ["a", "b"] * (len(turns) // 2)
    assert len(turns) >= 4


# Targets


def test_targets_of_a_cpu_come_from_its_rows(record):
    made = copy.deepcopy(record)
    made["products"][0]["times_torch"] = 20.0
    made["products"][1]["times_torch"] = 19.9
    made["nodes"][0]["ratio"], made["nodes"][1]["ratio"] = 3.0, 3.1
    targets = {row["what"]: row for row in bench_simulate.targets(made)}
    stepwise = [row for row in made["products"] if row["rounded"] == "every step"]
    assert len(targets) == len(stepwise) + len(made["nodes"])
    assert targets["product e5m2, e5m10 sequential"]["met"]
    assert not targets["product e5m2, e5m10 chunked/64"]["met"]
    assert targets["resnet8, 4 nodes, accumulate/2"]["met"]
    assert not targets["resnet8, 4 nodes, accumulate/sequential"]["met"]
    assert targets["resnet8, 4 nodes, accumulate/2"]["measured"] == 3.0


def test_targets_of_a_gpu_come_from_its_rows(record):
    made = {**copy.deepcopy(record), "device": "cuda"}
    for row in made["products"]:
        row["macs_per_s"] = 0.5e12
    for row in made["quantizers"]:
        row["bandwidth_ratio"] = 0.9 if row["way"] == "forward" else 0.8
    met = {row["what"]: row["met"] for row in bench_simulate.targets(made)}
    assert not met["product e5m2, e5m10 sequential"]
    assert met["product e5m2, e5m10 kahan"]
    assert met["Quantizer e5m2 forward"]
    assert not met["Quantizer e5m2 forward and backward"]
    assert set(bench_simulate_tables.TERA) <= set(bench_simulate.PRODUCTS)


# QPyTorch


def test_qtorch_is_measured(quant, record):
    x = torch.randn(16)
    assert [row["what"] for row in record["peers"]] == [what for what, *_ in qtorch_peer.cases(quant, x)]
    assert all(math.isclose(row["times_faster"], row["qtorch_s"] / row["seconds"]) for row in record["peers"])
    assert record["absent"] == {}


def test_without_qtorch_the_record_says_why(monkeypatch):
    def missing():
        raise ModuleNotFoundError("No module named 'qtorch'")

    monkeypatch.setattr(qtorch_peer, "load", missing)
    rows, absent = bench_simulate.measure_peers(torch.device("cpu"), SIZES)
    assert rows == []
    assert "No module" in absent["qtorch"]


def test_on_a_gpu_qtorch_is_left_out():
    rows, absent = bench_simulate.measure_peers(torch.device("cuda"), SIZES)
    assert rows == []
    assert "CPU only" in absent["qtorch"]


# Tables


@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_tables_are_text_and_hold_every_row(record, device):
    saved = {**json.loads(json.dumps(record)), "device": device}  # as they are made from a saved record
    tables = bench_simulate.tables(saved)
    for _, header, rows in tables:
        assert rows
        assert all(len(row) == len(header) for row in rows)
        assert all(isinstance(cell, str) and cell for row in rows for cell in row)
    titles = [title for title, _, _ in tables]
    assert "products of 32 x 32" in titles[0]
    assert titles[-1] == "targets"
    assert len(tables[0][2]) == len(bench_simulate.PRODUCTS)


def test_tables_without_qtorch_leave_it_out(record):
    tables = bench_simulate.tables({**record, "peers": []})
    assert not any("QPyTorch" in title for title, _, _ in tables)


def test_the_verb_prints_the_record(monkeypatch, record, tmp_path):
    asked = []
    monkeypatch.setattr(bench_simulate, "run", lambda *what: asked.append(what[:2]) or dict(record))
    arguments = ["bench", "simulate", "--quick", "--json", "--commit", "abc", "--save", str(tmp_path)]
    ended = CliRunner().invoke(cli.app, arguments)
    assert ended.exit_code == 0, ended.output
    assert asked == [("cpu", True)]
    assert json.loads(ended.stdout)["products"] == record["products"]
    assert json.loads((tmp_path / "simulate-cpu.json").read_text())["commit"] == "abc"


def test_a_device_that_is_not_here_is_refused():
    with pytest.raises(InputError, match="use cpu or cuda"):
        bench_simulate.run("tpu")
