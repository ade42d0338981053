"""What NCCL ranks that share a GPU do with outer loops, and compare with each other and with a CPU.

    python outer_program.py CHECK ...         started by a lab on every rank

Every rank prints a line of JSON for every check: what went wrong ("" if nothing), and the time it took.
"""

import io
import os
import signal
import sys
import time

import torch
import torch.distributed as dist
from nccl_program import digest, everyone
from ranks import join, run, run_all
from torch import nn

from thinwire import CommError
from thinwire.errors import Disagreement, NotFiniteError
from thinwire.outer import DiLoCo, LocalSGD, SparseLoCo

DEVICE = torch.device("cuda", 0)
TIMEOUT_S = 120
SHORT_S = 8
WIDTH, ROWS = 128, 32
NESTEROV = {"lr": 0.7, "momentum": 0.9, "nesterov": True}
KINDS = {
    "local fp32": (LocalSGD, {"every": 3, "codec": "fp32"}),
    "int8": (DiLoCo, {"every": 4}),
    "int4": (DiLoCo, {"every": 4, "codec": "int4"}),
    "onebit": (DiLoCo, {"every": 4, "codec": "onebit"}),
    "random": (DiLoCo, {"every": 4, "codec": "qsgd4"}),
    "powersgd": (DiLoCo, {"every": 4, "codec": "powersgd"}),
    "all": (DiLoCo, {"every": 6, "codec": "int4", "fragments": 3, "delay": 5}),
    "sparse": (SparseLoCo, {"every": 3}),
    "sparse all": (SparseLoCo, {"every": 3, "fragments": 2, "delay": 1}),
}
FAULTS = ("killed",)


def network(seed=0, dtype=torch.float32, device=DEVICE):
    torch.manual_seed(seed)
    layers = nn.Linear(WIDTH, WIDTH), nn.BatchNorm1d(WIDTH), nn.ReLU(), nn.Linear(WIDTH, WIDTH, bias=False)
    return nn.Sequential(*layers, nn.ReLU(), nn.Linear(WIDTH, 4)).to(device, dtype)


def sgd(model):
    return torch.optim.SGD(model.parameters(), 0.05, momentum=0.9)


def train(model, optimizer, rank, steps, first=0):
    where = next(model.parameters())
    for step in range(first, first + steps):
        x = torch.randn(ROWS, WIDTH, generator=torch.Generator().manual_seed(1000 * step + rank))
        x = x.to(where.device, where.dtype)
        optimizer.zero_grad()
        nn.functional.mse_loss(model(x), x[:, :4]).backward()
        optimizer.step()


def made(kind, seed=0, **more):
    method, options = KINDS[kind]
    model = network(seed)
    optimizer = sgd(model)
    return model, optimizer, method(model, optimizer, **{**options, **more})


def alike(thing):
    everything = everyone(thing)
    assert all(each == everything[0] for each in everything), everything


def globals_alike(outer):
    momenta = [
        each["momentum_buffer"] for each in outer.optimizer.state.values() if "momentum_buffer" in each
    ]
    alike((digest([*outer.global_weights().values(), *momenta]), outer.step, outer.rounds))


def bits(model, optimizer, outer):
    momenta = [state["momentum_buffer"] for state in optimizer.state.values()]
    return digest([*model.parameters(), *momenta, *outer.global_weights().values()])


def kinds(rank, world):
    """Replicas hold the same bits, and many outer steps stay finite: calls that repeat are recorded."""
    del world
    for kind in KINDS:
        model, optimizer, outer = made(kind, seed=rank)
        globals_alike(outer)
        for step in range(0, 48, 4):
            train(model, optimizer, rank, 4, step)
            globals_alike(outer)
        outer.sync()
        alike(digest(model.parameters()))
        assert all(bool(each.isfinite().all()) for each in model.parameters()), kind
        assert outer.stats()["ratio"] > 1.5 or kind == "local fp32"
        outer.detach()


def as_torch(rank, world):
    """Nesterov on the mean outer gradient, in float64, of weights that ranks gather."""
    del world
    model = network()
    optimizer = sgd(model)
    slow = [nn.Parameter(each.detach().double().clone()) for each in model.parameters()]
    reference = torch.optim.SGD(slow, **NESTEROV)
    outer = DiLoCo(model, optimizer, 4, "fp32", alpha=0.0, delay=1)
    for step in range(0, 16, 4):
        train(model, optimizer, rank, 4, step)
        gathered = everyone([each.detach().double().cpu() for each in model.parameters()])
        for i, weight in enumerate(slow):
            weight.grad = weight.detach() - torch.stack([each[i] for each in gathered]).mean(0).to(DEVICE)
        reference.step()
        outer.finish()
        for one, other in zip(outer.global_weights().values(), slow, strict=True):
            assert float((one - other.detach()).abs().max()) < 1e-5, step


def resumed(rank, world):
    """From the middle of a round, with outer steps in flight."""
    del world
    for kind in ("int4", "random", "all", "sparse all"):
        one = made(kind)
        train(one[0], one[1], rank, 9)
        room = io.BytesIO()
        torch.save([each.state_dict() for each in one], room)
        train(one[0], one[1], rank, 9, 9)
        other = made(kind, seed=5)
        train(other[0], other[1], rank, 3)
        room.seek(0)
        for each, content in zip(other, torch.load(room, weights_only=True), strict=True):
            each.load_state_dict(content)
        train(other[0], other[1], rank, 9, 9)
        assert bits(*one) == bits(*other), kind
        one[2].detach()
        other[2].detach()


def sixteen_bits(rank, world):
    """bfloat16 weights have float32 global weights."""
    del world
    model = network(dtype=torch.bfloat16)
    optimizer = sgd(model)
    outer = DiLoCo(model, optimizer, 2)
    train(model, optimizer, rank, 8)
    globals_alike(outer)
    assert digest(model.parameters()) == digest([each.bfloat16() for each in outer.global_weights().values()])
    outer.detach()


def not_finite(rank, world):
    """All ranks skip, or raise."""
    del world
    for how in ("skip", "raise"):
        for codec in ("fp32", "int4", "topk/0.02+ef"):
            model = network()
            optimizer = sgd(model)
            outer = DiLoCo(model, optimizer, 2, codec, on_nan=how)
            train(model, optimizer, rank, 3)
            if rank == 1:
                model[0].weight.data[3, 5] = torch.nan
            raised = 0
            try:
                train(model, optimizer, rank, 1, 3)
            except NotFiniteError:
                raised = 1
            alike((raised, outer.rounds, outer.stats()["skipped"]))
            assert (raised, outer.stats()["skipped"]) == (how == "raise", 1)
            globals_alike(outer)
            outer.detach()


def disagree(rank, world):
    """The same error on every rank, and the group stays usable."""
    del world
    model = network()
    said = ""
    try:
        DiLoCo(model, sgd(model), every=4 + (rank == 1))
    except Disagreement as error:
        said = str(error)
    assert "every 4" in said, said
    assert "every 5" in said, said
    alike(said)


def regrouped(rank, world):
    """The last rank leaves, and joins again as a new one."""
    fewer, everybody = dist.new_group([*range(world - 1)]), dist.new_group([*range(world)])
    model, optimizer, outer = made("all")
    train(model, optimizer, rank, 13)
    outer.hand_over()
    if rank < world - 1:
        outer.regroup(fewer)
        train(model, optimizer, rank, 6, 13)
        outer.finish()
        outer.regroup(everybody)
    else:
        outer.detach()
        model, optimizer, outer = made("all", seed=9, group=everybody)
    assert outer.step == 19
    globals_alike(outer)
    train(model, optimizer, rank, 12, 19)
    outer.sync()
    globals_alike(outer)
    alike(digest(model.parameters()))


def killed(rank, world):
    """The last rank dies: all others raise an error within the time-out and 3 s, and keep their weights."""
    model, optimizer, outer = made("int4")
    train(model, optimizer, rank, 9)
    if rank == world - 1:
        os.kill(os.getpid(), signal.SIGKILL)
    began, said = time.monotonic(), ""
    try:
        train(model, optimizer, rank, 12, 9)
    except CommError as error:
        said = str(error)
    assert said, "no error"
    assert time.monotonic() - began < SHORT_S + 3
    assert outer.rounds == 2
    outer.detach()
    train(model, optimizer, rank, 4)
    assert all(bool(each.isfinite().all()) for each in model.parameters())


CHECKS = (kinds, as_torch, resumed, sixteen_bits, not_finite, disagree, regrouped)


def main(names):
    if names == ["killed"]:
        rank, world = join(SHORT_S)
        run(killed, "killed", rank, world)
        os._exit(0)
    run_all(CHECKS, names, *join(TIMEOUT_S))


if __name__ == "__main__":
    main(sys.argv[1:])
