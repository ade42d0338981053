"""NCCL ranks with sharded models that share a GPU: the checks of `tests/groups/sharded_checks.py`.

python sharded_program.py [CHECK ...]          started by a lab on every rank
"""

import sys
import warnings
from pathlib import Path

import torch.distributed as dist
from ranks import DEVICE, join, leave, run

sys.path.insert(0, str(Path(__file__).parents[1] / "groups"))

from sharded_checks import CHECKS, SQUARE

TIMEOUT_S = 120


def main(names):
    rank, world = join(TIMEOUT_S)
    warnings.simplefilter("ignore")  # of torch's own, about its own functions
    for check in (*CHECKS, *SQUARE) if world == 4 else CHECKS:
        if not names or check.__name__ in names:
            run(check, check.__name__, DEVICE, rank, world)
            dist.barrier()
    leave(rank, world)


if __name__ == "__main__":
    main(sys.argv[1:])
