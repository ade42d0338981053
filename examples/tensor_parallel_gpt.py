# ruff: noqa: T201
"""A small GPT, split by tensor and sequence parallelism, with several codecs for its activations.

torchrun --nproc-per-node 2 examples/tensor_parallel_gpt.py --codecs fp32 bf16 int8 int4

It learns the characters of Python's own argparse.py, and prints the loss on a part that it has not seen.
"""

import argparse
import time
from pathlib import Path

import torch
import torch.distributed as dist
import torch.distributed.tensor.parallel as plain
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.distributed.tensor.parallel import parallelize_module

from thinwire import parallel as thin

LENGTH, WIDTH, HEADS, LAYERS, BATCH = 64, 96, 12, 2, 16
WORDS = 128  # one per character


class Attention(nn.Module):
    def __init__(self):
        super().__init__()
        self.wq, self.wk, self.wv, self.wo = (nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(4))

    def forward(self, x):
        found = [each(x) for each in (self.wq, self.wk, self.wv)]  # the heads of this rank
        q, k, v = (each.unflatten(-1, (-1, WIDTH // HEADS)).transpose(1, 2) for each in found)
        y = nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        return self.wo(y.transpose(1, 2).flatten(2))


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm1, self.norm2, self.attention = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH), Attention()
        self.up, self.down = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)

    def forward(self, x):
        x = x + self.attention(self.norm1(x))
        return x + self.down(nn.functional.gelu(self.up(self.norm2(x))))


class GPT(nn.Module):
    def __init__(self):
        super().__init__()
        self.words, self.places = nn.Embedding(WORDS, WIDTH), nn.Embedding(LENGTH, WIDTH)
        self.blocks = nn.ModuleList(Block() for _ in range(LAYERS))
        self.norm, self.head = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, WORDS, bias=False)

    def forward(self, x):
        x = self.words(x) + self.places(torch.arange(LENGTH).expand(len(x), -1))
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x))


def split(net, mesh, codec):
    """Between layers, every rank holds a part of the sequence; inside, a part of the heads and columns."""
    wires = {"forward": codec, "backward": codec}
    scattered = {"output_layouts": Shard(1), "use_local_output": False}
    one = {
        "norm1": thin.SequenceParallel(**wires),
        "attention": thin.PrepareModuleInput(
            input_layouts=(Shard(1),), desired_input_layouts=(Replicate(),), **wires
        ),
        "attention.wq": thin.ColwiseParallel(**wires),
        "attention.wk": thin.ColwiseParallel(**wires),
        "attention.wv": thin.ColwiseParallel(**wires),
        "attention.wo": thin.RowwiseParallel(**scattered, **wires),
        "norm2": thin.SequenceParallel(**wires),
        "up": thin.ColwiseParallel(input_layouts=Shard(1), **wires),
        "down": thin.RowwiseParallel(**scattered, **wires),
    }
    whole = {
        "words": thin.RowwiseParallel(input_layouts=Replicate(), **scattered, **wires),
        "places": thin.RowwiseParallel(input_layouts=Replicate(), **scattered, **wires),
        "norm": thin.SequenceParallel(**wires),
        "head": plain.ColwiseParallel(input_layouts=Shard(1), output_layouts=Replicate()),  # 32 bits
    }
    for i in range(LAYERS):
        whole |= {f"blocks.{i}.{name}": style for name, style in one.items()}
    return parallelize_module(net, mesh, whole)


def batch(text, order):
    at = torch.randint(len(text) - LENGTH - 1, (BATCH,), generator=order)
    found = torch.stack([text[i : i + LENGTH + 1] for i in at])
    return found[:, :-1], found[:, 1:]


def loss_of(net, x, y):
    return nn.functional.cross_entropy(net(x).flatten(0, 1), y.flatten())


def train(net, text, steps):
    optimizer = torch.optim.AdamW(net.parameters(), 2e-3, foreach=False)
    order = torch.Generator().manual_seed(1)
    began = time.perf_counter()
    for _ in range(steps):
        loss = loss_of(net, *batch(text, order))
        optimizer.zero_grad()
        loss.backward()
        for p in net.parameters():  # norms: every rank has the gradient of its part of the sequence
            if isinstance(p.grad, DTensor) and p.grad.placements != p.placements:
                p.grad = p.grad.redistribute(placements=p.placements)
        optimizer.step()
    return 1000 * (time.perf_counter() - began) / steps


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--codecs", nargs="+", default=["fp32", "int8"])
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--seeds", type=int, default=1)
    args = parser.parse_args()
    dist.init_process_group("gloo")
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    read = Path(argparse.__file__).read_bytes()
    text = torch.tensor([each for each in read if each < WORDS])
    seen, unseen = text[:-10_000], text[-10_000:]
    for codec in args.codecs:
        found = []
        for seed in range(args.seeds):
            torch.manual_seed(seed)
            net = split(GPT(), mesh, codec)
            step_ms = train(net, seen, args.steps)
            order = torch.Generator().manual_seed(2)
            with torch.no_grad():
                losses = [loss_of(net, *batch(unseen, order)).item() for _ in range(10)]
            found.append(sum(losses) / len(losses))
        if dist.get_rank() == 0:
            said = " ".join(f"{each:.4f}" for each in found)
            print(f"{codec}: loss {said} after {args.steps} steps, {step_ms:.0f} ms each", flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
