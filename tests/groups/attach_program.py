"""What ranks of a DDP job do with `thinwire.attach`: everything that users may do with it, and compare.

    python attach_program.py 2                    all checks on two ranks
    python attach_program.py 4 buckets joined     some

Every rank reports every check: what went wrong ("" if nothing), a digest of the parameters, and the time.
"""

import shutil
import sys
import time
import traceback
from pathlib import Path

import attach_number_checks
import attach_state_checks
import attach_torch_checks
import torch._dynamo
import torch.distributed as dist
from attach_tools import OWN_SUMS
from start_program import digest, join, report, start

import thinwire
from thinwire import codecs, policy, schedules
from thinwire.runtimes import local

TIMEOUT_S = 30
EXTRA = {"int4/128~sr+ef", "int8/256+ef", "aps/e4m3+ef", "sign/64+ef", "randomk/0.1~unbiased", "topk/0.1+ef"}
ALL = attach_torch_checks.CHECKS + attach_number_checks.CHECKS + attach_state_checks.CHECKS
CHECKS = {check.__name__: check for check in ALL}


def warm(rank, world, place):
    """Let one process compile what all ranks will use, if that was not done before."""
    del rank, world
    specs = {rule.codec for name in OWN_SUMS for rule in policy.get(name).rules} | EXTRA
    for spec in sorted(specs):
        codec = codecs.get(spec)
        for schedule in ("one_shot", "two_shot"):
            if not schedules.get(schedule).refuses(codec.for_shape((130, 100))):
                ranks = [torch.randn(130, 100) for _ in range(2)]
                local.all_reduce(ranks, [thinwire.Channel(codec) for _ in ranks], "avg", schedule)
    shutil.rmtree(Path(place).parent)


def main(rank, world, place, names):
    join(rank, world, place, TIMEOUT_S)
    if not rank:
        report(checks=names)
    for name in names:
        wrong, answer, began = "", None, time.perf_counter()
        try:
            answer = CHECKS[name](rank, world)
        except Exception:  # noqa: BLE001
            wrong = traceback.format_exc()[-2000:]
        seconds = round(time.perf_counter() - began, 2)
        same = digest(answer.parameters()) if answer is not None else ""
        report(check=name, rank=rank, wrong=wrong, digest=same, seconds=seconds)
        dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    assert start("fork", 1, warm) == [0]
    sys.exit(max(start("fork", int(sys.argv[1]), main, sys.argv[2:] or list(CHECKS))))
