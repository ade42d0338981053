# ruff: noqa: T201
"""A script that makes several models, some with hooks of its own. Run it as a module: -m own_hooks."""

import sys

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import fp16_compress_hook
from torch.nn.parallel import DistributedDataParallel

CALLS = []


class Subclass(DistributedDataParallel):
    def __init__(self, net):
        super().__init__(net, gradient_as_bucket_view=True)


def noted(state, bucket):
    CALLS.append(state)
    return fp16_compress_hook(None, bucket)


def step(model):
    model(torch.ones(2, 64)).sum().backward()


def net():
    torch.manual_seed(0)
    return nn.Linear(64, 256)


def main():
    assert sys.argv[1:] == ["--flag", "-m", "x y"], sys.argv
    dist.init_process_group("gloo")
    plain, sub, own = DistributedDataParallel(net()), Subclass(net()), DistributedDataParallel(net())
    assert type(plain) is torch.nn.parallel.DistributedDataParallel
    assert isinstance(sub, DistributedDataParallel)
    own.register_comm_hook("mine", noted)
    try:
        own.register_comm_hook("again", noted)
    except RuntimeError as error:
        print(f"rank {dist.get_rank()} said {str(error)[:60]!r}", flush=True)
    for model in (plain, sub, own, plain):
        step(model)
    assert CALLS == ["mine"], CALLS
    del plain
    print(f"rank {dist.get_rank()} done", flush=True)
    dist.barrier()
    dist.destroy_process_group()
    sys.exit(7)


if __name__ == "__main__":
    main()
