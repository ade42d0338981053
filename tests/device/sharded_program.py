"""NCCL ranks with sharded models that share a GPU: the checks of `tests/groups/sharded_checks.py`.

python sharded_program.py          started by a lab on every rank
"""

import json
import os
import sys
import time
import traceback
import warnings
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist

sys.path.insert(0, str(Path(__file__).parents[1] / "groups"))

from nccl_program import leave_together
from sharded_checks import CHECKS, SQUARE

TIMEOUT_S = 120
DEVICE = torch.device("cuda", 0)


def main(names):
    rank, world = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    torch.cuda.set_device(0)
    torch.set_num_threads(1)
    dist.init_process_group("nccl", timeout=timedelta(seconds=TIMEOUT_S))
    warnings.simplefilter("ignore")
    for check in (*CHECKS, *SQUARE) if world == 4 else CHECKS:
        if names and check.__name__ not in names:
            continue
        began, wrong = time.monotonic(), ""
        try:
            check(DEVICE, rank, world)
        except Exception:  # noqa: BLE001
            wrong = traceback.format_exc()[-1500:]
        torch.cuda.synchronize()
        seconds = round(time.monotonic() - began, 1)
        line = {"check": check.__name__, "rank": rank, "wrong": wrong, "seconds": seconds}
        sys.stdout.write(json.dumps(line) + "\n")
        sys.stdout.flush()
        dist.barrier()
    torch.cuda.synchronize()
    leave_together(rank, world)
    os._exit(0)


if __name__ == "__main__":
    main(sys.argv[1:])
