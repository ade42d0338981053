"""Ranks with sharded models on a CPU: `python sharded_program.py 2 [CHECK ...]`."""

import sys
import time
import traceback
import warnings

import torch
import torch.distributed as dist
from sharded_checks import CHECKS, SQUARE
from start_program import join, report, start

TIMEOUT_S = 60


def main(rank, world, place, *names):
    join(rank, world, place, TIMEOUT_S)
    warnings.simplefilter("ignore")  # of torch's own, about its own functions
    for check in (*CHECKS, *SQUARE) if world == 4 else CHECKS:
        if names and check.__name__ not in names:
            continue
        began, wrong = time.monotonic(), ""
        try:
            check(torch.device("cpu"), rank, world)
        except Exception:  # noqa: BLE001
            wrong = traceback.format_exc()[-1500:]
        report(check=check.__name__, rank=rank, wrong=wrong, seconds=round(time.monotonic() - began, 1))
        dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    sys.exit(max(start("fork", int(sys.argv[1]), main, *sys.argv[2:])))
