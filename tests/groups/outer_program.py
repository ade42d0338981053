"""What ranks of an outer loop do, and compare.

    python outer_program.py 2 [quick | slow | CHECK ...]

Every rank reports every check: what went wrong, "" if nothing.
"""

import copy
import sys
import time
import traceback

import torch
import torch.distributed as dist
from outer_tools import Reference, alike, everyone, far, globals_alike, network, saved, sgd, train
from start_program import digest, join, raises, report, start

from thinwire.errors import Disagreement, InputError, NotFiniteError
from thinwire.outer import DiLoCo, LocalSGD, SparseLoCo, reshard
from thinwire.policy import Policy, Rule

TIMEOUT_S = 60
NESTEROV = {"lr": 0.7, "momentum": 0.9, "nesterov": True}
#: Every method, codec and way to begin outer steps: name, class, options.
KINDS = {
    "local": (LocalSGD, {"every": 3}),
    "local fp32": (LocalSGD, {"every": 3, "codec": "fp32"}),
    "diloco": (DiLoCo, {"every": 4}),
    "diloco int4+ef": (DiLoCo, {"every": 4, "codec": "int4"}),
    "diloco onebit": (DiLoCo, {"every": 4, "codec": "onebit"}),
    "diloco random": (DiLoCo, {"every": 4, "codec": "qsgd4", "seed": 3}),
    "diloco powersgd": (DiLoCo, {"every": 4, "codec": "powersgd"}),
    "diloco dct": (DiLoCo, {"every": 4, "codec": "dct-topk"}),
    "diloco streaming": (DiLoCo, {"every": 5, "codec": "int4", "fragments": 3}),
    "diloco overlapped": (DiLoCo, {"every": 4, "codec": "int4", "delay": 2}),
    "diloco all": (DiLoCo, {"every": 6, "codec": "int4", "fragments": 3, "delay": 5, "alpha": 0.25}),
    "sparse": (SparseLoCo, {"every": 3}),
    "sparse overlapped": (SparseLoCo, {"every": 3, "fragments": 2, "delay": 1, "codec": "topk/0.02~int2/64~rms1+ef"}),
}  # fmt: skip
EXACT_RESUME = ("local fp32", "diloco int4+ef", "diloco random", "diloco all", "sparse overlapped")


def made(kind, seed=0, **more):
    """A model, its optimizer and its outer loop."""
    method, options = KINDS[kind]
    model = network(seed)
    optimizer = sgd(model, momentum=0.9)
    return model, optimizer, method(model, optimizer, **{**options, **more})


def kind_check(kind):
    def check(rank, world):
        """Replicas hold the same bits after outer steps; bytes said are bytes sent; the loss falls."""
        model, optimizer, outer = made(kind, seed=rank)  # all begin with the weights of rank 0
        globals_alike(outer)
        alike(digest(model.state_dict().values()))
        for step in range(0, 24, 2):
            train(model, optimizer, rank, 2, step)
            globals_alike(outer)
        assert outer.rounds >= 4, outer
        outer.sync()
        alike(digest(model.parameters()))
        assert digest(model.parameters()) == digest(
            weight.to(local.dtype)
            for weight, local in zip(outer.global_weights().values(), model.parameters(), strict=True)
        )
        stats = outer.stats()
        assert stats["sent_nbytes"] == outer.sent_nbytes > 0
        assert stats["ratio"] == 1.0 if kind == "local fp32" else stats["ratio"] > 1.5, stats["ratio"]
        outer.detach()
        train(model, optimizer, rank, 12)
        assert outer.step == 24

    return check


def equals_torch(rank, world):
    """Nesterov on the mean outer gradient, computed in float64; with every=1 too, and without momentum."""
    for every, options in ((1, {"lr": 1.0, "momentum": 0.0, "nesterov": False}), (3, NESTEROV)):
        model = network(norm=False)
        twin = copy.deepcopy(model)
        reference, other = Reference(twin, **options), sgd(twin)
        optimizer = sgd(model)
        DiLoCo(model, optimizer, every=every, codec="fp32", **options)
        for step in range(0, 12, every):
            train(model, optimizer, rank, every, step)
            train(twin, other, rank, every, step)
            reference.outer_step(twin)
            assert far(model.parameters(), reference.weights) < 2e-5, step


def every_step_is_ddp(rank, world):
    """every=1, lr=1, no momentum, inner SGD: the weights of DDP, but for rounding."""
    model, plain = network(norm=False), network(norm=False)
    optimizer, other = sgd(model), sgd(plain)
    DiLoCo(model, optimizer, 1, "fp32", lr=1.0, momentum=0.0, nesterov=False)
    ddp = torch.nn.parallel.DistributedDataParallel(plain)
    train(model, optimizer, rank, 8)
    train(ddp, other, rank, 8)
    assert far(model.parameters(), plain.parameters()) < 1e-5


CHECKS = {
    **{f"kind {name}": kind_check(name) for name in KINDS},
    **{each.__name__: each for each in (equals_torch, every_step_is_ddp)},
}
SLOW = []


def main(rank, world, place, names):
    join(rank, world, place, TIMEOUT_S)
    if not rank:
        report(checks=names)
    for name in names:
        wrong, began = "", time.monotonic()
        try:
            CHECKS[name](rank, world)
        except Exception:  # noqa: BLE001
            wrong = traceback.format_exc()[-1500:]
        report(check=name, rank=rank, wrong=wrong, seconds=round(time.monotonic() - began, 2))
        dist.barrier()
    dist.destroy_process_group()


def chosen(words):
    """The checks that the command line names."""
    groups = {"slow": SLOW, "quick": [name for name in CHECKS if name not in SLOW]}
    return [name for word in words for name in groups.get(word, [word])] or list(CHECKS)


if __name__ == "__main__":
    sys.exit(max(start("fork", int(sys.argv[1]), main, chosen(sys.argv[2:]))))
