"""Ranks that share a GPU over NCCL: run checks, print a line of JSON for each, and leave together."""

import json
import os
import sys
import time
import traceback
from datetime import timedelta

import torch
import torch.distributed as dist

DEVICE = torch.device("cuda", 0)


def join(timeout_s, **options):
    """Make the process group; return this rank and the number of ranks, which the lab has set."""
    torch.cuda.set_device(0)
    torch.set_num_threads(1)
    dist.init_process_group("nccl", timeout=timedelta(seconds=timeout_s), **options)
    return dist.get_rank(), dist.get_world_size()


def run(check, name, *arguments):
    """Run one check on this rank and report it."""
    began, wrong = time.monotonic(), ""
    try:
        check(*arguments)
    except Exception:  # noqa: BLE001
        wrong = traceback.format_exc()[-1500:]
    torch.cuda.synchronize()
    seconds = round(time.monotonic() - began, 1)
    line = {"check": name, "rank": int(os.environ["RANK"]), "wrong": wrong, "seconds": seconds}
    sys.stdout.write(json.dumps(line) + "\n")
    sys.stdout.flush()


def run_all(checks, names, rank, world):
    """Run checks by name, all ranks together, and end the process."""
    known = {check.__name__: check for check in checks}
    for name in names:
        run(known[name], name, rank, world)
        dist.barrier()
    leave(rank, world)


def leave(rank, world):
    """End the process, when all ranks are done.

    NCCL still sends from the host's memory when a kernel is over: a rank that leaves early may cut others
    off. The first rank, which has the store, leaves last.
    """
    torch.cuda.synchronize()
    store = dist.distributed_c10d._get_default_store()
    for what, wanted in (("over", world), ("gone", world - 1)):
        if what == "over" or rank > 0:
            store.add(what, 1)
        while (what == "over" or rank == 0) and store.add(what, 0) < wanted:
            time.sleep(0.01)
    os._exit(0)
