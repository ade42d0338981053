"""Ranks with optimizers that communicate: beside plain implementations, saved and loaded, and refused.

    python outer_optimizer_program.py WORLD PART ...

Every rank reports every check: what went wrong ("" if nothing), and a digest of what all ranks must hold.
"""

import sys
import traceback

import outer_adam_checks
import outer_demo_checks
import outer_loco_checks
import torch.distributed as dist
from start_program import digest, join, report, start

TIMEOUT_S = 60
PARTS = {
    "demo": outer_demo_checks.CHECKS,
    "adam": outer_adam_checks.CHECKS,
    "loco": outer_loco_checks.CHECKS,
    "learning": (*outer_demo_checks.LEARNING, *outer_adam_checks.LEARNING, *outer_loco_checks.LEARNING),
}


def main(rank, world, place, names):
    join(rank, world, place, TIMEOUT_S)
    for check in (each for name in names for each in PARTS[name]):
        wrong, held = "", ()
        try:
            held = check(rank, world)
        except Exception:  # noqa: BLE001
            wrong = traceback.format_exc()[-2500:]
        report(check=check.__name__, rank=rank, wrong=wrong, digest=digest(held or ()))
        dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    world, *names = sys.argv[1:]
    report(checks=[each.__name__ for name in names for each in PARTS[name]])
    sys.exit(max(start("fork", int(world), main, names)))
