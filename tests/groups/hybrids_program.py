"""What ranks of a job with a plan do: a small GPT spread over a mesh, compared with the same on one device.

    python hybrids_program.py WORLD quick|more [CHECK ...]

Every rank reports every check: what went wrong ("" if nothing), and a digest of what all ranks must hold.
"""

import sys
import traceback
import warnings

import torch.distributed as dist
from hybrids_checks import CHECKS, MORE
from start_program import digest, join, report, start

TIMEOUT_S = 90
PARTS = {"quick": CHECKS, "more": MORE}


def main(rank, world, place, part, *names):
    join(rank, world, place, TIMEOUT_S)
    warnings.simplefilter("ignore")  # of torch's own, about its own functions
    for check in PARTS[part][world]:
        if names and check.__name__ not in names:
            continue
        wrong, held = "", ()
        try:
            held = check(rank)
        except Exception:  # noqa: BLE001
            wrong = traceback.format_exc()[-2500:]
        report(check=check.__name__, rank=rank, wrong=wrong, digest=digest(held or ()))
        dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    world, part, *names = sys.argv[1:]
    report(checks=[each.__name__ for each in PARTS[part][int(world)] if not names or each.__name__ in names])
    sys.exit(max(start("fork", int(world), main, part, *names)))
