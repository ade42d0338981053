"""What ranks of a tensor-parallel job do: the same layers with torch's styles and with thinwire's, compared.

    python tensor_program.py WORLD PART ...

Every rank reports every check: what went wrong ("" if nothing), and a digest of what all ranks must hold.
"""

import sys
import traceback
import warnings

import tensor_rows_checks
import tensor_style_checks
import torch.distributed as dist
from start_program import digest, join, report, start

TIMEOUT_S, COMPILING_S = 30, 200
PARTS = {
    "styles": tensor_style_checks.QUICK,
    "compiled": (*tensor_style_checks.COMPILED, tensor_rows_checks.compiled_rows),
    "rows": tensor_rows_checks.CHECKS,
}


def main(rank, world, place, names):
    if "compiled" in names:
        warnings.simplefilter("ignore")  # torch's compiler warns of its own parts
    join(rank, world, place, COMPILING_S if "compiled" in names else TIMEOUT_S)
    for check in (each for name in names for each in PARTS[name]):
        wrong, found = "", ()
        try:
            found = check(rank, world)
        except Exception:  # noqa: BLE001
            wrong = traceback.format_exc()[-2500:]
        report(check=check.__name__, rank=rank, wrong=wrong, digest=digest(found or ()))
        dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    world, *names = sys.argv[1:]
    report(checks=[each.__name__ for name in names for each in PARTS[name]])
    sys.exit(max(start("fork", int(world), main, names)))
