"""DeMo beside a plain implementation of the published algorithm."""

import math
import os

import torch
from outer_optimizer_tools import (
    SHAPES,
    alike,
    away,
    give,
    gradient,
    random,
    resumes,
    run,
    same,
    trains,
    weights,
)
from start_program import digest, raises
from torch import nn

from thinwire import Policy, codecs
from thinwire.errors import Disagreement, InputError
from thinwire.outer import DeMo
from thinwire.policy import Rule

ALL = Policy("all", (Rule("dct/16:5"),))


def largest_divisor(n, most):
    return max(d for d in range(1, min(n, most) + 1) if n % d == 0)


def cosines(n):
    """The orthonormal DCT-II."""
    k = torch.arange(n, dtype=torch.float64)
    basis = math.sqrt(2 / n) * torch.cos(math.pi / n * (k + 0.5)[None] * k[:, None])
    basis[0] = math.sqrt(1 / n)
    return basis


def sent_of(delta, chunk, k):
    """What a rank sends of a matrix or of a vector: cosines, which of them, and how to decode them."""
    shape = delta.shape
    if len(shape) == 1:
        h, w = 1, chunk
        padded = nn.functional.pad(delta, (0, -len(delta) % chunk)).view(1, -1)
    else:
        h, w = (largest_divisor(n, chunk) for n in (shape[0], math.prod(shape[1:])))
        padded = delta.view(shape[0], -1)
    tiles = padded.view(padded.shape[0] // h, h, padded.shape[1] // w, w).transpose(1, 2)
    there = (cosines(h) @ tiles @ cosines(w).T).flatten(2)
    keep = there.abs().topk(min(k, h * w), dim=-1).indices
    kept = torch.zeros_like(there).scatter(2, keep, there.gather(2, keep))
    places = torch.zeros_like(there).scatter(2, keep, 1.0)

    def decoded(cosine):
        back = (cosines(h).T @ cosine.view(tiles.shape) @ cosines(w)).transpose(1, 2).reshape(padded.shape)
        return back.flatten()[: delta.numel()].view(shape)

    return kept, places, decoded


def published(world, steps, lr, decay, weight_decay, chunk, k, sign, mean, exact=()):
    """DeMo of all ranks, in one process and in float64."""
    xs = [p.detach().double() for p in weights()]
    deltas = [[torch.zeros_like(x) for x in xs] for _ in range(world)]
    for step in range(steps):
        for i, x in enumerate(xs):
            sums, counts = [], []
            for rank in range(world):
                delta = deltas[rank][i]
                delta.mul_(decay).add_(gradient(rank, step, i, tuple(x.shape)).double(), alpha=lr)
                kept, places, decoded = sent_of(delta, chunk, k)
                if i in exact:
                    kept, places, decoded = delta.clone(), torch.ones_like(delta), torch.clone
                delta -= decoded(kept)
                sums.append(kept)
                counts.append(places)
            divisor = sum(counts).clamp(min=1.0) if mean == "senders" else world
            total = decoded(sum(sums) / divisor)
            x.mul_(1 - lr * weight_decay).sub_(lr * total.sign() if sign else total)
    return xs, deltas


def the_published_algorithm(rank, world):
    """Every tensor in cosines, with and without sign; then vectors and small tensors whole."""
    cases = (
        (False, "senders", ALL, ()),
        (True, "senders", ALL, ()),
        (True, "ranks", ALL, ()),
        (False, "ranks", "dct/16:5", (1, 3)),
    )
    for sign, mean, codec, exact in cases:
        params = weights()
        options = {
            "lr": 0.02,
            "decay": 0.9,
            "weight_decay": 0.1,
            "sign": sign,
            "mean": mean,
            "min_numel": 100,
        }
        optimizer = DeMo(params, codec=codec, **options)
        run(optimizer, params, rank, 8)
        del options["min_numel"]
        expected, deltas = published(world, 8, chunk=16, k=5, exact=exact, **options)
        assert away(params, expected) < 1e-5, (sign, mean, codec)
        for i, _ in enumerate(SHAPES):
            residual = [x for slot, x in optimizer.mean.residuals() if slot.startswith(f"parameter{i}/")]
            assert bool(residual) == (i not in exact)
            if residual:
                flat = deltas[rank][i].flatten()
                assert away([residual[0].flatten()], [flat]) < 1e-5
        alike(params)
    return params


def bytes_are_those_of_the_wires(rank, world):
    params = weights()
    optimizer = DeMo(params, lr=0.1, min_numel=100)
    run(optimizer, params, rank, 3)
    codec = codecs.get("dct/64:32")
    wires = [codec.for_shape(s).nbytes(math.prod(s)) if len(s) == 2 and s != (7, 5) else 4 * math.prod(s)
             for s in SHAPES]  # fmt: skip
    assert optimizer.sent_nbytes == 3 * (world - 1) * sum(wires), (optimizer.sent_nbytes, wires)
    return params


def a_loaded_run_continues_bit_by_bit(rank, world):
    del world
    params = resumes(lambda given: DeMo(given, lr=0.02, decay=0.9, min_numel=100, weight_decay=0.01), rank)
    alike(params)
    return params


def bfloat16_keeps_float32_momentum(rank, world):
    del world
    params = weights(dtype=torch.bfloat16)
    optimizer = DeMo(params, lr=0.02, min_numel=100)
    run(optimizer, params, rank, 4)
    assert {p.dtype for p in params} == {torch.bfloat16}
    assert {x.dtype for _, x in optimizer.mean.residuals()} == {torch.float32}
    alike(params)
    return params


def nan_reaches_all_ranks(rank, world):
    params = weights()
    optimizer = DeMo(params, lr=0.02, min_numel=100)
    run(optimizer, params, rank, 2)
    give(params, rank, 2)
    if rank == world - 1:
        params[0].grad[3, 4], params[3].grad[0, 0] = torch.nan, torch.inf
    optimizer.step()
    assert params[0].isnan().sum() == 64 * 48, params[0].isnan().sum()
    assert params[3].isnan().sum() == 1
    assert not params[2].isnan().any()
    alike(params)
    return params


def a_missing_gradient_counts_as_zeros(rank, world):
    def make():
        params = weights()
        return params, DeMo(params, lr=0.02, min_numel=100)

    params, optimizer = make()
    others, other = make()
    for step in range(3):
        give(params, rank, step)
        give(others, rank, step)
        if rank == 0:
            params[0].grad, others[0].grad = None, torch.zeros_like(others[0])
        optimizer.step()
        other.step()
    assert digest(params) == digest(others)
    alike(params)
    del world
    return params


def ranks_that_disagree_all_raise(rank, world):
    """Before anything changes; and the group stays usable."""
    del world
    cases = (
        ({"codec": "dct/64:8" if rank else "dct/64:16"}, "dct/64:8~senders+ef"),
        ({"mean": "ranks" if rank else "senders"}, "dct/64:32~ranks+ef"),
        ({"decay": 0.9 if rank else 0.99}, "decay 0.9"),
        ({"lr": 0.1 if rank else 0.2}, "lr 0.1"),
        ({"sign": bool(rank)}, "sign False"),
        ({"min_numel": 100 if rank else 0}, "step of DeMo"),
    )
    for options, text in cases:
        params = weights()
        optimizer = DeMo(params, **{"min_numel": 100, **options})
        give(params, rank, 0)
        raises(Disagreement, text, optimizer.step)
        assert digest(params) == digest(weights()), "a refused step changed weights"
    params = weights()
    optimizer = DeMo(params, lr=0.02)
    run(optimizer, params, rank, 1)
    alike(params)
    return params


def a_learning_rate_that_differs_later_is_found_in_debug_mode(rank, world):
    del world
    params = weights()
    optimizer = DeMo(params, lr=0.02)
    run(optimizer, params, rank, 2)
    before = digest(params)
    optimizer.param_groups[0]["lr"] = 0.01 + 0.01 * rank
    os.environ["THINWIRE_DEBUG"] = "1"
    try:
        give(params, rank, 2)
        raises(Disagreement, ["lr 0.01", "step 2"], optimizer.step)
    finally:
        del os.environ["THINWIRE_DEBUG"]
    assert digest(params) == before
    return params


def weights_and_gradients_are_compared_at_the_start(rank, world):
    params = weights()
    with torch.no_grad():
        params[1][5] += 1e-6 * (rank == world - 1)
    optimizer = DeMo(params)
    give(params, rank, 0)
    raises(
        Disagreement, ["weights of rank 0", f"rank {world - 1} differ", "torch.manual_seed"], optimizer.step
    )
    params = weights()
    optimizer = DeMo(params)
    give(params, 0, 0)
    raises(InputError, "no_sync()", optimizer.step)
    optimizer = DeMo(params, check_start=False)
    optimizer.step()
    alike(params)
    return params


def a_state_that_does_not_fit_changes_nothing(rank, world):
    params = weights()
    optimizer = DeMo(params, lr=0.02, min_numel=100)
    run(optimizer, params, rank, 2)
    good = optimizer.state_dict()
    own = good["thinwire"]
    wrong = (
        ({"state": {}, "param_groups": good["param_groups"]}, "no state of thinwire's DeMo"),
        ({**good, "thinwire": {**own, "optimizer": "OneBitAdam"}}, "of OneBitAdam"),
        ({**good, "thinwire": {**own, "world": world + 1}}, f"of rank {rank} of {world + 1}"),
        ({**good, "thinwire": {**own, "steps": -1}}, "steps is -1"),
        ({**good, "thinwire": {**own, "routes": {}}}, "other tensors or codecs"),
        (DeMo(weights(), codec="dct/64:8", min_numel=100).state_dict(), "other tensors or codecs"),
    )
    before = optimizer.state_dict()
    for state, text in wrong:
        raises(InputError, text, optimizer.load_state_dict, state)
    channels = {codec: dict(each, residuals={}) for codec, each in own["channels"].items()}
    raises(
        InputError, "damaged", optimizer.load_state_dict, {**good, "thinwire": {**own, "channels": channels}}
    )
    after = optimizer.state_dict()
    assert same(before, after)
    run(optimizer, params, rank, 1, 2)
    alike(params)
    return params


def digits_are_learned(rank, world):
    accuracy, optimizer = trains(lambda p: DeMo(p, lr=2e-3, min_numel=0), rank, world)
    assert accuracy > 0.9, accuracy
    fewer = 4 * sum(p.numel() for g in optimizer.param_groups for p in g["params"]) * optimizer.steps
    assert optimizer.sent_nbytes < (world - 1) * fewer / 4
    return [torch.tensor(accuracy)]


def frozen_parameters_are_left_alone(rank, world):
    del world
    params = weights()
    params[0].requires_grad_(False)
    optimizer = DeMo([(f"layer.{i}", p) for i, p in enumerate(params)], lr=0.02, weight_decay=0.1)
    for step in range(3):
        for i, p in enumerate(params[1:], 1):
            p.grad = gradient(rank, step, i, tuple(p.shape))
        if step == 2:
            params[0].requires_grad_(True)
            params[0].grad = random(*params[0].shape, seed=rank)
        optimizer.step()
        assert torch.equal(params[0], weights()[0]) == (step < 2)
    alike(params)
    return params


CHECKS = (
    the_published_algorithm,
    bytes_are_those_of_the_wires,
    a_loaded_run_continues_bit_by_bit,
    bfloat16_keeps_float32_momentum,
    nan_reaches_all_ranks,
    a_missing_gradient_counts_as_zeros,
    ranks_that_disagree_all_raise,
    a_learning_rate_that_differs_later_is_found_in_debug_mode,
    weights_and_gradients_are_compared_at_the_start,
    a_state_that_does_not_fit_changes_nothing,
    frozen_parameters_are_left_alone,
)
LEARNING = (digits_are_learned,)
