"""Checks of plans on 2, 3 and 4 ranks: the numbers of one device, bits of replicas, bytes, errors."""

import copy

import torch
import torch.distributed as dist
from start_program import raises
from torch import nn
from torch.distributed.tensor import DTensor

from thinwire import hybrids
from thinwire.errors import Disagreement, InputError
from thinwire.hybrids import JobPlan, ReplicateAxis, ShardAxis, TensorAxis

WORDS, WIDTH, HEADS, LAYERS, LENGTH, BATCH = 32, 32, 4, 2, 8, 8
STEPS = 4
BOUND = 2e-5  #: float32 sums in another order, over a few steps of Adam
MEGATRON = {
    "blocks.*.attention.w[qkv]": "column",
    "blocks.*.attention.wo": "row",
    "blocks.*.up": "column",
    "blocks.*.down": "row",
}
SEQUENCE = {
    "words": {"style": "row", "output": "sequence"},
    "blocks.*.norm1": "sequence",
    "blocks.*.attention": "gather",
    "blocks.*.attention.w[qkv]": "column",
    "blocks.*.attention.wo": {"style": "row", "output": "sequence"},
    "blocks.*.norm2": "sequence",
    "blocks.*.up": {"style": "column", "input": "sequence"},
    "blocks.*.down": {"style": "row", "output": "sequence"},
    "norm": "sequence",
    "head": {"style": "column", "input": "sequence", "output": "whole"},
}


class Attention(nn.Module):
    def __init__(self):
        super().__init__()
        self.wq, self.wk, self.wv, self.wo = (nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(4))

    def forward(self, x):
        parts = [
            each(x).unflatten(-1, (-1, WIDTH // HEADS)).transpose(1, 2)
            for each in (self.wq, self.wk, self.wv)
        ]
        y = nn.functional.scaled_dot_product_attention(*parts, is_causal=True)
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
    def __init__(self, tied=False):
        super().__init__()
        self.words = nn.Embedding(WORDS, WIDTH)
        self.blocks = nn.ModuleList(Block() for _ in range(LAYERS))
        self.norm, self.head = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, WORDS, bias=False)
        if tied:
            self.head.weight = self.words.weight

    def forward(self, x):
        x = self.words(x)
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x))


def made(seed=0, **options):
    torch.manual_seed(seed)
    return GPT(**options)


def batches(steps=STEPS):
    order = torch.Generator().manual_seed(3)
    tokens = torch.randint(WORDS, (steps, BATCH, LENGTH + 1), generator=order)
    return [(each[:, :-1], each[:, 1:]) for each in tokens]


def loss_of(net, x, y):
    return nn.functional.cross_entropy(net(x).flatten(0, 1), y.flatten())


def train(net, part=lambda *xs: xs, clip=None, steps=STEPS):
    optimizer = torch.optim.AdamW(net.parameters(), 1e-2)
    for x, y in batches(steps):
        optimizer.zero_grad()
        loss_of(net, *part(x, y)).backward()
        if clip is not None:
            clip(0.5)
        optimizer.step()


def alone(clip=False, **options):
    """What one device gets."""
    net = made(**options)
    norm = (lambda most: nn.utils.clip_grad_norm_(net.parameters(), most)) if clip else None
    train(net, clip=norm)
    return net.state_dict()


def equal(state, wanted, bound=BOUND):
    assert state.keys() == wanted.keys()
    for name, each in wanted.items():
        error = (state[name] - each).abs().max().item()
        assert error <= bound, f"{name} differs by {error}"


def trained_by(plan, *, clip=False, seed=0, **options):
    """Train by a plan; the handle, and the whole weights."""
    net = made(seed=seed, **options)
    hybrid = hybrids.apply(net, plan)
    assert hybrid.model is net
    train(net, hybrids.part_of_batch, hybrid.clip_grad_norm_ if clip else None)
    return hybrid, hybrid.state_dict()


def mesh_plan(codec="fp32", activations="fp32", modules=MEGATRON, **mesh):
    return JobPlan(
        mesh=mesh,
        replicate=ReplicateAxis(codec) if "replicate" in mesh else None,
        shard=ShardAxis(codec, modules=("blocks.*",)) if "shard" in mesh else None,
        tensor=TensorAxis(modules, activations, activations) if "tensor" in mesh else None,
    )


def replicas_and_tensor(rank):
    hybrid, state = trained_by(mesh_plan(replicate=2, tensor=2))
    assert (hybrid.part, hybrid.parts) == (rank // 2, 2)
    equal(state, alone())
    return state.values()


CHECKS = {4: [replicas_and_tensor]}
