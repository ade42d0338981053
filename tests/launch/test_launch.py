"""Scripts that know nothing of thinwire run with it; restarts, errors and exit codes are as with torchrun."""

import atexit
import gc
import json
import multiprocessing
import os
import re
import signal
import sys
import time
import weakref
from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist
from torch.distributed.fsdp import FullyShardedDataParallel, fully_shard
from torch.distributed.fsdp._fully_shard._fsdp_state import FSDPState
from torch.nn.parallel import DistributedDataParallel
from typer.testing import CliRunner

import thinwire
from thinwire import cli
from thinwire.errors import InputError, LabError, LaunchError, PolicyError
from thinwire.integrations import job_status, launch_worker
from thinwire.integrations import launcher as library
from thinwire.lab import Lab

FOLDER = Path(__file__).parent
SCRIPTS = FOLDER.parents[1] / "examples" / "scripts"
OWN = FOLDER / "scripts"
TWO = ("--nproc-per-node", "2")
WEIGHTS = re.compile(r"rank (\d) weights ([0-9a-f]{16})")
pytestmark = pytest.mark.timeout(200)


def losses(text):
    return [float(each) for each in re.findall(r"loss ([0-9.]+)", text)]


def check_training(ended, policy="int8"):
    """It went well, the loss fell, bytes were saved, and both ranks hold the same bits."""
    assert ended.code == 0, ended.err[-3000:]
    weights = dict(WEIGHTS.findall(ended.out))
    assert weights.keys() == {"0", "1"}, ended.out
    assert weights["0"] == weights["1"]
    assert losses(ended.out)[-1] < 0.75 * losses(ended.out)[0], ended.out
    said = re.search(rf"thinwire: {policy}: (\d+) steps, .* \((.*)x fewer\)", ended.out + ended.err)
    assert said, ended.err
    assert int(said[1]) > 20
    assert float(said[2]) > 2


@pytest.mark.rest
def test_a_trainer_with_snapshots(launch, tmp_path):
    words = ("--codec", "int8", *TWO, SCRIPTS / "multigpu_torchrun.py", "3", "1", "--snapshot_path")
    check_training(launch(*words, tmp_path / "snapshot.pt"))
    assert torch.load(tmp_path / "snapshot.pt", weights_only=True)["EPOCHS_RUN"] == 3


@pytest.mark.rest
def test_a_main_with_train_and_validate(launch, runtime):
    ended = launch(*TWO, "--codec=int8", "--standalone", SCRIPTS / "digits_main.py", "--epochs", "1", "-p5")
    check_training(ended)
    assert "Acc@1" in ended.out
    (path,) = runtime.iterdir()
    assert path.name.startswith("digits_main-")
    assert job_status.read(path)["state"] == "finished"


def test_gradient_accumulation_while_somebody_watches(begin, finish, tmp_path):
    path = tmp_path / "job_status.json"
    started = begin("-m", "thinwire", "launch", *TWO, "--status", path, SCRIPTS / "gpt_train.py")
    end, status = time.monotonic() + 60, {}
    while time.monotonic() < end and started.poll() is None and not (status and status["models"]):
        status = job_status.read(path)
        time.sleep(0.05)
    watched = json.loads(CliRunner().invoke(cli.app, ["watch", str(path), "--once", "--json"]).stdout)
    assert (watched["state"], watched["world"], watched["codec"]) == ("running", 2, "int8")
    check_training(finish(started))
    (model,) = job_status.read(path)["models"]
    assert model["steps"] == 30
    assert model["ratio"] > 2
    shown = CliRunner().invoke(cli.app, ["watch", str(path), "--once"]).stdout
    for text in ("finished", "2 ranks", "step time", "encode", "overlap", "times that"):
        assert text in shown


def test_in_the_lab(launch):
    """Throttled where a lab can be made, else on loopback."""
    where = ("--link", "1gbit")
    try:
        with Lab(hosts=1):
            pass
    except LabError:
        where = ("--loopback",)
    ended = launch("--hosts", "2", *where, "--codec", "int8", SCRIPTS / "ddp_tutorial.py")
    check_training(ended)
    assert "2 ranks, loopback" in ended.err or "2 hosts, 1gbit links" in ended.err


@pytest.mark.rest
def test_a_killed_worker_resumes_with_its_residuals(launch, tmp_path):
    """Loss, parameters and residuals are those of a run without a break, bit for bit."""
    ended = launch(*TWO, "--max-restarts", "2", OWN / "resume.py", tmp_path, "8")
    assert ended.code == 0, ended.err[-3000:]
    assert ended.out.count("begins at 6") == 2
    reports = [json.loads(each) for each in re.findall(r"{.*?}", ended.out)]
    assert {each["rank"] for each in reports} == {0, 1}
    for each in reports:
        assert each["resumed"] == each["whole"]
    assert "the script calls thinwire.attach itself" in ended.err


@pytest.mark.rest
def test_modules_run_the_scripts_own_hook_wins_and_exit_codes_pass_through(launch, runtime):
    ended = launch(*TWO, "--codec", "int4", "-m", "own_hooks", "--flag", "-m", "x y", cwd=OWN)
    assert ended.out.count("done") == 2, ended.err[-3000:]
    assert ended.out.count("register_comm_hook or register_builtin_comm_hook can only be") == 2
    assert ended.err.count("thinwire: the script registers noted itself") == 1
    assert "thinwire: int4: 2 steps" in ended.err
    assert ended.code == 7
    assert re.search(r"thinwire: rank \d failed first, with exit code 7", ended.err)
    (path,) = runtime.iterdir()
    status = job_status.read(path)
    assert (status["state"], status["exit_code"], len(status["models"])) == ("failed", 7, 2)


def test_a_worker_runs_the_script_as_python_does(begin, finish, monkeypatch):
    script = str(Path("scripts") / "no_ddp.py")
    monkeypatch.chdir(FOLDER)
    job = library.Job(script, ("--codec", "x"))
    ended = finish(begin("-m", library.WORKER, *job.words()))
    facts = json.loads(ended.out)
    assert facts["argv"][1:] == ["--codec", "x"]
    assert facts["name"] == "no_ddp.py"
    assert (facts["file"], facts["path"]) == (str(OWN / "no_ddp.py"), str(OWN))
    assert ended.code == 1
    assert "attached" not in ended.err, "that would read as the cause"
    trace = ended.err[ended.err.index("Traceback") :]
    assert trace.splitlines()[1] == f'  File "{OWN / "no_ddp.py"}", line 18, in <module>'
    assert trace.endswith('KeyError: "this is the script\'s own error"\n')


#: A script that knows nothing of thinwire.
SHARDED = """
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

dist.init_process_group("gloo")
net = torch.nn.Sequential(torch.nn.Linear(100, 200), torch.nn.ReLU(), torch.nn.Linear(200, 100))
mesh = init_device_mesh("cpu", (dist.get_world_size(),))
fully_shard(net[0], mesh=mesh)
fully_shard(net, mesh=mesh)
optimizer = torch.optim.SGD(net.parameters(), 0.01)
for _ in range(3):
    optimizer.zero_grad()
    net(torch.randn(4, 100)).square().mean().backward()
    optimizer.step()
print("trained")
dist.destroy_process_group()
"""


@pytest.fixture
def worker(monkeypatch):
    """A function that makes the models of a worker in this process, and what rank 0 said."""
    monkeypatch.setattr(DistributedDataParallel, "__init__", DistributedDataParallel.__init__)
    monkeypatch.setattr(
        DistributedDataParallel, "register_comm_hook", DistributedDataParallel.register_comm_hook
    )
    monkeypatch.setattr(FullyShardedDataParallel, "__init__", FullyShardedDataParallel.__init__)
    monkeypatch.setattr(FSDPState, "_lazy_init", FSDPState._lazy_init)
    started = []
    for module in (torch.multiprocessing, sys.modules["torch.multiprocessing.spawn"]):
        monkeypatch.setattr(module, "start_processes", lambda *words, **_: started.append(words))
    said = []
    models = launch_worker.Models(library.Job(__file__), said.append)
    models.install()
    return models, said, started


def test_processes_that_a_script_starts_are_out_of_reach(worker, monkeypatch):
    """And do not wait for a store that torchrun does not have for them."""
    models, said, started = worker
    monkeypatch.setenv(launch_worker.AGENT_STORE, "True")
    torch.multiprocessing.spawn(print, args=(5,), nprocs=2)
    assert started[0][:3] == (print, (5,), 2)
    assert "thinwire launch --nproc-per-node 2" in said[0]
    assert "thinwire.attach(model, 'int8')" in said[0]
    assert launch_worker.AGENT_STORE not in os.environ
    torch.multiprocessing.start_processes(print, nprocs=3, start_method="fork")
    assert "thinwire launch --nproc-per-node 3" in said[1]
    assert models.summary() == f"thinwire: nothing was attached: {launch_worker.SPAWNED}"


def test_processes_of_multiprocessing_do_not_see_the_launchers_store(monkeypatch):
    """They would wait for it for ever; the script's own process keeps it."""
    seen = []
    monkeypatch.setattr(
        launch_worker.BaseProcess, "start", lambda _: seen.append(launch_worker.AGENT_STORE in os.environ)
    )
    monkeypatch.setenv(launch_worker.AGENT_STORE, "True")
    launch_worker._hide_store_from_children()
    multiprocessing.Process(target=print).start()
    assert seen == [False]
    assert os.environ[launch_worker.AGENT_STORE] == "True"


def test_models_of_one_script_round_with_random_numbers_of_their_own(worker, monkeypatch):
    models, seeds = worker[0], []

    class Net:
        process_group, _comm_hooks = None, ()

    def attach(model, codec, *, seed, shadow):
        del codec, shadow
        models._by_model[model] = launch_worker.Hook(None, print)
        models.hooks.append(models._by_model[model])
        seeds.append(seed)

    monkeypatch.setattr(launch_worker, "attach", attach)
    monkeypatch.setattr(dist, "get_world_size", lambda _group: 2)
    for net in (nets := [Net() for _ in range(3)]):
        models.take(net)
    assert len(set(seeds)) == len(nets)


@pytest.mark.filterwarnings("ignore:FSDP is switching to use")
def test_fsdp1_is_not_compressed_and_said_at_once(worker):
    models, said, _ = worker
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        net = FullyShardedDataParallel(torch.nn.Linear(4, 4), device_id=torch.device("cpu"))
        assert said == [f"thinwire: {launch_worker.FSDP1}: what it sends is not compressed"]
        with pytest.raises(InputError, match="is not supported: use fully_shard"):
            thinwire.attach(net, "int8")
    finally:
        dist.destroy_process_group()
    assert models.summary() == f"thinwire: nothing was attached: {launch_worker.FSDP1}"


@pytest.mark.parametrize("own", [False, True])
def test_a_sharded_model_is_taken_at_its_first_pass(worker, own):
    models, said, _ = worker
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        mesh = dist.init_device_mesh("cpu", (1,))
        net = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.Linear(4, 4))
        for each in (*net, net):
            fully_shard(each, mesh=mesh)
        handle = thinwire.attach(net, "int4") if own else None
        assert not models.hooks
        net(torch.ones(2, 4)).sum().backward()
        assert len(models.hooks) == 1, "the outermost module, once"
        assert (models.hooks[0].handle() is handle) == own
        assert models.hooks[0].handle().policy.name == ("int4" if own else "int8")
        assert any("calls thinwire.attach itself" in line for line in said) == own
        net(torch.ones(2, 4)).sum().backward()
        assert len(models.hooks) == 1
        assert models.summary().startswith(f"thinwire: {'int4' if own else 'int8'}: ")
    finally:
        dist.destroy_process_group()


def test_a_sharded_model_is_not_kept_alive_but_its_counts_are(worker):
    models, _, _ = worker
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        net = fully_shard(torch.nn.Linear(4, 4), mesh=dist.init_device_mesh("cpu", (1,)))
        net(torch.ones(2, 4)).sum().backward()
        alive = weakref.ref(net)
        del net
        gc.collect()
        assert alive() is None
        assert models.hooks[0].handle() is None
        assert [each["policy"] for each in models.stats()] == ["int8"]
    finally:
        dist.destroy_process_group()


def test_a_sharded_model_that_cannot_be_compressed_trains_without(worker):
    models, said, _ = worker
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        net = fully_shard(torch.nn.Linear(4, 4), mesh=dist.init_device_mesh("cpu", (1,)))
        net.set_custom_reduce_scatter(type("Own", (), {})())
        net(torch.ones(2, 4)).sum()
        assert not models.hooks
        assert ["a communication of its own" in line for line in said] == [True]
    finally:
        dist.destroy_process_group()
    assert "a communication of its own" in models.summary()


@pytest.mark.rest
def test_an_unmodified_fsdp_script_is_compressed(begin, finish, tmp_path):
    script = tmp_path / "sharded.py"
    script.write_text(SHARDED)
    words = ("--nproc-per-node", "2", "--codec", "int4", "--weights", "int8", script)
    ended = finish(begin("-m", "thinwire", "launch", *words))
    assert ended.code == 0, ended.err
    assert "thinwire: gradients: int4 on 2 of 4 tensors" in ended.err
    assert "thinwire: weights: int8 on 2 of 4 tensors" in ended.err
    assert "thinwire: int4: 3 steps, " in ended.err
    assert ended.out.count("trained") == 2


@pytest.mark.parametrize(
    ("error", "at_once"), [(None, True), (SystemExit(0), True), (SystemExit(7), False), (KeyError(), False)]
)
def test_what_was_sent_is_said_after_the_traceback(error, at_once, monkeypatch, capsys):
    """Python prints the traceback when the worker has ended, and then runs what is registered."""

    def run(_job):
        if error is not None:
            raise error

    monkeypatch.setattr(launch_worker.Models, "install", lambda _: None)
    monkeypatch.setattr(launch_worker.Models, "stats", lambda _: [{}])
    monkeypatch.setattr(launch_worker.Models, "summary", lambda _: "what was sent")
    monkeypatch.setattr(launch_worker, "run", run)
    monkeypatch.setattr(sys, "excepthook", sys.excepthook)
    monkeypatch.setenv("RANK", "0")
    later = []
    monkeypatch.setattr(atexit, "register", lambda *call: later.append(call))
    with pytest.raises(type(error)) if error else nullcontext():
        launch_worker.main(library.Job(__file__).words())
    assert (capsys.readouterr().err == "what was sent\n") is at_once
    for say, *words in later:
        say(*words)
    assert (capsys.readouterr().err == "what was sent\n") is not at_once


def test_the_last_line_says_what_auto_chose_and_what_is_sent_since(monkeypatch):
    """Beside the whole run, in which it measured in float32; bytes of several models are added."""
    whole = {"label": "auto -> int4", "steps": 100, "sent_nbytes": 4_000_000, "fp32_nbytes": 8_000_000}
    since = {"steps": 60, "sent_nbytes": 500_000, "fp32_nbytes": 4_000_000}
    entries = [{**whole, "since": since}]
    monkeypatch.setattr(launch_worker.Models, "stats", lambda _: entries)
    models = launch_worker.Models(library.Job(__file__), print)
    line = (
        "thinwire: auto -> int4: 100 steps, 4.0 MB sent instead of 8.0 MB (2.00x fewer; 8.00x since step 40)"
    )
    assert models.summary() == line
    entries += [{**whole, "label": "int8", "since": None}]
    assert models.summary().startswith(
        "thinwire: auto -> int4, int8: 100 steps, 8.0 MB sent instead of 16.0 MB"
    )


def test_a_signal_ends_the_job(begin, finish, runtime, tmp_path):
    script = tmp_path / "sleeps.py"
    script.write_text("import time; print('here', flush=True); time.sleep(60)")
    started = begin("-m", "thinwire", "launch", script)
    assert started.stdout.readline() == "here\n"
    started.send_signal(signal.SIGTERM)
    assert finish(started, 30).code == 128 + signal.SIGTERM
    (path,) = runtime.iterdir()
    assert job_status.read(path)["state"] == "failed"


@pytest.mark.parametrize(
    ("words", "kind", "said"),
    [
        (["--codek", "int8", __file__], LaunchError, "--codek is no option .* did you mean --codec?"),
        (["--nproc-per-nod=2", __file__], LaunchError, "did you mean --nproc-per-node?"),
        (["--wrong", __file__], LaunchError, "--wrong is no option of thinwire launch, nor of torchrun"),
        (["--codec", "intt8", __file__], PolicyError, "unknown recipe or codec 'intt8'; did you mean 'int8'"),
        (["--codec", "none.toml", __file__], PolicyError, "cannot read the policy none.toml"),
        (["--codec"], LaunchError, "--codec: expected one argument"),
        (["--seed", "x", __file__], LaunchError, "--seed: invalid int value: 'x'"),
        (["--shadow", "-1", __file__], LaunchError, "--shadow -1"),
        (["--codec", "int8"], LaunchError, "no script to run; as in: thinwire launch"),
        (["nowhere.py"], LaunchError, "there is no script 'nowhere.py'"),
        (["--no-python", __file__], LaunchError, "--no-python does not apply"),
        (["--link", "1gbit", __file__], LaunchError, "apply to the lab only: add --hosts"),
        (["--hosts", "2", *TWO, __file__], LaunchError, "--nproc-per-node is torchrun's and does not apply"),
        (["--hosts", "2", "--standalone", __file__], LaunchError, "--standalone is torchrun's"),
    ],
)
def test_what_is_wrong_is_said_before_anything_starts(words, kind, said):
    with pytest.raises(kind, match=said) as refused:
        library.parse(words)
    assert "\n" not in str(refused.value)


def test_words_find_their_owner():
    words = [
        "--max-restarts=2",
        "--codec",
        "auto",
        *TWO,
        "--seed",
        "5",
        "-m",
        "pkg.mod",
        "--codec",
        "x",
        "--",
        "y",
    ]
    plan = library.parse(words)
    assert (plan.job.codec, plan.job.seed, plan.job.module, plan.job.script) == ("auto", 5, True, "pkg.mod")
    assert plan.job.arguments == ("--codec", "x", "--", "y")
    assert (plan.torchrun.max_restarts, plan.torchrun.nproc_per_node) == (2, "2")
    assert library.Job.from_words(plan.job.words()) == plan.job
    assert library.parse(["--hosts", "2", "--link", "1gbit", __file__]).hosts == 2


@pytest.mark.parametrize(
    ("codes", "code"), [((0, 0), 0), ((0, 2), 2), ((-15, 3), 3), ((3, -15), 3), ((-9, 0), 137)]
)
def test_a_job_in_the_lab_ends_as_the_rank_that_failed_by_itself(codes, code, monkeypatch):
    """Not as one that was ended because of it."""
    lab = SimpleNamespace(run=lambda _: SimpleNamespace(returncodes=codes))
    monkeypatch.setattr(library, "Lab", lambda *_, **__: nullcontext(lab))
    plan = library.parse(["--hosts", "2", "--loopback", "-m", "train"])
    assert library._in_lab(plan.job, plan) == code


def test_help_is_about_our_options():
    for words in (["launch"], ["launch", "--help"]):
        shown = CliRunner().invoke(cli.app, words)
        assert shown.exit_code == 0
        assert "--codec CODEC" in shown.stdout
        assert "torchrun --help" in shown.stdout


def test_a_wrong_lab_leaves_no_job(runtime, capsys, monkeypatch):
    monkeypatch.setattr(sys, "argv", ["thinwire", "launch", "--hosts", "2", "--link", "fast", __file__])
    with pytest.raises(SystemExit) as ended:
        cli.main()
    assert ended.value.code == 2
    assert "'fast' is no rate" in capsys.readouterr().err
    assert list(runtime.iterdir()) == []
