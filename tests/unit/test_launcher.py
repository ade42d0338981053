"""How a launched job ends, and what torchrun gets to run; torchrun and the lab are made up here."""

import os
from argparse import Namespace
from contextlib import nullcontext
from types import SimpleNamespace

import pytest
from torch.distributed import run as torchrun
from torch.distributed.elastic.multiprocessing.api import SignalException
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError

from thinwire.errors import InputError, LaunchError, PolicyError
from thinwire.integrations import job_status, launcher


@pytest.fixture(autouse=True)
def place(tmp_path, monkeypatch):
    """A folder for status files."""
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path))
    monkeypatch.delenv(launcher.UNSHARED, raising=False)
    return tmp_path / "thinwire"


def plan(*words):
    return launcher.parse([*words, __file__, "--epochs", "3"])


@pytest.mark.parametrize(
    ("ends", "code", "state"),
    [(lambda: 0, 0, "finished"), (lambda: 3, 3, "failed"), (KeyboardInterrupt, 130, "failed")],
)
def test_a_job_ends_as_its_workers_did_and_its_file_says_so(ends, code, state, monkeypatch, place):
    seen = []

    def by_torchrun(job, options):
        status = job_status.read(launcher.Path(job.status))
        seen.append((status["state"], status["codec"], job.arguments, options.nproc_per_node))
        job_status.write(launcher.Path(job.status), {**status, "state": "running"})
        if isinstance(ends, type):
            raise ends
        return ends()

    monkeypatch.setattr(launcher, "_by_torchrun", by_torchrun)
    assert launcher.launch(plan("--codec", "int4", "--nproc-per-node", "2")) == code
    assert seen == [("starting", "int4", ("--epochs", "3"), "2")]
    (path,) = place.iterdir()
    assert path.name == f"test_launcher-{os.getpid()}.json"
    status = job_status.read(path)
    assert (status["state"], status["exit_code"], status["job"]) == (state, code, path.stem)
    assert status["ended"] >= status["started"]


def test_a_job_that_could_not_start_leaves_no_file(monkeypatch, place):
    def refuse(*_):
        raise LaunchError("torchrun: no")

    monkeypatch.setattr(launcher, "_by_torchrun", refuse)
    with pytest.raises(LaunchError, match="torchrun: no"):
        launcher.launch(plan())
    assert list(place.iterdir()) == []


def test_a_status_file_of_ones_own(monkeypatch, tmp_path, place):
    monkeypatch.chdir(tmp_path)
    asked = []
    monkeypatch.setattr(launcher, "_by_torchrun", lambda job, _: asked.append(job.status) or 1)
    assert launcher.launch(plan("--status", "own.json")) == 1
    assert asked == [str(tmp_path / "own.json")], "workers may run in another folder"
    assert job_status.read(tmp_path / "own.json")["state"] == "failed"
    monkeypatch.setattr(job_status, "folder", lambda: None)
    assert launcher.launch(plan()) == 1
    assert asked[1] is None, "without a folder of its own a job runs all the same"
    assert not place.exists() or not list(place.iterdir())


@pytest.mark.parametrize(
    ("words", "unshared"),
    [((), False), (("--max-restarts", "2"), True), (("--nnodes", "1:2"), True), (("--nnodes", "2:2"), False)],
)
def test_torchrun_runs_the_worker_with_its_own_options(words, unshared, monkeypatch):
    given = []
    monkeypatch.setattr(torchrun, "run", given.append)
    made = plan("--nproc-per-node", "2", *words)
    assert launcher._by_torchrun(made.job, made.torchrun) == 0
    (options,) = given
    assert isinstance(options, Namespace)
    assert (options.module, options.training_script) == (True, launcher.WORKER)
    assert launcher.Job.from_words(options.training_script_args) == made.job
    assert options.nproc_per_node == "2"
    assert os.environ.pop(launcher.UNSHARED, "0") == str(int(unshared))
    assert made.torchrun.training_script == __file__, "what was asked for stays as it was"


@pytest.mark.parametrize(
    ("exitcode", "code", "said"),
    [
        (7, 7, "thinwire: rank 1 failed first, with exit code 7; restarts allowed: 0\n"),
        (-9, 137, "thinwire: rank 1 failed first, with signal 9; restarts allowed: 0\n"),
    ],
)
def test_the_first_worker_that_failed_is_named(exitcode, code, said, monkeypatch, capsys):
    def fail(_):
        error = ChildFailedError.__new__(ChildFailedError)
        monkeypatch.setattr(
            ChildFailedError, "get_first_failure", lambda _: (1, SimpleNamespace(exitcode=exitcode))
        )
        raise error

    monkeypatch.setattr(torchrun, "run", fail)
    made = plan()
    assert launcher._by_torchrun(made.job, made.torchrun) == code
    assert capsys.readouterr().err == said


def test_signals_and_wrong_options_of_torchrun(monkeypatch):
    made = plan()

    def signalled(_):
        raise SignalException("ended", 15)

    monkeypatch.setattr(torchrun, "run", signalled)
    assert launcher._by_torchrun(made.job, made.torchrun) == 143

    def wrong(_):
        raise ValueError("nproc must be positive")

    monkeypatch.setattr(torchrun, "run", wrong)
    with pytest.raises(LaunchError, match="torchrun: nproc must be positive"):
        launcher._by_torchrun(made.job, made.torchrun)


def test_a_lab_gets_what_was_asked_for(monkeypatch, capsys):
    labs, commands = [], []

    class Made:
        def __str__(self):
            return "2 hosts, 1gbit links"

        def run(self, command):
            commands.append(command)
            return SimpleNamespace(returncodes=(0, 0))

    def lab(*words, **options):
        labs.append((words, options))
        return nullcontext(Made())

    monkeypatch.setattr(launcher, "Lab", lab)
    made = plan("--hosts", "2", "--link", "1gbit")
    assert launcher._in_lab(made.job, made) == 0
    assert labs == [((2, "1gbit"), {"loopback": False})]
    assert commands[0][1:4] == ["-u", "-m", launcher.WORKER]
    assert launcher.Job.from_words(commands[0][4:]) == made.job
    assert capsys.readouterr().err == "thinwire: 2 hosts, 1gbit links\n"
    made = plan("--hosts", "3", "--loopback")
    launcher._in_lab(made.job, made)
    assert labs[1] == ((3, None), {"loopback": True})


@pytest.mark.parametrize(
    ("changes", "kind"),
    [
        ({"codec": "intt8"}, PolicyError),
        ({"weights": "intt8"}, PolicyError),
        ({"shadow": -1}, LaunchError),
        ({"script": "nowhere.py"}, LaunchError),
    ],
)
def test_a_job_is_checked_when_it_is_made(changes, kind):
    with pytest.raises(kind):
        launcher.Job(**{"script": __file__, **changes})
    assert issubclass(kind, InputError | LaunchError | PolicyError)


def test_a_job_may_choose_by_itself_or_run_a_module():
    for job in (
        launcher.Job(__file__, codec="auto", weights="int8", shadow=0),
        launcher.Job("pkg.module", ("a", "--b"), module=True, seed=4, shadow=1),
    ):
        assert launcher.Job.from_words(job.words()) == job


def test_help_names_what_torchrun_does_not_have():
    shown = launcher.Parser(parents=[launcher.own_options()], add_help=False).format_help()
    for option in (
        "--codec",
        "--plan",
        "--weights",
        "--seed",
        "--shadow",
        "--status",
        "--hosts",
        "--link",
        "--loopback",
    ):
        assert option in shown
    defaults = launcher.own_options().parse_args([])
    assert vars(defaults) == {
        "codec": None, "plan": None, "weights": None, "seed": 0, "shadow": 0, "status": None, "hosts": None,
        "link": None, "loopback": False,
    }  # fmt: skip
