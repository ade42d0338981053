"""Scripts for one device run by a job plan, on several processes: the numbers of one device, and errors."""

import json
import re
from pathlib import Path

import pytest
import torch
from typer.testing import CliRunner

from thinwire import cli
from thinwire.errors import InputError, LabError
from thinwire.hybrids import JobPlan
from thinwire.integrations import job_status
from thinwire.lab import Lab

FOLDER = Path(__file__).parent
EXAMPLES = FOLDER.parents[1] / "examples"
SCRIPT = EXAMPLES / "scripts" / "one_device_gpt.py"
WALL_S = 280
BOUND = 3e-4  #: of weights of about 0.1 after 20 steps of AdamW; float32 sums in another order gave 4e-5
pytestmark = pytest.mark.timeout(WALL_S + 40)


@pytest.fixture(scope="module")
def alone(tmp_path_factory):
    """What one device gets: its checkpoints and losses after two epochs, and after two more."""
    import subprocess
    import sys

    folder, losses = tmp_path_factory.mktemp("alone"), []
    for words in (["--save", "two.pt"], ["--resume", "two.pt", "--save", "four.pt"]):
        done = subprocess.run(
            [sys.executable, SCRIPT, *words], cwd=folder, capture_output=True, text=True, timeout=WALL_S
        )
        assert done.returncode == 0, done.stderr
        losses.append(done.stdout)
    return folder, losses


def exact(name, folder):
    """An example's plan without codecs, written to a folder."""
    text = (EXAMPLES / "plans" / f"{name}.toml").read_text().replace('"int8"', '"fp32"')
    path = folder / f"{name}.toml"
    JobPlan.from_toml(text).write(path)
    return path


def printed(text):
    """The losses of epochs, however lines of ranks mix."""
    return sorted(re.findall(r"epoch \d loss \d\.\d{4}", text))


def check_equal(path, wanted):
    state, exact_state = torch.load(path), torch.load(wanted)
    assert state["model"].keys() == exact_state["model"].keys()
    for name, each in exact_state["model"].items():
        assert (state["model"][name] - each).abs().max() < BOUND, name
    for number, each in exact_state["optimizer"]["state"].items():
        for name, x in each.items():
            other = state["optimizer"]["state"][number][name]
            assert other.shape == x.shape
            assert (other - x).abs().max() < BOUND, (number, name)
    assert state["scheduler"]["last_epoch"] == exact_state["scheduler"]["last_epoch"]


def run(launch, plan, *words, ranks=4, cwd=None):
    ended = launch("--plan", plan, "--nproc-per-node", ranks, SCRIPT, *words, cwd=cwd)
    assert ended.code == 0, ended.err[-3000:]
    return ended


def test_an_unmodified_script_gets_the_numbers_of_one_device(launch, alone, tmp_path, runtime):
    """Two replicas, each split in two: saved, and continued from the checkpoint of one device."""
    folder, losses = alone
    plan = exact("data_and_tensor", tmp_path)
    ended = run(launch, plan, "--save", tmp_path / "two.pt")
    check_equal(tmp_path / "two.pt", folder / "two.pt")
    assert printed(ended.out) == sorted(4 * printed(losses[0])), "every rank prints what one device prints"
    assert "two replicas of a GPT, each split over two ranks: GPT on replicate 2 x tensor 2" in ended.err
    assert ended.err.count("thinwire: tensor: 12 modules are split") == 1
    assert re.search(r"thinwire: replicate: fp32: 10 steps, 8\.2 MB sent", ended.err), ended.err
    (path,) = runtime.iterdir()
    status = job_status.read(path)
    assert (status["state"], status["codec"], status["world"]) == ("finished", "data_and_tensor.toml", 4)
    assert status["models"][0]["steps"] == 10


@pytest.mark.rest
@pytest.mark.parametrize("name", ["data_and_tensor", "sharded"])
def test_a_checkpoint_goes_from_one_device_to_many_and_back(name, launch, alone, tmp_path):
    folder, _ = alone
    run(launch, exact(name, tmp_path), "--resume", folder / "two.pt", "--save", tmp_path / "four.pt")
    check_equal(tmp_path / "four.pt", folder / "four.pt")


@pytest.mark.rest
def test_stages(launch, alone, tmp_path):
    """Whole weights are saved by all ranks; the optimizer's state is refused, and so nothing is saved."""
    ended = launch("--plan", exact("placed", tmp_path), "--nproc-per-node", 4, SCRIPT)
    assert ended.code == 0, ended.err[-3000:]
    assert printed(ended.out) == sorted(4 * printed(alone[1][0]))
    ended = launch(
        "--plan",
        tmp_path / "placed.toml",
        "--nproc-per-node",
        4,
        SCRIPT,
        "--epochs",
        1,
        "--save",
        tmp_path / "no.pt",
    )
    assert ended.code != 0
    assert "every rank has the optimizer's state of its own modules only" in ended.err
    assert not (tmp_path / "no.pt").exists()


@pytest.mark.rest
@pytest.mark.parametrize("name", ["data_and_tensor", "sharded", "placed"])
def test_the_examples_learn_with_their_codecs(name, launch):
    ended = run(launch, EXAMPLES / "plans" / f"{name}.toml", "--epochs", "4")
    losses = [float(each) for each in re.findall(r"loss ([0-9.]+)", ended.out)]
    assert len(losses) == 16
    assert min(losses) < 0.8 * max(losses)


@pytest.mark.rest
def test_what_a_script_does_wrong_is_told_on_every_rank(launch, tmp_path):
    plan = tmp_path / "plan.toml"
    plan.write_text('version = 1\n[mesh]\nreplicate = 2\n[replicate]\ncodec = "fp32"\n')
    ended = launch("--plan", plan, "--nproc-per-node", 2, FOLDER / "scripts" / "plan_misuse.py")
    assert ended.code == 0, ended.err[-3000:]
    reports = {each["rank"]: each for each in map(json.loads, ended.out.splitlines())}
    assert reports.keys() == {"0", "1"}
    assert reports["0"]["weights"] == reports["1"]["weights"]
    for report in reports.values():
        told = report["told"]
        assert "belong to no single module" in told.pop("apart")
        assert "the script has not called its Sequential" in told.pop("inside")
        assert "no DataLoader gave a batch" in told.pop("no loader")
        assert "a batch has 3 samples, which 2 parts (replicate 2) cannot share equally" in told.pop(
            "odd batch"
        )
        assert "a batch of 4 samples has 6 rows" in told.pop("turned")
        assert "Disagreement: ranks got different samples" in told.pop("other samples")
        assert "a plan is for one model" in told.pop("two models")
        assert "after it made the optimizer" in told.pop("changed")
        assert set(told.values()) == {""}, told
        assert report["sizes"] == [2, 3, 4, 3], (
            "a last batch that cannot be shared is whole, and so is evaluation"
        )


@pytest.mark.rest
def test_nothing_to_apply_a_plan_to_is_an_error(launch, tmp_path):
    plan = tmp_path / "plan.toml"
    plan.write_text('version = 1\n[mesh]\nreplicate = 1\n[replicate]\ncodec = "fp32"\n')
    script = tmp_path / "train.py"
    script.write_text("print('done')")
    ended = launch("--plan", plan, script)
    assert ended.code == 1
    assert "the plan was not applied: the script made no optimizer" in ended.err


def test_errors_come_before_a_process_starts(tmp_path):
    plan, script = tmp_path / "plan.toml", tmp_path / "train.py"
    script.write_text("raise SystemExit(9)")
    plan.write_text('version = 1\n[mesh]\nreplicate = 2\n[replicate]\ncodec = "itn8"\n')

    def refused(*words):
        caught = CliRunner().invoke(cli.app, ["launch", "--plan", str(plan), *words, str(script)]).exception
        assert isinstance(caught, InputError)
        return str(caught)

    assert f"{plan}, [replicate]: codec = 'itn8'" in refused("--nproc-per-node", "2")
    plan.write_text(plan.read_text().replace("itn8", "int8"))
    for words in (("--nproc-per-node", "3"), ("--hosts", "3")):
        assert "has 2 ranks, and this job has 3: start 2" in refused(*words)


@pytest.mark.rest
def test_in_the_lab(launch, tmp_path):
    where = ("--link", "1gbit")
    try:
        with Lab(hosts=1):
            pass
    except LabError:
        where = ("--loopback",)
    ended = launch(
        "--hosts", 4, *where, "--plan", exact("data_and_tensor", tmp_path), SCRIPT, "--epochs", "1"
    )
    assert ended.code == 0, ended.err[-3000:]
    assert ended.out.count("epoch 0 loss") == 4
    assert "4 ranks, loopback" in ended.err or "4 hosts, 1gbit links" in ended.err
