"""Collectives like those of torch.distributed, on encoded tensors.

Names and arguments are those of `torch.distributed`, plus a codec: a spec such as "int8/256", a `Codec`, or a
`Channel`, which codecs with error feedback ("+ef") need. After each call all ranks that hold a result hold
the same bits.

    import torch, torch.distributed as dist, thinwire
    dist.init_process_group("gloo")
    gradient = torch.randn(1_000_000)
    thinwire.all_reduce(gradient, "int8/256", op="avg")

Tensors are float32, bfloat16 or float16, of any shape, on a CPU or a GPU. In a group of one rank nothing is
sent, so nothing changes.
"""

from thinwire.collectives import functional
from thinwire.collectives.calls import (
    all_gather,
    all_reduce,
    all_to_all,
    broadcast,
    irecv,
    isend,
    recv,
    reduce_scatter,
    send,
)
from thinwire.collectives.explanation import Explanation, explain
from thinwire.runtimes.work import Work

__all__ = [
    "Explanation",
    "Work",
    "all_gather",
    "all_reduce",
    "all_to_all",
    "broadcast",
    "explain",
    "functional",
    "irecv",
    "isend",
    "recv",
    "reduce_scatter",
    "send",
]
