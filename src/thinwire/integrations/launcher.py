"""Run a DDP script as it is, with thinwire attached: torchrun with one more option.

    thinwire launch --codec int8 --nproc-per-node 2 train.py --epochs 3

Options before the script belong to thinwire or torchrun; arguments after it belong to the script. torchrun
itself (`torch.distributed.run`) starts the workers and handles rendezvous, restarts and `-m module`. Each
worker runs `launch_worker.py`. With --hosts, the script runs in the lab instead, one rank on each emulated
host.
"""

import difflib
import json
import os
import sys
from argparse import SUPPRESS, ArgumentParser, Namespace
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import NoReturn

from thinwire import policy
from thinwire.errors import LaunchError, ThinwireError
from thinwire.integrations import job_status
from thinwire.lab import Lab

WORKER = "thinwire.integrations.launch_worker"
PLAN_WORKER = "thinwire.hybrids.launch_worker"  #: started by name: hybrids stand above integrations
CODEC = "int8"
EXAMPLE = "as in: thinwire launch --codec int8 --nproc-per-node 2 train.py"
USAGE = "thinwire launch [--codec CODEC] [options] [torchrun's options] [-m] SCRIPT [its arguments]"
INTERRUPTED = 130
#: Makes torchrun use a fresh store after every restart. Otherwise (torch 2.13) workers read the addresses of
#: dead workers from the old store and fail to connect: https://github.com/pytorch/pytorch/issues/135712
UNSHARED = "TORCH_DISABLE_SHARE_RDZV_TCP_STORE"


@dataclass(frozen=True)
class Job:
    """The job, as every worker receives it."""

    script: str
    arguments: tuple[str, ...] = ()
    module: bool = False
    codec: str = CODEC
    seed: int = 0
    shadow: int = 0
    status: str | None = None  #: the file rank 0 writes
    weights: str | None = None  #: the codec of a sharded model's weights
    plan: str | None = None  #: a job plan's file, which then has the codecs

    def __post_init__(self) -> None:
        if self.codec != "auto":
            policy.get(self.codec)
        if self.weights is not None:
            policy.get(self.weights)
        if self.shadow < 0:
            raise LaunchError(f"--shadow {self.shadow}: must be a number of steps, 0 (never) or more")
        if not self.module and not Path(self.script).exists():
            raise LaunchError(f"there is no script '{self.script}'; {EXAMPLE}")

    @property
    def worker(self) -> str:
        """The program of every worker."""
        return WORKER if self.plan is None else PLAN_WORKER

    @property
    def label(self) -> str:
        """What `thinwire watch` shows as the job's codec."""
        return self.codec if self.plan is None else Path(self.plan).name

    def words(self) -> list[str]:
        """Return the command-line arguments of a worker."""
        return [json.dumps({**asdict(self), "arguments": []}), *self.arguments]

    @classmethod
    def from_words(cls, words: Sequence[str]) -> "Job":
        return cls(**{**json.loads(words[0]), "arguments": tuple(words[1:])})


@dataclass(frozen=True)
class LaunchOptions:
    """A job and where it runs: by torchrun with its options, or in a lab."""

    job: Job
    torchrun: Namespace
    hosts: int | None = None
    link: str | None = None
    loopback: bool = False

    @property
    def world(self) -> int | None:
        """The number of ranks, if the options tell it."""
        if self.hosts is not None:
            return self.hosts
        nodes, per_node = {*self.torchrun.nnodes.split(":")}, str(self.torchrun.nproc_per_node)
        return int(nodes.pop()) * int(per_node) if len(nodes) == 1 and per_node.isdigit() else None


class Parser(ArgumentParser):
    """Parses torchrun's options and thinwire's; errors are one line, and help lists thinwire's."""

    def error(self, message: str) -> NoReturn:
        if message.startswith("unrecognized arguments: "):
            word = message.split()[2].split("=")[0]
            near = difflib.get_close_matches(word, self._option_string_actions, 1)
            hint = f"; did you mean {near[0]}?" if near else "; torchrun --help lists its options"
            message = f"{word} is no option of thinwire launch, nor of torchrun{hint}"
        elif "training_script" in message:
            message = f"no script to run; {EXAMPLE}"
        raise LaunchError(message)

    def format_help(self) -> str:
        return f"{own_options().format_help()}\nand every option of torchrun: torchrun --help\n"


def own_options() -> ArgumentParser:
    """Return a parser of the options that torchrun does not have."""
    parser = ArgumentParser(
        "thinwire launch", USAGE, __doc__.splitlines()[0], add_help=False, allow_abbrev=False
    )
    parser.add_argument(
        "--codec",
        help=f"auto, a recipe ({', '.join(policy.RECIPES)}), a codec of `thinwire codecs`, "
        f"or a policy's .toml file; default: {CODEC}",
    )
    parser.add_argument(
        "--plan", metavar="FILE", help="a job plan (.toml), for a script without any parallelism"
    )
    parser.add_argument(
        "--weights", metavar="CODEC", help="for weights that FSDP gathers; default: as torch sends them"
    )
    parser.add_argument("--seed", type=int, default=0, metavar="N", help="of codecs that round at random")
    parser.add_argument(
        "--shadow", type=int, default=0, metavar="N", help="compare with float32 every N steps; 0 is never"
    )
    parser.add_argument("--status", metavar="FILE", help="the file `thinwire watch` reads")
    parser.add_argument("--hosts", type=int, metavar="N", help="run in the lab: one rank on each of N hosts")
    parser.add_argument("--link", metavar="RATE", help="of each host in the lab: 200mbit, 1gbit")
    parser.add_argument(
        "--loopback", action="store_true", help="a lab without root: plain processes, not throttled"
    )
    return parser


def parse(words: Sequence[str]) -> LaunchOptions:
    """Parse a command line; raise a `LaunchError` for any mistake, before a process starts."""
    from torch.distributed.run import get_args_parser

    theirs = get_args_parser()
    parser = Parser(
        prog="thinwire launch", parents=[own_options(), theirs], add_help=False, allow_abbrev=False
    )
    options = parser.parse_args(list(words))
    script, arguments = options.training_script, tuple(options.training_script_args)
    _check_plan(options)
    own = (options.codec or CODEC, options.seed, options.shadow, options.status, options.weights)
    job = Job(script, arguments, options.module, *own, options.plan)
    plan = LaunchOptions(job, options, options.hosts, options.link, options.loopback)
    _check(plan, theirs)
    return plan


def _check_plan(options: Namespace) -> None:
    """Refuse options that a job plan replaces."""
    given = [name for name in ("codec", "weights", "shadow") if getattr(options, name)]
    if options.plan is not None and given:
        raise LaunchError(f"--{given[0]} does not go with --plan: the plan has the codecs of every axis")


def _check(plan: LaunchOptions, torchrun: ArgumentParser) -> None:
    for name in ("no_python", "run_path"):
        if getattr(plan.torchrun, name):
            raise LaunchError(f"--{name.replace('_', '-')} does not apply: thinwire attaches inside Python")
    if plan.hosts is None:
        if plan.link or plan.loopback:
            raise LaunchError("--link and --loopback apply to the lab only: add --hosts, as in --hosts 2")
        return
    for action in torchrun._actions:
        free = action.dest in ("training_script", "training_script_args", "module", "help")
        if not free and getattr(plan.torchrun, action.dest, action.default) not in (action.default, SUPPRESS):
            raise LaunchError(
                f"{action.option_strings[0]} is torchrun's and does not apply in the lab, which runs one "
                f"rank on each host: leave it out, or leave out --hosts"
            )


def launch(plan: LaunchOptions) -> int:
    """Run a job to its end and return its exit status: that of the first worker that failed."""
    job_status.clean()
    path = _status_file(plan.job)
    job = Job(**{**asdict(plan.job), "status": str(path) if path else None})
    if path:
        job_status.begin(path, job=path.stem, script=job.script, codec=job.label)
    code = 1
    try:
        code = _by_torchrun(job, plan.torchrun) if plan.hosts is None else _in_lab(job, plan)
    except KeyboardInterrupt:
        code = INTERRUPTED
    except ThinwireError:  # nothing was started
        if path:
            path.unlink(missing_ok=True)
        raise
    finally:
        if path:
            job_status.end(path, code)
    return code


def _status_file(job: Job) -> Path | None:
    if job.status:
        return Path(job.status).absolute()
    folder = job_status.folder()
    return folder / f"{Path(job.script).stem}-{os.getpid()}.json" if folder else None


def _by_torchrun(job: Job, options: Namespace) -> int:
    from torch.distributed import run
    from torch.distributed.elastic.multiprocessing.api import SignalException
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError

    if options.max_restarts or len(set(options.nnodes.split(":"))) > 1:
        os.environ.setdefault(UNSHARED, "1")
    changed = {"module": True, "training_script": job.worker, "training_script_args": job.words()}
    try:
        run.run(Namespace(**{**vars(options), **changed}))
    except ChildFailedError as error:
        rank, failure = error.get_first_failure()
        how = f"signal {-failure.exitcode}" if failure.exitcode < 0 else f"exit code {failure.exitcode}"
        _say(f"rank {rank} failed first, with {how}; restarts allowed: {options.max_restarts}")
        return _shell_code(failure.exitcode)
    except SignalException as error:
        return 128 + int(error.sigval)
    except (ValueError, AssertionError) as error:
        raise LaunchError(f"torchrun: {error}") from None
    return 0


def _in_lab(job: Job, plan: LaunchOptions) -> int:
    with Lab(plan.hosts, plan.link, loopback=plan.loopback) as lab:
        _say(f"{lab}")
        done = lab.run([sys.executable, "-u", "-m", job.worker, *job.words()])
    failed = sorted((code for code in done.returncodes if code), key=lambda code: code < 0)
    return _shell_code(failed[0]) if failed else 0


def _shell_code(code: int) -> int:
    """Return the exit status that a shell would show: 128 plus the number of a signal."""
    return code if code >= 0 else 128 - code


def _say(line: str) -> None:
    sys.stderr.write(f"thinwire: {line}\n")
    sys.stderr.flush()
