"""What ranks of a placed network do: compute together what one device computes alone, and compare.

    python placed_program.py 2 [quick | slow | CHECK ...]

Every rank reports every check: what went wrong, "" if nothing.
"""

import os
import sys
import time
import traceback

import placed_equal_checks as equal
import placed_refusal_checks as refused
import placed_sent_checks as sent
import torch.distributed as dist
from start_program import join, report, start

TIMEOUT_S = 60
QUICK = (
    equal.branches,
    equal.outputs,
    equal.odd_parts,
    equal.pipeline,
    equal.first_and_last,
    equal.in_one_order,
    equal.translator,
    equal.gpt,
    equal.returned_loss,
    equal.batch_norm,
    equal.dropout,
    equal.input_gradients,
    equal.no_gradients,
    equal.several_calls,
    equal.sixteen_bits,
    equal.not_finite,
    sent.lossy,
    sent.random_rounding,
    sent.claimed,
    sent.state,
    sent.data_parallel,
    sent.at_the_same_time,
    refused.refusals,
    refused.disagreements,
)
SLOW_CHECKS = refused.other_rows, refused.own_error, refused.dies
CHECKS = {each.__name__: each for each in (*QUICK, *SLOW_CHECKS)}
SLOW = [each.__name__ for each in SLOW_CHECKS]


def main(rank, world, place, names):
    join(rank, world, place, TIMEOUT_S)
    if not rank:
        report(checks=names)
    for name in names:
        wrong, began = "", time.monotonic()
        try:
            CHECKS[name](rank, world)
        except Exception:  # noqa: BLE001
            wrong = traceback.format_exc()[-2500:]
        report(check=name, rank=rank, wrong=wrong, seconds=round(time.monotonic() - began, 2))
        if name == "dies":  # the last check: no group is whole any more
            os._exit(0)
        dist.barrier()
    dist.destroy_process_group()


def chosen(words):
    """The checks that the command line names."""
    groups = {"slow": SLOW, "quick": [name for name in CHECKS if name not in SLOW]}
    return [name for word in words for name in groups.get(word, [word])] or list(CHECKS)


if __name__ == "__main__":
    sys.exit(max(start("fork", int(sys.argv[1]), main, chosen(sys.argv[2:]))))
