"""Status files: written whole, found by name, marked at the end, cleaned up when old."""

import io
import json
import os
import socket
import threading
import time

import pytest
from rich.console import Console
from typer.testing import CliRunner

from thinwire import cli
from thinwire.cli import watch
from thinwire.errors import LaunchError
from thinwire.integrations import job_status

MODEL = {
    "policy": "int8",
    "steps": 1000,
    "sent_nbytes": 26_000_000,
    "fp32_nbytes": 100_000_000,
    "ratio": 3.846,
    "step_s": 0.0123,
    "seconds": {"encode": 1.0, "wire": 2.0, "decode": 3.0, "wait": 0.5},
    "overlap": 0.9,
}


def begin(path, **changes):
    job_status.begin(path, job=path.stem, script="train.py", codec="int8")
    job_status.write(path, {**job_status.read(path), **changes})
    return path


def drawn(status, now):
    console = Console(file=io.StringIO(), width=100)
    console.print(watch.panel(status, now))
    return console.file.getvalue()


def test_without_jobs_it_says_how_to_start_one():
    with pytest.raises(LaunchError, match="no job runs or ran here; start one with: thinwire launch"):
        job_status.find()
    with pytest.raises(LaunchError, match="'x' is no job and no status file; no job runs"):
        job_status.find("x")
    with pytest.raises(LaunchError, match="is no job and no status file"):
        job_status.find("x" * 300)  # longer than a file's name can be


def test_jobs_are_found_by_name_by_path_and_by_being_newest(tmp_path):
    here = job_status.folder()
    begin(here / "old-1.json", started=1.0)
    begin(here / "new-2.json", started=2.0)
    begin(here / "ended-3.json", started=3.0, state="running")
    job_status.end(here / "ended-3.json", 0)
    begin(here / "gone-4.json", started=4.0, pid=2**22 + 1)
    (here / "rubbish.json").write_text("{")
    assert [path.stem for path in job_status.jobs()] == ["new-2", "old-1", "gone-4", "ended-3"]
    assert job_status.find().stem == "new-2"
    assert job_status.find("ended-3").stem == "ended-3"
    other = begin(tmp_path / "other.json")
    assert job_status.find(str(other)) == other
    with pytest.raises(LaunchError, match="'nothing' is no job and no status file; jobs are: new-2, old-1"):
        job_status.find("nothing")


def test_nothing_is_left_where_rank_0_was_not():
    path = begin(job_status.folder() / "other-node.json")
    job_status.end(path, 0)
    assert not path.exists()


def test_half_a_file_of_a_killed_rank_is_removed_when_its_job_ends():
    here = job_status.folder()
    path = begin(here / "job[1].json")
    for name in ("job[1].json.7.new", "job1.json.8.new", "other.json.9.new"):
        (here / name).write_text("{")
    job_status.end(path, 1)
    assert sorted(each.name for each in here.iterdir()) == [
        "job1.json.8.new",
        "job[1].json",
        "other.json.9.new",
    ]
    assert job_status.read(path)["state"] == "failed"


def test_old_jobs_are_cleaned_and_running_ones_kept():
    here = job_status.folder()
    for name, changes in (("runs", {}), ("gone", {"pid": 2**22 + 1}), ("ended", {}), ("fresh", {})):
        begin(here / f"{name}.json", **changes)
    for name in ("ended", "fresh"):
        job_status.end(here / f"{name}.json", 1)
    (here / "half.json.7.new").write_text("{")
    for path in here.iterdir():
        if path.stem != "fresh":
            os.utime(path, (0, 0))
    job_status.clean()
    assert sorted(path.stem for path in here.iterdir()) == ["fresh", "runs"]


def test_a_folder_others_can_write_to_is_not_used(tmp_path):
    (tmp_path / "thinwire").mkdir()
    (tmp_path / "thinwire").chmod(0o777)
    assert job_status.folder() is None
    assert job_status.jobs() == []


def test_a_status_that_cannot_be_written_stops_the_launcher_but_not_a_training(tmp_path):
    path = tmp_path / "nowhere" / "x.json"
    with pytest.raises(LaunchError, match=r"cannot write the status file .* --status FILE"):
        begin(path)
    writer = job_status.Writer(path, lambda: [MODEL])
    writer.start()
    writer.stop()


def test_the_writer_follows_the_numbers(tmp_path, monkeypatch):
    monkeypatch.setattr(job_status, "INTERVAL_S", 0.01)
    monkeypatch.setenv("WORLD_SIZE", "4")
    path, looked, models = begin(tmp_path / "job.json"), threading.Event(), [dict(MODEL, steps=1)]

    def look():
        if models[0]["steps"] == 3:
            looked.set()
            raise RuntimeError("deque mutated during iteration")
        return models

    writer = job_status.Writer(path, look)
    writer.start()
    for steps in (2, 3):
        models[0]["steps"] = steps
        time.sleep(0.05)
    assert looked.wait(5)
    models[0]["steps"] = 4
    writer.stop()
    status = job_status.read(path)
    assert (status["state"], status["world"], status["models"][0]["steps"]) == ("running", 4, 4)
    job_status.end(path, 0)
    status = job_status.read(path)
    assert (status["state"], status["exit_code"], status["models"][0]["steps"]) == ("finished", 0, 4)
    assert list(tmp_path.glob("*.new")) == []


def test_what_is_not_finite_is_null(tmp_path):
    job_status.write(
        tmp_path / "x.json", {"a": float("nan"), "b": [float("inf"), 1], "c": {1: (2.5, "x", True)}}
    )
    saved = json.loads((tmp_path / "x.json").read_text())
    assert saved == {"a": None, "b": [None, 1], "c": {"1": [2.5, "x", True]}}


def test_pictures(tmp_path):
    path = begin(
        tmp_path / "job.json", started=1000.0, updated=1100.0, models=[MODEL], state="running", world=2
    )
    status = job_status.read(path)
    shown = drawn(status, 1101.5)
    for text in (
        "job: train.py, int8", "running, 2 ranks, for 1 min 42 s, updated 1.5 s ago", "1,000", "12.3 ms",
        "0.026 MB", "3.85 times that", "encode", "90 %",
    ):  # fmt: skip
        assert text in shown
    assert "late" not in shown
    assert "late: the script may hang" in drawn(status, 1200.0)
    assert "restart 2" in drawn({**status, "attempt": 2}, 1101.0)
    assert "auto -> int8" in drawn({**status, "models": [{**MODEL, "label": "auto -> int8"}]}, 1101.0)
    ended = {**status, "state": "failed", "exit_code": 3, "ended": 1101.0}
    assert "failed, exit code 3, 2 ranks, for 1 min 41 s, ended 1 h 0 min ago" in drawn(ended, 4701.0)
    assert "no model is attached yet" in drawn({**status, "models": []}, 1101.0)
    assert "nothing was attached" in drawn({**ended, "models": []}, 1101.0)
    bare = {"policy": "x", "steps": 0, "sent_nbytes": 0, "ratio": 1.0, "step_s": None, "overlap": None}
    assert "step time" not in drawn({**status, "models": [bare]}, 1101.0)


def test_a_launcher_that_was_killed_is_gone_on_this_host_only(tmp_path):
    path = begin(tmp_path / "job.json", state="running", pid=2**22 + 1)
    assert job_status.state(job_status.read(path)) == "gone"
    assert job_status.state({**job_status.read(path), "host": "elsewhere"}) == "running"
    assert job_status.read(path)["host"] == socket.gethostname()
    shown = CliRunner().invoke(cli.app, ["watch", str(path), "--json"])
    assert json.loads(shown.stdout)["state"] == "gone"


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"started": "yesterday"}, "'started' must be a number, not \"yesterday\""),
        ({"updated": None}, "it has no 'updated'"),
        ({"updated": [1]}, "'updated' must be a number"),
        ({"pid": "me"}, "'pid' must be a number"),
        ({"pid": 10**30}, "'pid' must be a number"),
        ({"job": 7}, "'job' must be a text, not 7"),
        ({"state": {}}, "'state' must be a text"),
        ({"models": 5}, "'models' must be a list of objects"),
        ({"models": [5]}, "'models' must be a list of objects"),
        ({"models": [{"steps": "many"}]}, "'steps' must be a number, not \"many\""),
        ({"models": [{"seconds": [1]}]}, "'seconds' must be an object"),
        ({"models": [{"seconds": {"wire": "long"}}]}, "'wire' must be a number"),
        ({"models": [{"overlap": float("inf")}]}, "'overlap' must be a number"),
    ],
)
@pytest.mark.parametrize("how", ["--once", "--json"])
def test_a_status_of_wrong_types_is_refused_in_words(tmp_path, changes, said, how):
    path = begin(tmp_path / "job.json")
    path.write_text(json.dumps({**job_status.read(path), **changes}))
    refused = CliRunner().invoke(cli.app, ["watch", str(path), how]).exception
    assert isinstance(refused, LaunchError)
    assert f"{path} is no status file of a job: {said}" in str(refused)


@pytest.mark.parametrize("text", ["", "[]", "5", "\xff", "[" * 100_000])
def test_a_file_that_is_no_status_is_refused_in_words(tmp_path, text):
    path = tmp_path / "job.json"
    path.write_bytes(text.encode("latin-1"))
    with pytest.raises(LaunchError, match="is no status file of a job: it"):
        job_status.find(str(path))


def test_a_name_cannot_steer_the_terminal(tmp_path):
    evil = "\x1b]0;mine\x07[bold red]x[/nosuch]\x9b2J\u202e"
    model = {**MODEL, "policy": evil}
    path = begin(tmp_path / "job.json", job=evil, script=evil, codec=evil, state=evil, models=[model])
    shown = CliRunner().invoke(cli.app, ["watch", str(path), "--once"])
    assert shown.exit_code == 0, shown.output
    assert not {each for each in shown.stdout if each != "\n" and not each.isprintable()}
    wide = Console(file=io.StringIO(), width=400)
    wide.print(watch.panel(job_status.read(path), 1.0))
    assert wide.file.getvalue().count("\\x1b]0;mine\\x07[bold red]x[/nosuch]\\x9b2J\\u202e") == 5


def test_what_rank_0_writes_without_a_launcher_can_be_watched(tmp_path):
    writer = job_status.Writer(tmp_path / "alone.json", lambda: [MODEL])
    writer.start()
    writer.stop()
    shown = CliRunner().invoke(cli.app, ["watch", str(tmp_path / "alone.json"), "--once"])
    assert shown.exit_code == 0, shown.output
    assert "alone" in shown.stdout
