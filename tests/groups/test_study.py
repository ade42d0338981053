"""Studies: real ranks that train on loopback, and programs that only talk like them."""

import json
import signal
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import nn
from typer.testing import CliRunner

from thinwire import cli, data
from thinwire.errors import InputError, LabError
from thinwire.integrations.auto import MOST
from thinwire.lab import Run, namespaces
from thinwire.lab.topology import Topology, parse_link
from thinwire.study import Record, Trial, convergence, demo
from thinwire.study.run import Progress, command, failure, run, seconds_left
from thinwire.study.store import Store
from thinwire.zoo import small

TRIAL = Trial("test", "digits", "mlp", "int8", 0, 2, "loopback", 12, 32, 0.05)
WALL_S = 120
#: A program that talks as a worker does, without training.
TALKER = """
import json, os, socket, sys, time
from thinwire.study.record import Point, Record, Trial

def meet():
    port = int(os.environ["MASTER_PORT"])
    if rank == 0:
        with socket.create_server(("127.0.0.1", port)) as server:
            server.accept()
    while rank:
        try:
            return socket.create_connection(("127.0.0.1", port)).close()
        except ConnectionRefusedError:
            time.sleep(0.01)

rank, trials = int(os.environ["RANK"]), [Trial(**each) for each in json.loads(sys.argv[1])]
for trial in trials:
    if trial.codec in ("bad", "killed"):
        meet()  # what was done before has been said
        if trial.codec == "killed" and rank == 1:
            os.kill(os.getpid(), 9)
        why = "ValueError: two lines" if rank else "CommError: rank 1 is gone"
        print(f"FAILED {trial.codec}, seed {trial.seed}: {why}")
        sys.exit(1)
    if trial.codec == "lonely":
        meet()
        if rank:
            sys.exit("ValueError: only here")
        time.sleep(60)  # until it is ended
    if trial.codec == "silent":
        sys.exit(0)
    if rank == 0:
        said = {"trial": trial.key, "step": 1, "loss": 0.5, "accuracy": None}
        print("some library says something")
        print("STEP " + json.dumps(said))
        point = Point(trial.steps, 1.0, 10, 0.5, 0.75)
        record = Record(trial, (point,), 0.75, 0.1, 640.0, 1.0, 4.0, {}, 0.0, (), True)
        print("RECORD " + record.to_json())
"""
TALK = (sys.executable, "-c", TALKER)


@pytest.fixture
def store(tmp_path):
    with Store(tmp_path / "store.sqlite") as opened:
        yield opened


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    """Records of real ranks, by codec."""
    data.fetch("digits")
    trials = [replace(TRIAL, codec=codec) for codec in ("plain", "fp32", "int8", "onebit", "auto")]
    said = []
    with Store(tmp_path_factory.mktemp("study") / "store.sqlite") as opened:
        records = run(trials, opened, said.append)
    return {record.trial.codec: record for record in records}, said


def test_records_are_complete(trained):
    records, _ = trained
    for codec, record in records.items():
        assert record.trial == replace(TRIAL, codec=codec)
        assert record == Record.from_json(record.to_json())
        assert [point.step for point in record.points] == list(range(1, TRIAL.steps + 1))
        assert all(point.loss > 0 for point in record.points)
        seconds = [point.seconds for point in record.points]
        assert seconds == sorted(seconds)
        assert seconds[0] > 0
        assert [point.step for point in record.points if point.accuracy is not None] == [3, 6, 9, 12]
        assert record.accuracy == record.points[-1].accuracy
        assert 0 < record.accuracy <= 1
        assert record.samples_per_s == pytest.approx(2 * TRIAL.batch / record.step_s)
        assert record.replicas_equal
        assert record.environment["machine"]["processor"]
        assert record.environment["commit"]
        assert record.seconds["compute"] > 0
        assert record.seconds["wait"] >= 0
        assert 0 <= record.overlap <= 1
        assert record.fp32_nbytes_per_step == pytest.approx(4 * 50_826, rel=1e-3)
        assert record.points[-1].sent_nbytes == pytest.approx(TRIAL.steps * record.sent_nbytes_per_step)


def test_what_codecs_do_is_recorded(trained):
    records, _ = trained
    assert records["plain"].layers == ()
    assert records["plain"].sent_nbytes_per_step == records["fp32"].sent_nbytes_per_step
    layers = {layer.name: layer for layer in records["onebit"].layers}
    assert layers["1.weight"].codec == "onebit/512+ef"
    assert layers["1.weight"].error > 0.1
    assert layers["1.weight"].residual_norm > 0
    assert layers["1.bias"].codec == "fp32"
    assert records["int8"].sent_nbytes_per_step < records["fp32"].sent_nbytes_per_step / 3
    assert {"encode", "wire", "decode"} <= records["int8"].seconds.keys()


def test_what_auto_chose_is_recorded(store):
    """It looks at float32 for 29 steps at most, as long as these still get faster, and then chooses."""
    data.fetch("digits")
    (record,) = run([replace(TRIAL, codec="auto", steps=MOST + 3)], store)
    assert record.choice["chosen"]
    assert {each["codec"] for each in record.choice["candidates"]} >= {"fp32", "int8"}


def test_codecs_are_paired(trained):
    """The first batch is seen before anything is sent: its loss is the same whatever the codec."""
    records, _ = trained
    assert len({record.points[0].loss for record in records.values()}) == 1
    curves = {name: [point.loss for point in record.points] for name, record in records.items()}
    assert curves["plain"] == curves["fp32"]
    assert curves["plain"] != curves["onebit"]


def test_progress_is_told_in_order(trained):
    records, said = trained
    assert all(isinstance(each, Progress) for each in said)
    assert [each.trial.codec for each in said if each.record is not None] == list(records)
    of_one = [each.step for each in said if each.trial.codec == "int8" and each.record is None]
    assert of_one == list(range(1, TRIAL.steps + 1))


def test_an_error_of_a_rank_is_passed_on_in_its_words(store):
    data.fetch("digits")
    with pytest.raises(LabError, match=r"rank \d failed: int8, seed 0: InputError: digits has .* smaller"):
        run([replace(TRIAL, batch=2000)], store)


@pytest.mark.skipif(not data.present("sotu"), reason="the text is not here: thinwire data fetch sotu")
def test_texts_are_trained_on_too(store):
    trial = replace(TRIAL, data="sotu", network="gpt-small", steps=8, batch=16, lr=0.003)
    (record,) = run([trial], store)
    assert record.replicas_equal
    assert record.points[-1].loss < record.points[0].loss
    assert 0.05 < record.accuracy < 0.5  # of the next byte; a blank alone is a sixth of the text


# Without training


def test_a_device_has_keys_and_labs_of_its_own(store, monkeypatch):
    """Trials on a CPU keep the keys they had before there were devices."""
    assert TRIAL.key == "eb6ef70b3886c603"
    there = replace(TRIAL, device="cuda")
    assert there.key != TRIAL.key
    assert command(there) == f"{command(TRIAL)} --device cuda"
    opened = []
    made = run.__globals__["Lab"]

    def lab(device, **options):
        opened.append(device)
        return made(device="cpu", **options)

    monkeypatch.setitem(run.__globals__, "Lab", lab)
    records = run([TRIAL, there], store, worker=TALK)
    assert [record.trial for record in records] == [TRIAL, there]
    assert opened == ["cpu", "cuda"]


def test_links_have_labs_of_their_own(store, monkeypatch):
    opened = []
    made = run.__globals__["Lab"]

    def lab(link, **options):
        opened.append(link)
        return made(link="loopback", **options)

    monkeypatch.setitem(run.__globals__, "Lab", lab)
    said, trials = [], [replace(TRIAL, link=link) for link in ("1gbit", "100mbit")]
    records = run(trials, store, lambda each: said.append((opened[-1], each.trial.link)), worker=TALK)
    assert [record.trial for record in records] == trials
    assert set(said) == {("1gbit", "1gbit"), ("100mbit", "100mbit")}


def test_networks_say_what_they_are_for():
    text, picture = (64,), (1, 8, 8)
    for name in small.NETWORKS:
        with pytest.raises(InputError, match=r"is for (texts|images); this data takes one of"):
            small.get(name, picture if name in small.TEXTS else text, 10)
    count = sum(each.numel() for each in small.get("gpt", text, 256).parameters())
    assert 29e6 < count < 31e6


def test_convolutions_before_a_norm_have_no_bias():
    for name in ("resnet8", "resnet18"):
        modules = small.get(name, (3, 32, 32), 10).modules()
        convolutions = [each for each in modules if isinstance(each, nn.Conv2d)]
        assert len(convolutions) > 8
        assert all(each.bias is None for each in convolutions)


def test_a_network_for_texts_does_not_look_ahead():
    torch.manual_seed(0)
    net = small.get("gpt-small", (64,), 256)
    x = torch.randint(256, (2, 64))
    later = x.clone()
    later[:, 40:] = 0
    now, then = net(x), net(later)
    assert torch.equal(now[:, :40], then[:, :40])
    assert not torch.equal(now[:, 40:], then[:, 40:])


def test_the_demo_on_a_gpu_is_planned(monkeypatch):
    with pytest.raises(InputError, match="use cpu or cuda"):
        demo.plan(device="tpu")
    if not torch.cuda.is_available():
        with pytest.raises(InputError, match="no CUDA device here"):
            demo.plan(device="cuda")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(data, "best", lambda *names, **_: data.Choice(names[0], ()))
    monkeypatch.setattr(data, "fetch", lambda _: None)
    monkeypatch.setattr(demo, "find_place", lambda _, link: (link, ()))
    plan = demo.plan(device="cuda")
    assert [trial.codec for trial in plan.trials[:7]] == list(demo.CUDA_CODECS)
    first = plan.trials[0]
    assert (first.data, first.network, first.link, first.device) == ("sotu", "gpt", "10gbit", "cuda")
    assert len(plan.trials) == 21
    assert len(demo.plan(device="cuda", quick=True).trials) == 7
    assert {trial.device for trial in demo.plan().trials} == {"cpu"}
    assert demo.plan().trials[0].link == "100mbit"


def test_what_is_stored_is_not_run_again(store):
    trials = [replace(TRIAL, seed=seed) for seed in range(3)]
    run(trials[:2], store, worker=TALK)
    said = []
    records = run(trials, store, said.append, worker=TALK)
    assert [record.trial for record in records] == trials
    assert {each.trial.seed for each in said} == {2}
    assert run(trials, store, worker=("no-such-program",)) == records
    store.forget(trials[1:])
    assert [store.get(trial) is not None for trial in trials] == [True, False, False]


def test_places_have_labs_of_their_own(store):
    trials = [replace(TRIAL, hosts=hosts, seed=seed) for seed in range(2) for hosts in (1, 3)]
    assert [record.trial for record in run(trials, store, worker=TALK)] == trials


@pytest.mark.parametrize(
    ("codec", "message"),
    [
        ("bad", "2 hosts on loopback: rank 1 failed: bad, seed 0: ValueError: two lines"),
        ("killed", "rank 1 failed: signal 9 ended it"),
        ("lonely", "rank 1 failed: ValueError: only here"),
        ("silent", "gave no record of 1 trials"),
    ],
)
def test_failures_name_the_rank_and_keep_what_is_done(store, codec, message):
    trials = [TRIAL, replace(TRIAL, codec=codec)]
    with pytest.raises(LabError) as caught:
        run(trials, store, worker=TALK)
    assert message in str(caught.value)
    assert store.get(TRIAL) is not None


@pytest.mark.parametrize(
    ("codes", "outputs", "blamed"),
    [
        ((1, -signal.SIGTERM), ("FAILED x: CommError: rank 1 is gone", "FAILED x: ValueError: mine"), 1),
        ((1, -signal.SIGTERM), ("FAILED x: CommError: rank 1 is gone", "STEP {}"), 0),
        ((-signal.SIGTERM, -signal.SIGKILL), ("STEP {}", ""), 1),
        ((1, 1), ("FAILED x: Connection reset", "FAILED x: ValueError: mine"), 1),
    ],
)
def test_the_rank_with_an_error_of_its_own_is_blamed(codes, outputs, blamed):
    done = Run(Topology(2, 1, parse_link("1gbit"), loopback=True), codes, outputs, 1.0, False, None, None)
    assert failure(done).startswith(f"rank {blamed} failed: ")


def test_an_interrupted_study_keeps_what_is_done(store):
    def interrupt(progress):
        if progress.record is not None:
            raise KeyboardInterrupt

    trials = [replace(TRIAL, seed=seed) for seed in range(3)]
    with pytest.raises(KeyboardInterrupt):
        run(trials, store, interrupt, worker=TALK)
    assert [store.get(trial) is not None for trial in trials] == [True, False, False]
    assert len(run(trials, store, worker=TALK)) == 3


def test_time_left_is_judged_by_what_was_seen():
    trials = [replace(TRIAL, codec=codec) for codec in ("fp32", "int8")]
    assert seconds_left(trials, {}, {}) is None
    assert seconds_left(trials, {"fp32": [9.0, 11.0]}, {"int8": 0.25}) == pytest.approx(12.5)
    assert seconds_left(trials, {"fp32": [10.0], "int8": [4.0]}, {}) == pytest.approx(14.0)


def test_settings_that_do_not_exist_are_refused():
    with pytest.raises(InputError, match="fashion-mnist"):
        convergence.trials("imagenet")
    with pytest.raises(InputError, match="spread"):
        convergence.trials("digits", 1)


def test_without_a_lab_the_demo_runs_on_loopback_and_says_so(monkeypatch):
    def refuse():
        raise LabError("this needs root")

    monkeypatch.setattr(namespaces, "require", refuse)
    assert demo.find_place(2, "100mbit") == ("loopback", ("not throttled, on loopback: this needs root",))
    with pytest.raises(LabError, match="fast"):
        demo.find_place(2, "fast")


# The command line


def test_the_demo_makes_a_page_and_resumes(tmp_path, monkeypatch):
    monkeypatch.setattr(demo, "SETS", ("digits",))
    monkeypatch.setattr(demo, "CODECS", ("fp32", "int8"))
    monkeypatch.setattr(demo, "QUICK_STEPS", 6)
    arguments = ["demo", "--quick", "--link", "loopback", "--store", str(tmp_path / "store.sqlite")]
    arguments += ["--out", str(tmp_path / "demo.html")]
    first = CliRunner().invoke(cli.app, arguments)
    assert first.exit_code == 0, first.output
    assert "loopback" in first.output
    assert "fp32" in first.stdout
    assert "int8" in first.stdout
    assert "2 of 2: int8" in first.output
    (tmp_path / "demo.html").unlink()
    began = time.monotonic()
    again = CliRunner().invoke(cli.app, [*arguments, "--json"])
    assert again.exit_code == 0, again.output
    assert time.monotonic() - began < 10
    assert "2 of 2 runs are kept" in again.output
    assert (tmp_path / "demo.html").stat().st_size > 10_000
    assert json.loads(again.stdout)["settings"][0]["link"] == "loopback"
    anew = CliRunner().invoke(cli.app, [*arguments, "--fresh"])
    assert anew.exit_code == 0, anew.output
    assert "2 of 2: int8" in anew.output


@pytest.mark.rest
def test_a_killed_study_goes_on(tmp_path):
    """SIGKILL: what was done is kept, ranks do not stay behind, and the same command does the rest."""
    data.fetch("digits")
    path = tmp_path / "store.sqlite"
    asked = ["study", "convergence", "--data", "digits", "--seeds", "2", "--codec", "int8", "--store", path]
    words = [sys.executable, "-m", "thinwire", *map(str, asked)]
    started = subprocess.Popen(words, stderr=subprocess.PIPE, stdout=subprocess.DEVNULL, text=True)
    first = started.stderr.readline()
    ranks = Path(f"/proc/{started.pid}/task/{started.pid}/children").read_text().split()
    started.send_signal(signal.SIGKILL)
    started.wait(WALL_S)
    started.stderr.close()
    assert "1 of 4: fp32" in first
    assert len(ranks) == 2
    end = time.monotonic() + WALL_S
    while any(map(_alive, ranks)) and time.monotonic() < end:
        time.sleep(0.1)
    assert not any(map(_alive, ranks))
    again = subprocess.run([*words, "--save", tmp_path], capture_output=True, text=True, timeout=WALL_S)
    assert again.returncode == 0, again.stderr
    assert "of 4 runs are kept from before" in again.stderr
    assert "int8" in again.stdout
    saved = json.loads((tmp_path / "convergence-cpu.json").read_text())
    assert saved["commit"]
    assert saved["seeds"] == [0, 1]
    assert [row["codec"] for row in saved["rows"]] == ["fp32", "int8"]
    assert saved["rows"][1]["link"] == "loopback"


def _alive(pid):
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


def test_a_record_says_how_to_repeat_it(trained):
    """The command is one that the command line takes, with every part of the trial."""
    from typer.main import get_command

    records, _ = trained
    words = records["int8"].command.split()
    assert words[:3] == ["thinwire", "study", "run"]
    parsed = get_command(cli.app).commands["study"].commands["run"].make_context("run", words[3:]).params
    assert (
        Trial(
            "test",
            **{name: parsed[name] for name in Trial.__dataclass_fields__ if name not in ("study", "variant")},
        )
        == TRIAL
    )
    assert command(TRIAL) == records["int8"].command
