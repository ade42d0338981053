"""The bench of parallelism: ratios, shares, targets and tables, from made-up times."""

import json

import pytest
from typer.testing import CliRunner

from thinwire.bench import parallel
from thinwire.cli import app
from thinwire.errors import InputError


def row(method, times, sent=None, error=0.0):
    return {
        "method": method,
        "times_s": times,
        "plain_times_s": [4.0, 8.0, 4.0],
        "interface_nbytes": 5e6,
        "sent_nbytes": sent,
        "gradient_error": error,
    }


@pytest.fixture
def cell():
    rows = [
        row("fp32", [4.0, 8.0, 4.0]),
        row("compute only", [0.5, 0.5, 1.0], error=None),
        row("bf16", [2.0, 4.0, 2.5], error=0.002),
        row("int8", [1.0, 4.0, 1.0], 1e6, 0.01),
    ]
    return {"kind": "fsdp", "hosts": 2, "link": "10gbit", "rows": rows}


def test_ratios_are_medians_over_rounds(cell):
    summed = parallel.summed_up(cell)
    by_method = {each["method"]: each for each in summed["rows"]}
    assert list(by_method) == ["fp32", "bf16", "int8"], "computing alone is no method"
    assert {name: each["ratio_to_fp32"] for name, each in by_method.items()} == {
        "fp32": 1.0,
        "bf16": 2.0,
        "int8": 4.0,
    }
    assert by_method["int8"]["ratio_to_bf16"] == 2.0
    assert by_method["int8"]["step_s"] == 1.0
    assert summed["compute_s"] == 0.5
    assert summed["communication_share"] == 1 - 1 / 8


def test_against_bfloat16_counts_the_codec_that_computes_in_it(cell):
    both = [*cell["rows"], row("bf16:int8", [1.0, 2.0, 1.0], 1e6, 0.01)]
    bound = parallel.summed_up({**cell, "kind": "tensor", "rows": both})
    first, second = parallel.summary([bound])
    assert (first["worst"], second["worst"]) == (4.0, 2.0)
    cell["rows"][3]["times_s"] = [8.0, 8.0, 8.0]
    slow = parallel.summed_up({**cell, "rows": [*cell["rows"], both[-1]]})
    first, second = parallel.summary([slow])
    assert (first["met"], second["met"]) == (False, True)


def test_labs_have_nodes_where_a_kind_has(monkeypatch, cell):
    labs = []

    class Lab:
        def __init__(self, **topology):
            labs.append(topology)

        def __enter__(self):
            return self

        def __exit__(self, *_):
            pass

    monkeypatch.setattr(parallel, "Lab", Lab)
    del cell["link"]
    made = lambda _, kinds, *__: [{**cell, "kind": kind, "hosts": 4} for kind in kinds]  # noqa: E731
    monkeypatch.setattr(parallel, "measure", made)
    result = parallel.run(["fsdp", "hsdp", "tensor"], [(4, "1gbit"), (4, "loopback")])
    assert labs == [
        {"hosts": 4, "link": "1gbit", "device": "cpu"},
        {"nodes": 2, "per_node": 2, "inside": "10gbit", "between": "1gbit", "device": "cpu"},
        {"hosts": 4, "link": "loopback", "device": "cpu"},
    ]
    inside = [(each["kind"], each["inside"]) for each in result["cells"]]
    assert inside[:3] == [("fsdp", None), ("tensor", None), ("hsdp", "10gbit")]
    assert inside[3:] == [("fsdp", None), ("hsdp", None), ("tensor", None)]
    title = parallel.tables(result)[0][0]
    assert title.endswith("fsdp 88%, tensor 88%, hsdp 88%; hsdp: 10gbit inside nodes")


@pytest.mark.parametrize(("slower", "met"), [(1.0, True), (2.0, False)])
def test_targets_hold_where_communication_takes_most_of_a_step(cell, slower, met):
    cell["rows"][3]["times_s"] = [slower * each for each in cell["rows"][3]["times_s"]]
    bound = parallel.summed_up(cell)
    first, second = parallel.summary([bound])
    assert (first["met"], second["met"]) == (met, met)
    assert first["worst"] == 4.0 / slower
    assert first["where"] == "fsdp, 2 hosts, 10gbit"
    assert [line["met"] for line in parallel.summary([{**bound, "communication_share": 0.5}])] == [None] * 2
    assert [line["met"] for line in parallel.summary([{**bound, "communication_share": None}])] == [None] * 2


def test_tables_show_bytes_and_errors(cell):
    bound = parallel.summed_up(cell)
    places, targets = parallel.tables({"cells": [bound], "summary": parallel.summary([bound])})
    assert places[0] == "2 hosts, 10gbit; communication share in float32: fsdp 88%"
    assert places[2][0] == ("fsdp", "fp32", "4000.0", "1.00", "0.50", "", "5.00", "0")
    assert places[2][2] == ("fsdp", "int8", "1000.0", "4.00", "2.00", "1.00", "5.00", "0.01")
    assert targets[2][0][-1] == "yes"
    other = parallel.tables({"cells": [{**bound, "link": "loopback"}], "summary": []})[0]
    assert other[2][0][6] == "", "loopback has no interface of its own"


def test_unknown_kinds_and_devices_are_refused():
    with pytest.raises(InputError, match="unknown kind 'fsdq'; did you mean 'fsdp'"):
        parallel.run(["fsdq"])
    ended = CliRunner().invoke(app, ["bench", "parallel", "--kind", "tensr"])
    assert ended.exit_code != 0
    assert "did you mean 'tensor'" in str(ended.exception) + ended.output


def test_saved_cells_are_not_measured_again(cell, monkeypatch, tmp_path):
    known = parallel.summed_up({**cell, "commit": "abc", "date": "2026-01-01"})
    monkeypatch.setattr(parallel, "Lab", None)  # measuring would fail
    result = parallel.run(["fsdp"], [(2, "10gbit")], known=[known])
    assert [each["commit"] for each in result["cells"]] == ["abc"]
    (tmp_path / "parallel-cpu.json").write_text(json.dumps({"cells": [known]}))
    words = ["bench", "parallel", "--kind", "fsdp", "--hosts", "2", "--link", "10gbit", "--add"]
    ended = CliRunner().invoke(app, [*words, "--save", str(tmp_path), "--json"])
    assert ended.exit_code == 0, ended.output
    assert json.loads((tmp_path / "parallel-cpu.json").read_text())["cells"][0]["commit"] == "abc"


def test_a_table_says_how_much_of_transfers_is_hidden(cell):
    for each in cell["rows"]:
        each |= {"hidden_share": 0.25, "exposed_s": 0.0034}
    title, header, rows = parallel.tables({"cells": [parallel.summed_up(cell)], "summary": []})[1]
    assert "does not wait" in title
    assert len(header) == len(rows[0])
    assert rows[0] == ("fsdp", "2 hosts, 10gbit", "fp32", "25%", "3.4")


@pytest.mark.rest
def test_two_processes_pass_sub_batches_on_loopback():
    methods = ["compute only", "fp32@2", "int8", "int8@4"]
    (cell,) = parallel.run(["sub-batches"], [(2, "loopback")], methods, seconds=0.1)["cells"]
    rows = {each["method"]: each for each in cell["rows"]}
    assert list(rows) == ["fp32", "fp32@2", "int8", "int8@4"]
    assert rows["fp32@2"]["gradient_error"] < 1e-5 < rows["int8@4"]["gradient_error"] < 0.1
    assert all(0 <= each["hidden_share"] <= 1 for each in rows.values())
    assert all(each["exposed_s"] > 0 for each in rows.values())
    assert rows["int8"]["sent_nbytes"] == pytest.approx(rows["int8@4"]["sent_nbytes"], rel=0.01)


@pytest.mark.rest
def test_two_processes_measure_a_kind_on_loopback():
    result = parallel.run(["expert"], [(2, "loopback")], ["int8"], seconds=0.1)
    (cell,) = result["cells"]
    assert [each["method"] for each in cell["rows"]] == ["fp32", "int8"]
    assert 0 < cell["rows"][1]["gradient_error"] < 0.03
    assert cell["rows"][0]["gradient_error"] == 0
    assert all(len(each["times_s"]) >= 4 for each in cell["rows"])
