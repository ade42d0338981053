"""Run a DDP script as it is, with thinwire attached: torchrun with one more option.

    thinwire launch --codec int8 --nproc-per-node 2 train.py --epochs 3

Words before the script are ours or torchrun's; words behind it are the script's. Underneath is torchrun
itself (`torch.distributed.run`), so rendezvous, restarts and `-m module` are its own. What each worker runs
is in `launched.py`. With hosts, the script runs in the lab instead, one rank on each emulated host.
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
from thinwire.integrations import status
from thinwire.lab import Lab

WORKER = "thinwire.integrations.launched"
EXAMPLE = "as in: thinwire launch --codec int8 --nproc-per-node 2 train.py"
USAGE = "thinwire launch [--codec CODEC] [options] [torchrun's options] [-m] SCRIPT [its arguments]"
INTERRUPTED = 130
#: Makes torchrun use a fresh store after every restart. Otherwise (torch 2.13) workers find the addresses of
#: the dead ones in the old store and fail to connect: https://github.com/pytorch/pytorch/issues/135712
UNSHARED = "TORCH_DISABLE_SHARE_RDZV_TCP_STORE"


@dataclass(frozen=True)
class Job:
    """What every worker has to know."""

    script: str
    arguments: tuple[str, ...] = ()
    module: bool = False
    codec: str = "int8"
    seed: int = 0
    shadow: int = 0
    status: str | None = None  #: the file rank 0 writes

    def __post_init__(self) -> None:
        if self.codec != "auto":
            policy.get(self.codec)
        if self.shadow < 0:
            raise LaunchError(f"--shadow {self.shadow}: every how many steps, so 0 (never) or more")
        if not self.module and not Path(self.script).exists():
            raise LaunchError(f"there is no script '{self.script}'; {EXAMPLE}")

    def words(self) -> list[str]:
        """The arguments of a worker."""
        return [json.dumps({**asdict(self), "arguments": []}), *self.arguments]

    @classmethod
    def from_words(cls, words: Sequence[str]) -> "Job":
        return cls(**{**json.loads(words[0]), "arguments": tuple(words[1:])})


@dataclass(frozen=True)
class Plan:
    """A job and where it runs: by torchrun with its options, or in a lab."""

    job: Job
    torchrun: Namespace
    hosts: int | None = None
    link: str | None = None
    loopback: bool = False


class Parser(ArgumentParser):
    """torchrun's options and ours; complaints are one line, and help is about ours."""

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
    """The options that torchrun does not have."""
    parser = ArgumentParser(
        "thinwire launch", USAGE, __doc__.splitlines()[0], add_help=False, allow_abbrev=False
    )
    parser.add_argument(
        "--codec",
        default="int8",
        help=f"auto, a recipe ({', '.join(policy.RECIPES)}), a codec of `thinwire codecs`, "
        "or a policy's .toml file; default: %(default)s",
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


def parse(words: Sequence[str]) -> Plan:
    """What a command line means; anything wrong with it is a `LaunchError`, before any process starts."""
    from torch.distributed.run import get_args_parser

    theirs = get_args_parser()
    parser = Parser(
        prog="thinwire launch", parents=[own_options(), theirs], add_help=False, allow_abbrev=False
    )
    found = parser.parse_args(list(words))
    script, arguments = found.training_script, tuple(found.training_script_args)
    job = Job(script, arguments, found.module, found.codec, found.seed, found.shadow, found.status)
    plan = Plan(job, found, found.hosts, found.link, found.loopback)
    _check(plan, theirs)
    return plan


def _check(plan: Plan, torchrun: ArgumentParser) -> None:
    for name in ("no_python", "run_path"):
        if getattr(plan.torchrun, name):
            raise LaunchError(f"--{name.replace('_', '-')} does not apply: thinwire attaches inside Python")
    if plan.hosts is None:
        if plan.link or plan.loopback:
            raise LaunchError("--link and --loopback are of the lab: say how many hosts, as in --hosts 2")
        return
    for action in torchrun._actions:
        free = action.dest in ("training_script", "training_script_args", "module", "help")
        if not free and getattr(plan.torchrun, action.dest, action.default) not in (action.default, SUPPRESS):
            raise LaunchError(
                f"{action.option_strings[0]} is torchrun's and does not apply in the lab, which runs one "
                f"rank on each host: leave it out, or leave out --hosts"
            )


def launch(plan: Plan) -> int:
    """Run a job to its end and return its exit status: that of the first worker that failed."""
    status.clean()
    path = _status_file(plan.job)
    job = Job(**{**asdict(plan.job), "status": str(path) if path else None})
    if path:
        status.begin(path, job=path.stem, script=job.script, codec=job.codec)
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
            status.end(path, code)
    return code


def _status_file(job: Job) -> Path | None:
    if job.status:
        return Path(job.status).absolute()
    here = status.folder()
    return here / f"{Path(job.script).stem}-{os.getpid()}.json" if here else None


def _by_torchrun(job: Job, options: Namespace) -> int:
    from torch.distributed import run
    from torch.distributed.elastic.multiprocessing.api import SignalException
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError

    if options.max_restarts or len(set(options.nnodes.split(":"))) > 1:
        os.environ.setdefault(UNSHARED, "1")
    changed = {"module": True, "training_script": WORKER, "training_script_args": job.words()}
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


def _in_lab(job: Job, plan: Plan) -> int:
    with Lab(plan.hosts, plan.link, loopback=plan.loopback) as lab:
        _say(f"{lab}")
        done = lab.run([sys.executable, "-u", "-m", WORKER, *job.words()])
    failed = sorted((code for code in done.returncodes if code), key=lambda code: code < 0)
    return _shell_code(failed[0]) if failed else 0


def _shell_code(code: int) -> int:
    """What a shell would call it: 128 and more for signals."""
    return code if code >= 0 else 128 - code


def _say(line: str) -> None:
    sys.stderr.write(f"thinwire: {line}\n")
    sys.stderr.flush()
