"""Ranks with an optimizer that communicates; one dies: `python outer_optimizer_fault_program.py demo loco`.

Kinds of optimizers run one after another, each in ranks of its own.
"""

import os
import sys
import time

import torch
from outer_optimizer_tools import give, run, weights
from start_program import join, report, start

from thinwire.errors import CommError
from thinwire.outer import DeMo, LoCo, OneBitAdam, ZeroOneAdam

TIMEOUT_S, WORLD = 20, 3
MAKE = {
    "demo": lambda given: DeMo(given, lr=0.1, min_numel=100),
    "one_bit_adam": lambda given: OneBitAdam(given, warmup_steps=1, min_numel=100),
    "zero_one_adam": lambda given: ZeroOneAdam(given, var_freeze_step=1, local_step_clipper=1, min_numel=100),
    "loco": lambda given: LoCo(torch.optim.SGD(given, lr=0.1), min_numel=100),
}


def main(rank, world, place, kind, when):
    join(rank, world, place, TIMEOUT_S)
    params = weights()
    optimizer = MAKE[kind](params)
    run(optimizer, params, rank, 0 if when == "start" else 2)
    if rank == 1:
        time.sleep(0.2)
        os._exit(0)
    said = []
    for _ in range(2):  # a step after a failed one fails too
        try:
            give(params, rank, 3)
            optimizer.step()
            said.append("nothing was raised")
        except CommError as error:
            said.append(type(error).__name__)
    report(kind=kind, when=when, rank=rank, said=said)
    time.sleep(1)  # the other survivor learns of the dead rank, not of this one
    os._exit(0)


if __name__ == "__main__":
    for kind in sys.argv[1:]:
        for when in ("start", "later"):
            start("fork", WORLD, main, kind, when)
