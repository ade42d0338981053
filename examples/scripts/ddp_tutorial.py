# ruff: noqa: N817, T201
"""Plain DDP, in the manner of PyTorch's tutorial "Getting started with DDP". It knows nothing of thinwire.

torchrun --nproc-per-node 2 ddp_tutorial.py
thinwire launch --codec int8 --nproc-per-node 2 ddp_tutorial.py
"""

import hashlib

import torch
import torch.distributed as dist
from torch import nn, optim
from torch.nn.parallel import DistributedDataParallel as DDP


class ToyModel(nn.Module):
    def __init__(self):
        super().__init__()
        self.net1 = nn.Linear(64, 256)
        self.relu = nn.ReLU()
        self.net2 = nn.Linear(256, 5)

    def forward(self, x):
        return self.net2(self.relu(self.net1(x)))


def digest(model):
    """Of the bits of all parameters: ranks that agree print the same."""
    hashed = hashlib.sha256()
    for parameter in model.parameters():
        hashed.update(parameter.detach().contiguous().numpy().tobytes())
    return hashed.hexdigest()[:16]


def demo_basic(steps=40):
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    torch.manual_seed(0)
    ddp_model = DDP(ToyModel())
    teacher = torch.randn(64, 5)

    loss_fn = nn.MSELoss()
    optimizer = optim.SGD(ddp_model.parameters(), lr=0.05)
    generator = torch.Generator().manual_seed(rank)
    for step in range(steps):
        optimizer.zero_grad()
        inputs = torch.randn(32, 64, generator=generator)
        loss = loss_fn(ddp_model(inputs), inputs @ teacher / 8)
        loss.backward()
        optimizer.step()
        if rank == 0 and step in (0, steps - 1):
            print(f"step {step} loss {loss.item():.4f}", flush=True)
    print(f"rank {rank} weights {digest(ddp_model)}", flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    demo_basic()
