"""What NCCL ranks that share a GPU do with optimizers that communicate; see `nccl_program.py`.

    python outer_optimizer_program.py CHECK ...         started by a lab on every rank

Every rank prints a line of JSON for every check: what went wrong ("" if nothing), and the time it took.
"""

import copy
import hashlib
import sys

import torch
import torch.distributed as dist
from ranks import join, run_all
from torch import nn

from thinwire.outer import DeMo, LoCo, OneBitAdam, ZeroOneAdam

TIMEOUT_S = 120
DEVICE = torch.device("cuda", 0)
SHAPES = ((256, 192), (130,), (300, 64), (7, 5))
MAKE = {
    "demo": lambda given: DeMo(given, lr=0.02, min_numel=100, weight_decay=0.01),
    "one_bit_adam": lambda given: OneBitAdam(given, lr=0.02, warmup_steps=3, min_numel=100),
    "zero_one_adam": lambda given: ZeroOneAdam(
        given,
        var_freeze_step=4,
        var_update_scaler=2,
        local_step_scaler=4,
        local_step_clipper=2,
        min_numel=100,
    ),
    "loco": lambda given: LoCo(torch.optim.AdamW(given, lr=0.02), min_numel=100, reset_every=4),
}


def random(*shape, seed=0):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(DEVICE)


def weights(dtype=torch.float32):
    return [nn.Parameter(random(*shape, seed=i).to(dtype)) for i, shape in enumerate(SHAPES)]


def gradient(rank, step, i, shape):
    return 0.1 * random(*shape, seed=1000 * step + 10 * i + rank) + 0.3 * random(*shape, seed=7 * step + i)


def give(params, rank, step):
    for i, p in enumerate(params):
        p.grad = gradient(rank, step, i, tuple(p.shape)).to(p.dtype)


def run(optimizer, params, rank, steps, first=0):
    for step in range(first, first + steps):
        give(params, rank, step)
        optimizer.step()


def digest(tensors):
    hashed = hashlib.sha256()
    for x in tensors:
        hashed.update(x.detach().cpu().contiguous().view(-1).view(torch.uint8).numpy().tobytes())
    return hashed.hexdigest()


def alike(tensors, what):
    everyone = [None] * dist.get_world_size()
    dist.all_gather_object(everyone, digest(tensors))
    assert len(set(everyone)) == 1, f"{what}: ranks hold different bits"


def replicas_are_equal(rank, world):
    """In float32 and bfloat16; enough steps that calls are recorded and replayed."""
    del world
    for name, make in MAKE.items():
        for dtype in (torch.float32, torch.bfloat16):
            params = weights(dtype)
            optimizer = make(params)
            run(optimizer, params, rank, 16)
            if isinstance(optimizer, ZeroOneAdam):
                optimizer.synchronize()
            alike(params, f"{name} {dtype}")
            assert all(bool(p.isfinite().all()) for p in params), name
            assert optimizer.sent_nbytes > 0


def the_warm_up_is_torchs_adam(rank, world):
    params, others = weights(), weights()
    run(OneBitAdam(params, lr=0.02, warmup_steps=99), params, rank, 5)
    other = torch.optim.Adam(others, lr=0.02, foreach=False)
    for step in range(5):
        for i, p in enumerate(others):
            p.grad = sum(gradient(r, step, i, SHAPES[i]) for r in range(world)) / world
        other.step()
    for a, b in zip(params, others, strict=True):
        assert float((a - b).norm() / b.norm()) < 1e-5


def a_loaded_run_continues(rank, world):
    del world
    for name, make in MAKE.items():
        params = weights()
        optimizer = make(params)
        run(optimizer, params, rank, 6)
        others = [nn.Parameter(p.detach().clone()) for p in params]
        again = make(others)
        again.load_state_dict(copy.deepcopy(optimizer.state_dict()))
        run(optimizer, params, rank, 4, 6)
        run(again, others, rank, 4, 6)
        assert digest(params) == digest(others), name


def the_host_waits_for_nothing(rank, world):
    """A step like those before has no synchronisation of the host with the GPU."""
    del world
    for name in ("demo", "one_bit_adam"):
        params = weights()
        optimizer = MAKE[name](params)
        run(optimizer, params, rank, 8)
        torch.cuda.synchronize()
        torch.cuda.set_sync_debug_mode("error")
        try:
            optimizer.step()
        finally:
            torch.cuda.set_sync_debug_mode("default")
        torch.cuda.synchronize()
        alike(params, name)


def nan_reaches_all_ranks(rank, world):
    for name in ("demo", "one_bit_adam"):
        params = weights()
        optimizer = MAKE[name](params)
        run(optimizer, params, rank, 5)
        give(params, rank, 5)
        if rank == world - 1:
            params[0].grad[3, 4] = torch.nan
        optimizer.step()
        assert bool(params[0].isnan().any()), name
        assert not bool(params[2].isnan().any()), name
        alike(params, name)


CHECKS = (
    replicas_are_equal,
    the_warm_up_is_torchs_adam,
    a_loaded_run_continues,
    the_host_waits_for_nothing,
    nan_reaches_all_ranks,
)


if __name__ == "__main__":
    run_all(CHECKS, sys.argv[1:], *join(TIMEOUT_S))
