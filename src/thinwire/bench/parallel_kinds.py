"""The kinds of parallelism that `thinwire bench parallel` measures, and how a method trains in each.

A method is torch's own communication ("fp32", "bf16"), codecs of thinwire, or "compute only". Every arm of a
kind trains the same network from the same weights on the same random data, without dropout. "bf16:int8" is
int8 with a network that computes in bfloat16, to be compared with "bf16".
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.nn import functional

from thinwire import zoo
from thinwire.integrations import fsdp
from thinwire.zoo.transformer import GPT2

PLAIN, HALF, COMPUTE = "fp32", "bf16", "compute only"


@dataclass
class Arm:
    """A method in training."""

    method: str
    step: Callable[[], None]  #: trains one step
    gradients: Callable[[], list[Tensor]]  #: of a pass without an update: this rank's part
    sent_nbytes: Callable[[], int] | None = None  #: that thinwire says this rank has sent
    overlap: Callable[[], tuple[float, float]] | None = None  #: share of transfers hidden, seconds exposed


@dataclass(frozen=True)
class Kind:
    """A kind of parallelism."""

    build: Callable[[str, torch.device], Arm]
    methods: Sequence[str]
    world: int = 2  #: fewest ranks, and a divisor of their number
    nodes: int = 0  #: with slow links between this many nodes only; 0: between all ranks
    alone: bool = False  #: "compute only" is the whole network and batch on one device


@dataclass(frozen=True)
class Language:
    """A GPT and its random batch."""

    vocabulary: int
    tokens: int
    batch: int
    width: int = 0  #: 0: GPT-2 small

    def net(self, device: torch.device) -> GPT2:
        """Build the network with the same weights on every rank, without dropout."""
        torch.manual_seed(0)
        net = GPT2(self.vocabulary, 64, self.width, 4, 4) if self.width else zoo.get("gpt2", str(device))
        for module in net.modules():
            if isinstance(module, nn.Dropout):
                module.p = 0.0
        assert isinstance(net, GPT2)
        return net.to(device)

    def data(self, device: torch.device, seed: int) -> tuple[Tensor, Tensor]:
        """Return random tokens and labels."""
        generator = torch.Generator().manual_seed(seed)
        shape = self.batch, self.tokens
        x, y = (torch.randint(self.vocabulary, shape, generator=generator).to(device) for _ in range(2))
        return x, y


def language(device: torch.device) -> Language:
    """Return the language model for a device: GPT-2 small on a GPU, a small one on a CPU."""
    return Language(50_257, 256, 4) if device.type == "cuda" else Language(4000, 16, 8, 256)


def trained(net: nn.Module, data: tuple[Tensor, Tensor], cuda: bool) -> tuple[Callable[[], None], Callable]:  # type: ignore[type-arg]
    """Return a function that trains one step, and one that returns the gradients of a pass."""
    optimizer = torch.optim.AdamW(net.parameters(), lr=1e-4, fused=cuda)

    def backward() -> None:
        optimizer.zero_grad()
        logits = net(data[0])
        functional.cross_entropy(logits.float().flatten(0, -2), data[1].flatten()).backward()

    def step() -> None:
        backward()
        optimizer.step()

    def gradients() -> list[Tensor]:
        backward()
        return [local(each.grad).clone() for each in net.parameters() if each.grad is not None]

    return step, gradients


def local(tensor: Tensor) -> Tensor:
    """Return this rank's part of a tensor."""
    part = tensor.to_local() if hasattr(tensor, "to_local") else tensor
    assert isinstance(part, Tensor)
    return part.detach()


def sharded(method: str, device: torch.device, *, replicas: int = 1) -> Arm:
    """FSDP2, or HSDP with several replicas: bfloat16 parameters on a GPU, gradients reduced in float32."""
    world = dist.get_world_size()
    names = ("replicate", "shard") if replicas > 1 else ("shard",)
    shape = (replicas, world // replicas) if replicas > 1 else (world,)
    mesh = init_device_mesh(device.type, shape, mesh_dim_names=names)
    model = language(device)
    net = model.net(device)
    cuda = device.type == "cuda"
    half = torch.bfloat16
    dtypes = MixedPrecisionPolicy(half if cuda else None, half if method == HALF else torch.float32)
    for block in net.blocks:
        fully_shard(block, mesh=mesh, mp_policy=dtypes)
    fully_shard(net, mesh=mesh, mp_policy=dtypes)
    handle = None
    if method not in (PLAIN, HALF):
        handle = fsdp.attach(net, **_codecs(method, replicas))
    step, gradient = trained(net, model.data(device, 1 + dist.get_rank()), cuda)
    return Arm(method, step, gradient, None if handle is None else lambda: handle.sent_nbytes)


def _codecs(method: str, replicas: int) -> dict[str, Any]:
    """Return the codecs of a method, as `attach` takes them.

    >>> _codecs("int8+int4", replicas=1)
    {'codec': 'int4', 'weights': 'int8'}
    >>> _codecs("int8", replicas=2), _codecs("int8+int8+int4", replicas=2)
    ({'codec': 'int8'}, {'codec': 'int4', 'weights': 'int8', 'inside': 'int8'})
    """
    if method == COMPUTE:
        method = "noop+noop" if replicas == 1 else "noop+noop+noop"
    weights, *others = method.split("+")
    if replicas == 1:
        return {"codec": others[0] if others else weights, "weights": weights}
    if not others:
        return {"codec": weights}  # between replicas alone
    inside, between = others
    return {"codec": between, "weights": weights, "inside": inside}


def fully_sharded(method: str, device: torch.device) -> Arm:
    """FSDP2 over all ranks. "int8+int4": weights in int8, gradients in int4."""
    return sharded(method, device)


def hybrid_sharded(method: str, device: torch.device) -> Arm:
    """HSDP with two replicas: the codec is for the all-reduce between replicas.

    "int8+int8+int4": weights and gradients in a replica in int8, gradients between replicas in int4.
    """
    return sharded(method, device, replicas=2)


def relative_error(mine: Sequence[Tensor], wanted: Sequence[Tensor]) -> float:
    """Return the relative error of all ranks' parts together."""
    sums = [
        torch.stack([each.double().square().sum() for each in tensors]).sum()
        for tensors in (
            [one.float() - other.float() for one, other in zip(mine, wanted, strict=True)],
            wanted,
        )
    ]
    both = torch.stack(sums)
    dist.all_reduce(both)
    error, size = both.tolist()
    return math.sqrt(error / size) if size else 0.0
