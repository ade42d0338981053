"""Tensor, sequence, pipeline and expert parallelism for `thinwire bench parallel`: stacks of perceptrons.

Every layer is a perceptron with a residual, four times as wide inside. Torch's own communication is in
float32 ("fp32") or, with the whole network, in bfloat16 ("bf16"). Codecs are measured with both networks:
"int8" computes in float32, "bf16:int8" in bfloat16.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed import _functional_collectives as funcol
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.pipelining import PipelineStage as TorchStage
from torch.distributed.pipelining import Schedule1F1B
from torch.distributed.tensor import Replicate, Shard
from torch.distributed.tensor import parallel as torch_styles
from torch.nn import functional

from thinwire import parallel
from thinwire.bench.parallel_kinds import COMPUTE, HALF, PLAIN, Arm, local

DEPTH = 4


@dataclass(frozen=True)
class Sizes:
    """Rows of a batch and the width of a layer."""

    rows: int
    width: int
    micro_batches: int = 8


def sizes(device: torch.device) -> Sizes:
    """Return sizes that make communication a large part of a step."""
    return Sizes(4096, 2048) if device.type == "cuda" else Sizes(512, 256)


class Perceptron(nn.Module):
    """A residual perceptron."""

    def __init__(self, width: int, inside: int) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(width, inside), nn.Linear(inside, width)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(functional.gelu(self.up(x)))


def stack(device: torch.device, method: str, depth: int = DEPTH, *, split: int = 1) -> nn.Sequential:
    """Return equal weights on every rank; `split` divides the inner width."""
    torch.manual_seed(0)
    width = sizes(device).width
    net = nn.Sequential(*(Perceptron(width, 4 * width // split) for _ in range(depth)))
    return net.to(device, dtype_of(method))


def dtype_of(method: str) -> torch.dtype:
    """Return the dtype in which a method computes."""
    return torch.bfloat16 if method.partition(":")[0] == HALF else torch.float32


def codec_of(method: str) -> str | None:
    """Return a method's codec; None if torch communicates.

    >>> [codec_of(each) for each in ("fp32", "bf16", "int8", "bf16:int8")]
    [None, None, 'int8', 'int8']
    """
    dtype, _, codec = method.partition(":")
    return codec or (None if dtype in (PLAIN, HALF) else dtype)


def rows(device: torch.device, method: str, seed: int, count: int = 0) -> Tensor:
    """Return random inputs."""
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(count or sizes(device).rows, sizes(device).width, generator=generator)
    return x.to(device, dtype_of(method))


def arm_of(method: str, net: nn.Module, backward: Callable[[], None], sent: Any = None) -> Arm:
    """Return an arm that runs `backward` and updates the network."""
    optimizer = torch.optim.SGD(net.parameters(), 1e-4)

    def step() -> None:
        optimizer.zero_grad()
        backward()
        optimizer.step()

    def gradients() -> list[Tensor]:
        optimizer.zero_grad()
        backward()
        return [local(each.grad).clone() for each in net.parameters() if each.grad is not None]

    return Arm(method, step, gradients, sent)


def tensor(method: str, device: torch.device) -> Arm:
    """Tensor parallelism over all ranks: activations are all-reduced, and so are their gradients."""
    return _tensor(method, device, sequence=False)


def sequence(method: str, device: torch.device) -> Arm:
    """Sequence parallelism: activations are gathered and reduce-scattered."""
    return _tensor(method, device, sequence=True)


def _tensor(method: str, device: torch.device, *, sequence: bool) -> Arm:
    world = dist.get_world_size()
    x = rows(device, method, 1)
    if method == COMPUTE:
        net = stack(device, method, split=world)
    else:
        net = stack(device, method)
        mesh = init_device_mesh(device.type, (world,))
        codec = codec_of(method)
        home: Any = torch_styles if codec is None else parallel
        codecs = {} if codec is None else {"forward": codec, "backward": codec}
        outside: Any = Shard(0) if sequence else Replicate()
        for layer in net:
            plan = {
                "up": home.ColwiseParallel(input_layouts=outside, **codecs),
                "down": home.RowwiseParallel(output_layouts=outside, **codecs),
            }
            torch_styles.parallelize_module(layer, mesh, plan)
        if sequence:
            x = x.chunk(world)[dist.get_rank()].contiguous()
    x.requires_grad_()  # as if other layers came before

    def backward() -> None:
        net(x).float().square().mean().backward()

    return arm_of(method, net, backward)


def pipeline(method: str, device: torch.device) -> Arm:
    """A pipeline with one stage per rank and torch's schedule 1F1B; without communication, bubbles remain."""
    world, rank, count = dist.get_world_size(), dist.get_rank(), sizes(device).micro_batches
    net = stack(device, method, 2)
    x = rows(device, method, 1)
    if method == COMPUTE:
        parts = x.chunk(count)
        parts = (*parts, *parts[: world - 1])

        def alone() -> None:
            for part in parts:
                net(part).float().square().mean().backward()

        return arm_of(method, net, alone)
    stage: Any
    codec = codec_of(method)
    if codec is None:
        stage = TorchStage(net, rank, world, device)
    else:
        stage = parallel.PipelineStage(net, rank, world, device, codec=codec)
    schedule = Schedule1F1B(stage, count, loss_fn=lambda y, _: y.float().square().mean())
    target = torch.zeros(len(x), 1, device=device)

    def backward() -> None:
        if rank == 0:
            schedule.step(x)
        elif rank == world - 1:
            schedule.step(target=target)
        else:
            schedule.step()

    sent = None if codec is None else lambda: int(stage.handle.stats()["sent_nbytes"])
    return arm_of(method, net, backward, sent)


def expert(method: str, device: torch.device) -> Arm:
    """A mixture of experts, one per rank: rows go to their expert and back, equally many to each rank."""
    world, group = dist.get_world_size(), dist.group.WORLD
    net = stack(device, method, 1)
    x = rows(device, method, 1 + dist.get_rank()).requires_grad_()
    splits, codec = [len(x) // world] * world, codec_of(method)

    def exchange(given: Tensor) -> Tensor:
        if method == COMPUTE:
            return given
        if codec is None:
            return funcol.all_to_all_single_autograd(given, splits, splits, group)  # type: ignore[arg-type]
        return parallel.all_to_all(given, splits, splits, codec)

    def backward() -> None:
        exchange(net(exchange(x))).float().square().mean().backward()

    return arm_of(method, net, backward)
