# ruff: noqa: T201
"""Fully connected layers split by columns, with 8-bit activations and errors, as Dettmers (2016) does it.

torchrun --nproc-per-node 2 examples/dettmers_model_parallel.py

Every rank holds a slice of the columns of each weight matrix, and so computes a slice of the activations. All
ranks gather the slices before the next layer. In the backward pass, every rank has a part of the sum of the
errors; the parts are added, and every rank keeps the errors of its own slice. Both travel in the 8-bit type
"dynamic tree". The last layer, before the soft-max, is left at 32 bits.

The script trains three times: on one device (every rank by itself), split with 32 bits, split with 8 bits.
"""

import hashlib

import torch
import torch.distributed as dist
from sklearn.datasets import load_digits
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.distributed.tensor.parallel import ColwiseParallel, parallelize_module

import thinwire

STEPS, BATCH, HIDDEN = 100, 120, 480  # HIDDEN divides by 2, 3 and 4 ranks


def network():
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Linear(64, HIDDEN), nn.ReLU(), nn.Linear(HIDDEN, HIDDEN), nn.ReLU(), nn.Linear(HIDDEN, 10)
    )


def split(net, mesh, codec):
    """Give every rank a slice of the columns; a layer gathers the slices of its input."""
    wires = {"forward": codec, "backward": codec}
    plan = {
        "0": thinwire.parallel.ColwiseParallel(**wires),
        "2": thinwire.parallel.ColwiseParallel(input_layouts=Shard(-1), **wires),
        "4": ColwiseParallel(input_layouts=Shard(-1), output_layouts=Replicate()),  # torch's own: 32 bits
    }
    return parallelize_module(net, mesh, plan)


def train(net, x, y):
    optimizer = torch.optim.SGD(net.parameters(), 0.1, momentum=0.9)
    order = torch.Generator().manual_seed(1)
    for _ in range(STEPS):
        chosen = torch.randint(len(x), (BATCH,), generator=order)
        loss = nn.functional.cross_entropy(net(x[chosen]), y[chosen])
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    return loss.item()


def whole(net):
    """Return all weights, in one vector."""
    found = [p.full_tensor() if isinstance(p, DTensor) else p for p in net.parameters()]
    return torch.cat([each.detach().reshape(-1) for each in found])


def main():
    dist.init_process_group("gloo")
    rank, world = dist.get_rank(), dist.get_world_size()
    mesh = init_device_mesh("cpu", (world,))
    digits = load_digits()
    x, y = torch.tensor(digits.data, dtype=torch.float32) / 16, torch.tensor(digits.target)
    (x, unseen), (y, labels) = (x[:1500], x[1500:]), (y[:1500], y[1500:])

    alone = network()
    losses = {"one device": train(alone, x, y)}
    for name, codec in (("32 bits", None), ("8 bits", "tree8/4096")):
        net = split(network(), mesh, codec)
        losses[name] = train(net, x, y)
        with torch.no_grad():
            accuracy = (net(unseen).argmax(1) == labels).float().mean().item()
        weights = whole(net)
        away = ((weights - whole(alone)).norm() / whole(alone).norm()).item()
        bits = hashlib.sha256(weights.numpy().tobytes()).hexdigest()[:16]
        print(f"rank {rank} {name} weights {bits}", flush=True)
        if rank == 0:
            print(f"{name}: loss {losses[name]:.4f}, one device {losses['one device']:.4f}", flush=True)
            print(f"{name}: accuracy {accuracy:.4f}, weights differ by {away:.1e}", flush=True)
    if rank == 0:
        codec, numel = thinwire.codecs.get("tree8/4096"), BATCH * HIDDEN // world
        print(f"ratio {4 * numel / codec.nbytes(numel):.2f}")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
