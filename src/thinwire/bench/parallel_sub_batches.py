"""Sub-batches for `thinwire bench parallel`: convolutions data parallel, fully connected layers split.

On a GPU the network is AlexNet; on a CPU it has one convolution and layers of 2304, 1024, 1024 and 100.
A method is a codec and a number of sub-batches: "int8@4". Torch has no such scheme: "fp32" and "bf16" are
this one with unchanged wires and one sub-batch; "bf16" computes in bfloat16.
"""

from collections import OrderedDict
from dataclasses import replace
from functools import partial

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.functional import cross_entropy
from torch.nn.parallel import DistributedDataParallel

from thinwire import parallel, zoo
from thinwire.bench.parallel_kinds import COMPUTE, Arm
from thinwire.bench.parallel_layers import arm_of, codec_of, dtype_of
from thinwire.integrations import ddp
from thinwire.parallel.sub_batches_wires import Message, Transfer, Wire

COUNT = "@"
RECORDED = 3  #: steps from which the overlap is computed
BATCH = 128  #: of a rank, as in the paper


def parsed(method: str) -> tuple[str, int]:
    """Return a method's codec and its number of sub-batches.

    >>> parsed("int8@4"), parsed("fp32")
    (('int8', 4), ('fp32', 1))
    """
    codec, _, count = method.partition(COUNT)
    return codec, int(count or 1)


def network(device: torch.device) -> tuple[nn.Sequential, nn.Sequential, tuple[int, ...]]:
    """Return features and fully connected layers, equal on all ranks, and an image's shape."""
    torch.manual_seed(0)
    if device.type == "cuda":
        net = zoo.get("alexnet", "cpu")
        assert isinstance(net, nn.Sequential)
        for each in net:
            if isinstance(each, nn.Dropout):
                each.p = 0.0  # which would make gradients random
        first = [name for name, _ in net.named_children()].index("fc6")
        layers = list(net.named_children())
        return _named(layers[:first]), _named(layers[first:]), (3, 227, 227)
    features = nn.Sequential(nn.Conv2d(3, 64, 3, stride=2, padding=1), nn.ReLU(), nn.Flatten())
    connected = nn.Sequential(
        nn.Linear(2304, 1024), nn.ReLU(), nn.Linear(1024, 1024), nn.ReLU(), nn.Linear(1024, 100)
    )
    return features, connected, (3, 12, 12)


def _named(layers: list[tuple[str, nn.Module]]) -> nn.Sequential:
    return nn.Sequential(OrderedDict(layers))


class Silent(Wire):
    """Transfers that send nothing: results are zeros."""

    def _begin(self, start: object, sent: object, out: Tensor, message: Message) -> Transfer:
        del start, sent
        return Transfer(out.zero_(), None, None, self.timeline, message.what, message.draw.sub_batch)


def build(method: str, device: torch.device) -> Arm:
    """Return a method in training: one update of all layers in each step."""
    name, count = parsed(method)
    alone = name == COMPUTE
    codec, dtype = (None, torch.float32) if alone else (codec_of(name), dtype_of(name))
    features, connected, shape = network(device)
    generator = torch.Generator().manual_seed(1 + dist.get_rank())
    x = torch.randn(BATCH, *shape, generator=generator).to(device, dtype)
    y = torch.randint(100, (len(x),), generator=generator).to(device)
    replica = DistributedDataParallel(features.to(device, dtype))
    policy = "noop" if alone else codec
    handle = None if policy is None else ddp.attach(replica, policy)
    connected = connected.to(device, dtype)
    net = parallel.SubBatches(replica, connected, count, forward=codec, backward=codec)
    if alone:
        net._wire = Silent(None, 0)

    def backward() -> None:
        cross_entropy(net(x).float(), y).backward()

    def sent() -> int:
        return int(net.stats()["sent_nbytes"]) + (0 if handle is None else handle.sent_nbytes)

    arm = arm_of(method, net, backward, None if codec is None else sent)
    return replace(arm, overlap=None if alone else partial(overlap, net, arm))


def overlap(net: parallel.SubBatches, arm: Arm) -> tuple[float, float]:
    """Return the hidden share of the transfers' time, and the exposed seconds of a step, on this rank."""
    with net.record() as timeline:
        for _ in range(RECORDED):
            arm.step()
    return timeline.hidden_share() or 0.0, timeline.exposed_s() / RECORDED
