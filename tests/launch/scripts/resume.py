# ruff: noqa: T201
"""A script that knows thinwire: it attaches itself, and every rank checkpoints the residuals of its handle.

    thinwire launch --nproc-per-node 2 --max-restarts 2 resume.py FOLDER STEP

Rank 1 kills itself in that step, the first time it gets there. In the end the same is done once more without
a break, and both results are printed.
"""

import hashlib
import json
import os
import signal
import sys
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import thinwire

STEPS, EVERY = 14, 3


def batch(rank, step):
    generator = torch.Generator().manual_seed(1000 * step + rank)
    x = torch.randn(16, 64, generator=generator)
    return x, x[:, :5].argmax(1)


def save(folder, rank, step, **states):
    fresh = folder / f"{step}-{rank}.new"
    torch.save({key: each.state_dict() for key, each in states.items()}, fresh)
    fresh.replace(folder / f"{step}-{rank}.pt")


def load(folder, rank, **states):
    """The last step that all ranks have saved."""
    steps = [int(path.stem.split("-")[0]) for path in folder.glob(f"*-{rank}.pt")]
    last = torch.tensor(max(steps, default=0))
    dist.all_reduce(last, dist.ReduceOp.MIN)
    if last:
        checkpoint = torch.load(folder / f"{last}-{rank}.pt", weights_only=True)
        for key, each in states.items():
            each.load_state_dict(checkpoint[key])
    return int(last)


def train(rank, folder=None, fatal=None):
    """Loss and digest of the parameters and of the residuals, in the end."""
    torch.manual_seed(0)
    model = DistributedDataParallel(nn.Sequential(nn.Linear(64, 256), nn.ReLU(), nn.Linear(256, 5)))
    handle = thinwire.attach(model, "onebit", seed=3)
    optimizer = torch.optim.SGD(model.parameters(), 0.05, momentum=0.9)
    states = {"model": model, "optimizer": optimizer, "wire": handle}
    first = load(folder, rank, **states) if folder else 0
    print(f"rank {rank} begins at {first}", flush=True)
    for step in range(first, STEPS):
        x, y = batch(rank, step)
        optimizer.zero_grad()
        loss = nn.functional.cross_entropy(model(x), y)
        loss.backward()
        if step == fatal and rank == 1 and os.environ["TORCHELASTIC_RESTART_COUNT"] == "0":
            os.kill(os.getpid(), signal.SIGKILL)
        optimizer.step()
        if folder and (step + 1) % EVERY == 0:
            save(folder, rank, step + 1, **states)
    residuals = handle.state_dict()["channels"]["onebit/512+ef"]
    assert residuals
    return loss.item(), digest([*model.parameters(), *tensors(residuals)])


def tensors(state):
    """All tensors in nested dictionaries."""
    for _, value in sorted(state.items()):
        if isinstance(value, dict):
            yield from tensors(value)
        elif isinstance(value, torch.Tensor):
            yield value


def digest(held):
    bits = b"".join(each.detach().contiguous().numpy().tobytes() for each in held)
    return hashlib.sha256(bits).hexdigest()[:16]


def main(folder, fatal):
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    resumed = train(rank, folder, fatal)
    print(json.dumps({"rank": rank, "resumed": resumed, "whole": train(rank)}), flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    main(Path(sys.argv[1]), int(sys.argv[2]))
