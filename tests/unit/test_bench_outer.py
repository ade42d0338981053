"""The bench of outer training: names, composed times, the front, its worker in a group of one rank."""

import json

import pytest
import torch
import torch.distributed as dist

from thinwire import data
from thinwire.bench import outer, outer_methods, outer_picture, outer_worker
from thinwire.data.texts import LENGTH, Text
from thinwire.errors import InputError


def loss_cell(method, seed, last, nbytes=4000.0):
    curve = [[5, last + 1.0, nbytes / 2], [10, last, nbytes]]
    return {"part": "loss", "method": method, "seed": seed, "steps": 10, "batch": 16, "curve": curve}


def time_cell(method, link, round_s, inner_s=None, steps=1):
    times = {"round": steps, "round_s": round_s, "inner_s": inner_s, "warm_up_s": 2.0}
    return {"part": "time", "method": method, "link": link, **times, "nbytes": 100.0}


CELLS = [
    *(loss_cell("ddp fp32", seed, 2.0 + seed) for seed in range(3)),
    *(loss_cell("diloco-5 int8", seed, 2.1 + seed, 400.0) for seed in range(3)),
    *(loss_cell("demo", seed, 2.5 + seed, 800.0) for seed in range(3)),
    time_cell("ddp fp32", "10mbit", 6.0),
    time_cell("diloco-5 int8", "10mbit", 7.0, 1.0, 4),
    time_cell("demo", "10mbit", 9.0),
]


def test_a_run_is_composed_of_inner_and_outer_steps():
    lines = {line["method"]: line for line in outer.summary(CELLS)}
    assert lines["ddp fp32"]["links"]["10mbit"]["run_s"] == 60.0
    # 8 inner steps of 1 s, 2 steps with an outer step of 7 - 3 * 1 s
    assert lines["diloco-5 int8"]["links"]["10mbit"]["run_s"] == 16.0
    # 1-bit Adam: 15 % of its steps in its warm-up
    assert outer.seconds(time_cell("onebit-adam", "", 0.5), 100) == 15 * 2.0 + 85 * 0.5
    assert outer.seconds(time_cell("streaming-50 int4", "", 10.0, None, 50), 100) == 20.0


def test_the_front_is_what_no_other_method_beats():
    fronts = {line["method"]: line["links"]["10mbit"]["front"] for line in outer.summary(CELLS)}
    assert fronts == {"ddp fp32": True, "diloco-5 int8": True, "demo": False}


def test_differences_are_those_of_equal_seeds():
    line = next(line for line in outer.summary(CELLS) if line["method"] == "diloco-5 int8")
    assert line["difference"]["mean"] == pytest.approx(0.1)
    assert line["difference"]["interval"] == pytest.approx((0.1, 0.1))  # although seeds differ by 1
    assert line["step_nbytes"] == 40.0


def test_the_table_has_a_line_for_each_method_and_columns_for_each_link():
    [(title, header, rows)] = outer.tables({"cells": CELLS})
    assert title == "4 hosts, 10 steps of 16 windows, 3 seeds"
    assert header[-3:] == ("10mbit: minutes", "tokens/s", "front")
    assert [row[0] for row in rows] == ["ddp fp32", "diloco-5 int8", "demo"]
    tokens = 10 * 16 * LENGTH
    assert rows[1][-3:] == (f"{16 / 60:.2f}", f"{tokens / 16:,.0f}", "●")
    assert outer.tables({"cells": []}) == []


def test_a_saved_result_goes_on_where_it_was(tmp_path):
    path = tmp_path / "outer-cpu.json"
    path.write_text(json.dumps({"cells": CELLS}))
    assert outer.saved_cells(path) == CELLS
    done = outer.run(["ddp fp32"], ["10mbit"], seeds=(0, 1, 2), steps=10, known=CELLS)  # nothing is left
    assert done["cells"] == CELLS
    path.write_text("{}")
    with pytest.raises(InputError, match="is no result of `thinwire bench outer`"):
        outer.saved_cells(path)


def test_the_picture_has_a_dot_for_every_method_and_a_curve(tmp_path):
    figure = outer_picture.draw({"cells": CELLS})
    assert len(figure.axes) == 4  # time on one link, and bytes: ends and curves
    texts = {text.get_text() for text in figure.axes[0].texts}
    assert texts == {"ddp", "diloco-5", "demo"}
    outer_picture.plot({"cells": CELLS}, tmp_path / "outer.png")
    assert (tmp_path / "outer.png").stat().st_size > 10_000


@pytest.mark.parametrize("name", ["diloco", "nothing", "diloco-0 int8", "ddpint8", "diloco-x"])
def test_a_name_of_no_method_is_refused(name):
    if name == "diloco":  # an outer step after every step
        outer_methods.check(name)
        return
    with pytest.raises(InputError, match=f"there is no method '{name}'; there are: ddp fp32"):
        outer_methods.check(name)


def test_all_methods_have_their_own_interval():
    intervals = {name: outer_methods.interval(name) for name in outer_methods.METHODS}
    assert intervals["diloco-250 fp32"] == 250
    assert intervals["demo"] == intervals["ddp int4"] == intervals["onebit-adam"] == 1
    assert len(intervals) == 16


@pytest.fixture
def alone(monkeypatch):
    """A group of one rank, and a text of words that return."""
    line = torch.tensor(list(b"the wire is thin and the gradients are wide. " * 400))
    windows = line[: len(line) // LENGTH * LENGTH].view(-1, LENGTH)
    text = Text(windows[:, :], torch.roll(windows, -1, 1), 256)
    monkeypatch.setattr(data, "examples", lambda _: (text, text))
    monkeypatch.setattr(outer_worker, "TESTS", 16)
    monkeypatch.setattr(outer_worker, "TURN_S", 0.0)
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


@pytest.mark.usefixtures("alone")
@pytest.mark.parametrize("method", ["ddp int8", "diloco-4 int8", "sparseloco-4", "demo", "onebit-adam"])
def test_every_kind_of_method_learns(method):
    cell = outer_worker.learn(method, 0, 32, 4)
    steps, losses, _ = zip(*cell["curve"], strict=True)
    assert steps == tuple(range(4, 33, 4))
    assert losses[-1] < losses[0]
    again = outer_worker.learn(method, 0, 32, 4)
    assert again["curve"] == cell["curve"]  # a seed decides everything


@pytest.mark.usefixtures("alone")
def test_times_are_of_rounds():
    cell = outer_worker.timed("diloco-50 int8", 2)
    assert cell["method"] == "diloco-50 int8"
    assert cell["round"] == outer_worker.ROUND
    assert 0 < cell["inner_s"] < cell["round_s"]
    plain = outer_worker.timed("ddp int8", 2)
    assert (plain["round"], plain["inner_s"]) == (1, None)
    assert outer.seconds({**plain, "link": ""}, 10) == pytest.approx(10 * plain["round_s"])
