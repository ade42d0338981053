"""The program of every worker of `thinwire launch --plan`: it runs a script by a job plan.

    python -m thinwire.hybrids.launch_worker JOB [ARGUMENT ...]

All ranks run the whole script, with the same random numbers; see `script` for what is done to it.
"""

import atexit
import os
import random
import sys
from pathlib import Path

import torch
import torch.distributed as dist

from thinwire.errors import InputError
from thinwire.hybrids.job_plan import JobPlan
from thinwire.hybrids.script import NOT_APPLIED, Script
from thinwire.integrations.job_status import Writer
from thinwire.integrations.launch_worker import HIDDEN, run, say, without_our_frames
from thinwire.integrations.launcher import Job
from thinwire.integrations.metrics_table import headline


def main(words: list[str]) -> None:
    """Run the script by the plan; rank 0 says what was sent, however the script ends."""
    job = Job.from_words(words)
    assert job.plan is not None
    is_first = os.environ.get("RANK", "0") == "0"
    sys.excepthook = without_our_frames(sys.excepthook, (*HIDDEN, __file__))
    plan = JobPlan.read(job.plan)
    plan.check_world(int(os.environ.get("WORLD_SIZE", "1")))
    script = Script(plan, job.seed)
    _prepare(job.seed)
    script.install()
    writer = Writer(Path(job.status), script.stats) if is_first and job.status else None
    if writer:
        writer.start()
    try:
        succeeded = _ended_well(job)
        if succeeded and script.hybrid is None:
            raise InputError(NOT_APPLIED)
    finally:
        if is_first and script.hybrid is not None:
            atexit.register(_summarize, script)  # after a traceback
        if writer:
            writer.stop()
    if succeeded:
        dist.destroy_process_group()


def _ended_well(job: Job) -> bool:
    """Run the script; whether it ended with status 0. Other ends are raised."""
    try:
        run(job)
    except SystemExit as end:
        if end.code not in (None, 0):
            raise
    return True


def _prepare(seed: int) -> None:
    """Seed what scripts draw from, alike on all ranks, and choose this rank's GPU."""
    random.seed(seed)
    torch.manual_seed(seed)
    if "numpy" in sys.modules:
        sys.modules["numpy"].random.seed(seed % 2**32)
    if torch.cuda.is_available():
        torch.cuda.set_device(int(os.environ.get("LOCAL_RANK", "0")) % torch.cuda.device_count())


def _summarize(script: Script) -> None:
    assert script.hybrid is not None
    for axis, stats in zip(script.hybrid.handles, script.stats(), strict=True):
        say(headline(stats).replace("thinwire: ", f"thinwire: {axis}: ", 1))
    if script.hybrid.placed is not None:
        sent = script.hybrid.placed.stats()
        mb, plain = sent["sent_nbytes"] / 1e6, sent["plain_nbytes"] / 1e6
        say(f"thinwire: placed: {sent['messages']} messages, {mb:,.1f} MB sent instead of {plain:,.1f} MB")
    elif not script.hybrid.handles:
        say(f"thinwire: {script.steps} steps on {script.plan.shape()}")


if __name__ == "__main__":
    main(sys.argv[1:])
