"""Model parallelism beside one device, for `thinwire bench parallel`: what M ranks gain at the same batch.

- "branches": an Inception-like network whose branches are on two ranks
- "stages": stacked LSTMs, as in a translator, in stages on two ranks, with four micro-batches
- "columns": a GPT whose layers are split over two ranks
- "hybrid": the same on four ranks, as two replicas of two ranks each; "hybrid-stages": as replicas in stages

The base is the whole network with the whole batch on one device; on a CPU a device is one core. "fp32" sends
activations and gradients as they are.
"""

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

from thinwire import hybrids
from thinwire.bench.parallel_kinds import COMPUTE, PLAIN, Arm, local
from thinwire.hybrids import JobPlan, PlacedAxis, ReplicateAxis, TensorAxis
from thinwire.parallel import Placed

BLOCKS, CHANNELS, SIDE, IMAGES = 4, 64, 16, 16
LAYERS, CELLS, LENGTH, SENTENCES, MICRO_BATCHES = 4, 256, 16, 32, 4
SYMBOLS, WIDTH, HEADS, DEPTH, TOKENS, ROWS = 256, 256, 4, 4, 64, 8
TENSOR = {"*.attention.w[qkv]": "column", "*.attention.wo": "row", "*.up": "column", "*.down": "row"}


def conv(inputs: int, outputs: int, side: int) -> nn.Sequential:
    return nn.Sequential(nn.Conv2d(inputs, outputs, side, padding=side // 2, bias=False), nn.ReLU())


class Branches(nn.Module):
    """Four branches of a block of Inception, joined at its end."""

    def __init__(self, width: int) -> None:
        super().__init__()
        part = width // 4
        self.one = conv(width, part, 1)
        self.three = nn.Sequential(conv(width, part, 1), conv(part, 2 * part, 3))
        self.twice = nn.Sequential(conv(width, part, 1), conv(part, part, 3), conv(part, part, 3))
        self.join = conv(4 * part, width, 1)

    def forward(self, x: Tensor) -> Tensor:
        joined: Tensor = self.join(torch.cat((self.one(x), self.three(x), self.twice(x)), 1))
        return x + joined


class Inception(nn.Module):
    """Blocks of branches."""

    def __init__(self) -> None:
        super().__init__()
        self.first = conv(3, CHANNELS, 3)
        self.blocks = nn.Sequential(*(Branches(CHANNELS) for _ in range(BLOCKS)))
        self.last = nn.Linear(CHANNELS, 10)

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.last(self.blocks(self.first(x)).mean((2, 3)))
        return y


class Recurrent(nn.Module):
    """An LSTM layer with a residual."""

    def __init__(self) -> None:
        super().__init__()
        self.lstm = nn.LSTM(CELLS, CELLS, batch_first=True)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.lstm(x)[0]


class Attention(nn.Module):
    """Causal attention whose heads can be split over ranks."""

    def __init__(self) -> None:
        super().__init__()
        self.wq, self.wk, self.wv, self.wo = (nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(4))

    def forward(self, x: Tensor) -> Tensor:
        projected = (each(x) for each in (self.wq, self.wk, self.wv))
        q, k, v = (each.unflatten(-1, (-1, WIDTH // HEADS)).transpose(1, 2) for each in projected)
        y = nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        z: Tensor = self.wo(y.transpose(1, 2).flatten(2))
        return z


class Block(nn.Module):
    """A block of a GPT."""

    def __init__(self) -> None:
        super().__init__()
        self.norm1, self.norm2, self.attention = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH), Attention()
        self.up, self.down = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attention(self.norm1(x))
        y: Tensor = x + self.down(nn.functional.gelu(self.up(self.norm2(x))))
        return y


def codec_of(method: str) -> str | None:
    return None if method in (PLAIN, COMPUTE) else method


def random(
    shape: tuple[int, ...], classes: int, device: torch.device, symbols: int = 0
) -> tuple[Tensor, Tensor]:
    """Return a random batch, the same on all ranks."""
    generator = torch.Generator().manual_seed(1)
    x = (
        torch.randint(symbols, shape, generator=generator)
        if symbols
        else torch.randn(shape, generator=generator)
    )
    wanted = shape if symbols else shape[:1]
    return x.to(device), torch.randint(classes, wanted, generator=generator).to(device)


def trained(method: str, net: nn.Module, batch: tuple[Tensor, Tensor], sent: Callable[[], int] | None) -> Arm:
    """Return an arm that trains a network the usual way."""
    optimizer = torch.optim.SGD(net.parameters(), 1e-3)

    def backward() -> None:
        optimizer.zero_grad()
        y = net(batch[0])
        cross_entropy(y.flatten(0, -2) if batch[1].dim() > 1 else y, batch[1].flatten()).backward()

    def step() -> None:
        backward()
        optimizer.step()

    def gradients() -> list[Tensor]:
        backward()
        return [local(each.grad).clone() for each in net.parameters() if each.grad is not None]

    return Arm(method, step, gradients, sent)


def placed(
    method: str, net: nn.Module, where: dict[str, int], batch: tuple[Tensor, Tensor], parts: int
) -> Arm:
    """Return a network on two ranks, or on this device alone."""
    if method == COMPUTE:
        return trained(method, net, batch, None)
    codec = codec_of(method)
    spread = Placed(net, where, forward=codec, backward=codec, micro_batches=parts)
    return trained(method, spread, batch, lambda: sent_nbytes(spread))


def sent_nbytes(spread: Placed) -> int:
    """Return the bytes that a placed network has sent from this rank."""
    stats = spread.stats()
    return sum(int(stats[way]["sent_nbytes"]) for way in ("forward", "backward"))


def branches(method: str, device: torch.device) -> Arm:
    """The branch with one convolution of 3 x 3 and more channels is on rank 1, the others on rank 0."""
    torch.manual_seed(0)
    net = Inception().to(device)
    where = {"first": 0, "blocks": 0, "last": 0, "blocks.*.three": 1}
    return placed(method, net, where, random((IMAGES, 3, SIDE, SIDE), 10, device), 1)


def stages(method: str, device: torch.device) -> Arm:
    """Two layers on either rank; the second also predicts."""
    torch.manual_seed(0)
    layers = [nn.Embedding(SYMBOLS, CELLS), *(Recurrent() for _ in range(LAYERS)), nn.Linear(CELLS, SYMBOLS)]
    net = nn.Sequential(*layers).to(device)
    half = 1 + LAYERS // 2
    where = {str(i): int(i >= half) for i in range(len(layers))}
    return placed(method, net, where, random((SENTENCES, LENGTH), SYMBOLS, device, SYMBOLS), MICRO_BATCHES)


def gpt(device: torch.device) -> nn.Sequential:
    """Return a GPT without positions."""
    torch.manual_seed(0)
    head = nn.Linear(WIDTH, SYMBOLS, bias=False)
    return nn.Sequential(nn.Embedding(SYMBOLS, WIDTH), *(Block() for _ in range(DEPTH)), head).to(device)


def by_plan(method: str, plan: JobPlan, device: torch.device) -> Arm:
    """Return a GPT that is spread as a plan says, or alone."""
    net, batch = gpt(device), random((ROWS, TOKENS), SYMBOLS, device, SYMBOLS)
    if method == COMPUTE:
        return trained(method, net, batch, None)
    hybrid = hybrids.apply(net, plan)
    return trained(method, net, hybrid.part_of(batch), None)


def columns(method: str, device: torch.device) -> Arm:
    """A GPT split over two ranks: heads and columns."""
    codec = codec_of(method) or "fp32"
    axis: Any = TensorAxis(TENSOR, codec, codec)
    return by_plan(method, JobPlan(mesh={"tensor": 2}, tensor=axis), device)


def hybrid(method: str, device: torch.device) -> Arm:
    """Two replicas of two ranks that split layers; the codec is for all that is sent."""
    codec = codec_of(method) or "fp32"
    sizes = {"replicate": dist.get_world_size() // 2, "tensor": 2}
    tensor: Any = TensorAxis(TENSOR, codec, codec)
    return by_plan(method, JobPlan(mesh=sizes, replicate=ReplicateAxis(codec), tensor=tensor), device)


def hybrid_stages(method: str, device: torch.device) -> Arm:
    """Two replicas of two ranks with half of the blocks each, and four micro-batches."""
    codec = codec_of(method) or "fp32"
    sizes = {"replicate": dist.get_world_size() // 2, "placed": 2}
    where: Any = {str(i): int(i > DEPTH // 2) for i in range(DEPTH + 2)}
    axis = PlacedAxis(where, codec, codec, micro_batches=MICRO_BATCHES)
    return by_plan(method, JobPlan(mesh=sizes, replicate=ReplicateAxis(codec), placed=axis), device)
