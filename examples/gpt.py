# ruff: noqa: T201
"""One small GPT, and every way to train it on several ranks: one flag chooses.

torchrun --nproc-per-node 4 examples/gpt.py --kind replicate+tensor --codec int8

| kind | ranks | what it is |
|---|---|---|
| `replicate` | any | data parallelism (DDP) |
| `shard`, `replicate+shard` | any, 4 | FSDP2, HSDP |
| `tensor`, `replicate+tensor` | 2 or 4, 4 | tensor parallelism; with data parallelism |
| `placed`, `replicate+placed` | 2, 4 | blocks on different ranks, with micro-batches; with data parallelism |
| `replicate+shard+tensor` | 8 | three axes |
| `pipeline`, `tensor+pipeline` | 2, 4 | torch's pipeline stages, 1F1B; with more ranks, replicas of it |
| `diloco`, `localsgd`, `sparseloco` | any | ranks train alone, and average every `--every` steps |
| `demo`, `onebit-adam` | any | optimizers that communicate |

It learns the characters of Python's own argparse.py. With `--check`, every rank also trains the whole network
alone, on the batches of all ranks. Without a codec, both must have the same weights up to rounding, or the
script fails. (Kinds from `diloco` on do not do what one device does, so there is nothing to check.)
"""

import argparse
import hashlib
import os
import sys
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.pipelining import Schedule1F1B
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.parallel import parallelize_module

import thinwire
from thinwire import outer
from thinwire.hybrids import JobPlan, PlacedAxis, ReplicateAxis, ShardAxis, TensorAxis

LENGTH, WIDTH, HEADS, LAYERS, BATCH = 32, 64, 4, 4, 16  # BATCH: of all ranks together
SYMBOLS = 128  # one per character
NEAR = 2e-4  # relative difference of weights that rounding may cause
OUTER = {"diloco": outer.DiLoCo, "localsgd": outer.LocalSGD, "sparseloco": outer.SparseLoCo}
OPTIMIZERS = {"demo": outer.DeMo, "onebit-adam": outer.OneBitAdam}
PIPELINES = ("pipeline", "tensor+pipeline")
HYBRIDS = (
    *("replicate", "shard", "tensor", "placed"),
    *("replicate+shard", "replicate+tensor", "replicate+placed", "replicate+shard+tensor"),
)


class Attention(nn.Module):
    def __init__(self):
        super().__init__()
        self.wq, self.wk, self.wv, self.wo = (nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(4))

    def forward(self, x):
        projected = [
            each(x) for each in (self.wq, self.wk, self.wv)
        ]  # with tensor parallelism: of this rank's heads
        q, k, v = (each.unflatten(-1, (-1, WIDTH // HEADS)).transpose(1, 2) for each in projected)
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


class Embedding(nn.Module):
    def __init__(self):
        super().__init__()
        self.words, self.places = (
            nn.Embedding(SYMBOLS, WIDTH),
            nn.Parameter(torch.randn(LENGTH, WIDTH) * 0.02),
        )

    def forward(self, x):
        return self.words(x) + self.places


def gpt():
    """Return the network; the same weights on every rank."""
    torch.manual_seed(0)
    return nn.Sequential(
        Embedding(),
        *(Block() for _ in range(LAYERS)),
        nn.LayerNorm(WIDTH),
        nn.Linear(WIDTH, SYMBOLS, bias=False),
    )


def job_plan(kind, codec, world):
    """Return the plan of a hybrid: `thinwire launch --plan` reads the same from a file."""
    axes, codec = kind.split("+"), codec or "fp32"
    sizes = dict.fromkeys(axes, 2)
    sizes[axes[0]] = world // 2 ** (len(axes) - 1)
    wires = {"forward": codec, "backward": codec}
    layers = {"*.attention.w[qkv]": "column", "*.attention.wo": "row", "*.up": "column", "*.down": "row"}
    half = 1 + LAYERS // 2
    places = {str(i): int(i >= half) for i in range(LAYERS + 3)}
    parts = {
        "replicate": lambda: ReplicateAxis(codec),
        "shard": lambda: ShardAxis(codec, weights=codec, modules=tuple(str(1 + i) for i in range(LAYERS))),
        "tensor": lambda: TensorAxis(layers, **wires),
        "placed": lambda: PlacedAxis(places, micro_batches=4, **wires),
    }
    return JobPlan(mesh=sizes, **{axis: parts[axis]() for axis in axes})


def batches(text, steps, device):
    """Yield the batches of all ranks together; the same on every rank."""
    order = torch.Generator().manual_seed(1)
    for _ in range(steps):
        starts = torch.randint(len(text) - LENGTH - 1, (BATCH,), generator=order)
        rows = torch.stack([text[i : i + LENGTH + 1] for i in starts]).to(device)
        yield rows[:, :-1], rows[:, 1:]


def loss_of(logits, wanted):
    return nn.functional.cross_entropy(logits.flatten(0, 1), wanted.flatten())


def train(net, optimizer, data, part_of=lambda batch: batch):
    """Train a network the usual way; return the last loss."""
    for batch in data:
        x, y = part_of(batch)
        optimizer.zero_grad()
        loss = loss_of(net(x), y)
        loss.backward()
        optimizer.step()
    return loss.detach()


def adam(net, lr):
    return torch.optim.AdamW(
        net.parameters(), lr, eps=1e-4
    )  # a tiny eps would enlarge rounding in small gradients


def rank_part(batch):
    """Return this rank's samples of a batch of all ranks."""
    rank, world = dist.get_rank(), dist.get_world_size()
    return tuple(each[rank::world] for each in batch)


def by_plan(args, data, device):
    """Train by a job plan; return the loss and all weights."""
    net = gpt().to(device)
    hybrid = thinwire.hybrids.apply(net, job_plan(args.kind, args.codec, dist.get_world_size()))
    loss = train(net, adam(net, args.lr), data, hybrid.part_of)
    return loss, hybrid.state_dict()


def by_pipeline(args, data, device):
    """Train in two stages of torch's pipeline, with four micro-batches; layers split, replicas averaged."""
    inside = 2 if "tensor" in args.kind else 1
    sizes = (dist.get_world_size() // (2 * inside), 2, inside)
    mesh = init_device_mesh(device.type, sizes, mesh_dim_names=("replicate", "pipeline", "tensor"))
    layers, half, at = list(gpt().to(device)), 1 + LAYERS // 2, mesh.get_local_rank("pipeline")
    own = nn.Sequential(*(layers[half:] if at else layers[:half]))
    if inside > 1:
        split(own, mesh["tensor"], args.codec)
    group = mesh.get_group("pipeline")
    stage = thinwire.parallel.PipelineStage(own, at, 2, device, group=group, codec=args.codec)
    schedule, losses, optimizer = Schedule1F1B(stage, 4, loss_fn=loss_of), [], adam(own, args.lr)
    for batch in data:
        x, y = (each[mesh.get_local_rank("replicate") :: sizes[0]] for each in batch)
        optimizer.zero_grad()
        losses.clear()
        schedule.step(target=y, losses=losses) if at else schedule.step(x)
        gradients = [local(p.grad) for p in own.parameters()]
        thinwire.all_reduce(gradients, args.codec or "fp32", "avg", mesh.get_group("replicate"))
        optimizer.step()
    mine = {name: whole(each).cpu() for name, each in own.state_dict().items()}
    both = [None, None]
    dist.all_gather_object(both, (at, torch.stack(losses).mean().item() if at else 0.0, mine), group)
    state = {}
    for place, _, part in sorted(both, key=lambda each: each[0]):
        for name, each in part.items():
            number, _, rest = name.partition(".")
            state[f"{int(number) + half * place}.{rest}"] = each.to(device)
    return max(loss for _, loss, _ in both), state


def split(net, mesh, codec):
    """Split the matrices of blocks over the ranks of a mesh."""
    wires = {"forward": codec, "backward": codec}
    column, row = thinwire.parallel.ColwiseParallel(**wires), thinwire.parallel.RowwiseParallel(**wires)
    styles = dict.fromkeys(("attention.wq", "attention.wk", "attention.wv", "up"), column)
    styles |= dict.fromkeys(("attention.wo", "down"), row)
    parallelize_module(net, mesh, {f"*.{name}": style for name, style in styles.items()})


def local(tensor):
    """Return this rank's part of a tensor that may be split."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def whole(tensor):
    """Return the whole of a tensor that may be split."""
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def by_outer(args, data, device):
    """Train alone on each rank, and average from time to time."""
    net = gpt().to(device)
    optimizer = adam(net, args.lr)
    options = {"codec": args.codec} if args.codec else {}
    with OUTER[args.kind](net, optimizer, every=args.every, **options) as loop:
        loss = train(net, optimizer, data, rank_part)
    loop.summary()
    return loss, net.state_dict()


def by_optimizer(args, data, device):
    """Train with an optimizer that communicates."""
    net = gpt().to(device)
    options = {"codec": args.codec} if args.codec else {}
    options |= {"warmup_steps": args.steps // 4} if args.kind == "onebit-adam" else {}
    optimizer = OPTIMIZERS[args.kind](net.parameters(), args.lr, **options)
    return train(net, optimizer, data, rank_part), net.state_dict()


def difference(state, expected):
    """Return the largest relative difference of a tensor."""
    pairs = [(state[name].float(), expected[name].float()) for name in expected]
    return max(float((a - b).norm() / b.norm().clamp_min(1e-6)) for a, b in pairs)


def options():
    parser = argparse.ArgumentParser(
        formatter_class=argparse.RawDescriptionHelpFormatter, description=__doc__
    )
    parser.add_argument("--kind", default="replicate", choices=[*HYBRIDS, *PIPELINES, *OUTER, *OPTIMIZERS])
    parser.add_argument(
        "--codec", help="such as int8; by default nothing is encoded, or what the method usually does"
    )
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--lr", type=float, default=1e-3)
    parser.add_argument("--every", type=int, default=5, help="steps from one outer step to the next")
    parser.add_argument("--device", default="cpu", choices=["cpu", "cuda"])
    parser.add_argument("--check", action="store_true", help="also train on one device, and compare")
    return parser.parse_args()


def main():
    args = options()
    device = torch.device(args.device)
    if device.type == "cuda":
        device = torch.device("cuda", int(os.environ.get("LOCAL_RANK", 0)) % torch.cuda.device_count())
        torch.cuda.set_device(device)
    dist.init_process_group("nccl" if device.type == "cuda" else "gloo")
    text = torch.tensor([each for each in Path(argparse.__file__).read_bytes() if each < SYMBOLS])
    data = list(batches(text, args.steps, device))
    ways = {
        **dict.fromkeys(PIPELINES, by_pipeline),
        **dict.fromkeys(OUTER, by_outer),
        **dict.fromkeys(OPTIMIZERS, by_optimizer),
    }
    loss, state = ways.get(args.kind, by_plan)(args, data, device)
    state = {name: each.detach() for name, each in state.items()}
    bits = b"".join(each.cpu().numpy().tobytes() for each in state.values())
    print(f"rank {dist.get_rank()}: weights {hashlib.sha256(bits).hexdigest()[:16]}", flush=True)
    if dist.get_rank() == 0:
        print(
            f"{args.kind}, {args.codec or 'no codec'}: loss {loss:.4f} after {args.steps} steps", flush=True
        )
    near = not args.check or args.kind in (*OUTER, *OPTIMIZERS) or check(args, data, state, device)
    dist.barrier()
    dist.destroy_process_group()
    sys.exit(0 if near else "weights differ from those of one device")


def check(args, data, state, device):
    """Train on one device, and return whether weights are as near as they should be."""
    alone = gpt().to(device)
    loss = train(alone, adam(alone, args.lr), data)
    away = difference(state, alone.state_dict())
    if dist.get_rank() == 0:
        print(f"one device: loss {loss:.4f}; weights differ by {away:.1e}", flush=True)
    return bool(args.codec) or away < NEAR


if __name__ == "__main__":
    main()
