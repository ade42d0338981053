"""Ranks that save a distributed checkpoint, or load one that another number of ranks has saved.

    python dcp_program.py 4 save FOLDER
    python dcp_program.py 2 load FOLDER

Every rank reports the step, a digest of its residuals, and the sum of that over its tensors.
"""

import sys
import warnings

import torch
import torch.distributed as dist
from ddp_program import model, train
from start_program import digest, join, report, start
from torch.distributed import checkpoint as dcp

import thinwire
from thinwire.integrations import load_sharded, sharded_state
from thinwire.integrations.checkpoint import gradient_residuals

TIMEOUT_S = 30


def residual_of(handle):
    """This rank's residual of its largest tensor."""
    return gradient_residuals(handle.state_dict(), handle.shapes)["middle.weight"]


def main(rank, world, place, task, folder):
    join(rank, world, place, TIMEOUT_S)
    warnings.simplefilter("ignore")  # of torch's own, about its own functions
    net = model()
    handle = thinwire.attach(net, "onebit")
    if task == "save":
        train(net, rank, 3)
        dcp.save({"model": net.state_dict(), "thinwire": sharded_state(handle)}, checkpoint_id=folder)
    else:
        dcp.load({"model": net.state_dict()}, checkpoint_id=folder)
        load_sharded(handle, folder)
    residual = residual_of(handle)
    mean = residual.clone()
    dist.all_reduce(mean)
    mean /= world
    facts = {"step": handle.step, "digest": digest([residual]), "mean": mean.double().norm().item()}
    train(net, rank, 2, first=handle.step)
    report(rank=rank, **facts, after=digest(net.parameters()))
    torch.save(mean, f"{folder}-mean-{task}-{world}-{rank}.pt")
    dist.destroy_process_group()


if __name__ == "__main__":
    sys.exit(max(start("fork", int(sys.argv[1]), main, *sys.argv[2:])))
