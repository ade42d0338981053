"""low_rank against an independent PowerSGD in NumPy, float64, and torch's own orthogonalisation."""

import itertools
import math

import numpy as np
import pytest
import torch
from torch.distributed.algorithms.ddp_comm_hooks import powerSGD_hook

from thinwire import Channel
from thinwire.runtimes import local
from thinwire.runtimes.trace import trace
from thinwire.schedules.low_rank import cholesky_qr, drawn


def gauss(*shape, seed=0):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def orthonormal(p):
    """Gram and Schmidt, column by column, as the paper does."""
    p = p.copy()
    for i in range(p.shape[1]):
        p[:, i] /= np.linalg.norm(p[:, i])
        for j in range(i + 1, p.shape[1]):
            p[:, j] -= (p[:, i] @ p[:, j]) * p[:, i]
    return p


class PowerSGD:
    """Algorithm 1 of Vogels et al. with warm start: a list of matrices in, their approximate mean out."""

    def __init__(self, q, world, *, feedback):
        self.q, self.feedback = q, feedback
        self.errors = [0.0] * world

    def step(self, gradients):
        world = len(gradients)
        inputs = [np.asarray(g, np.float64) + e for g, e in zip(gradients, self.errors, strict=True)]
        p = orthonormal(sum(m @ self.q for m in inputs) / world)
        self.q = sum(m.T @ p for m in inputs) / world
        approximation = p @ self.q.T
        if self.feedback:
            self.errors = [m - approximation for m in inputs]
        return approximation


def run(ranks, kept, op="avg", rank=2, **options):
    results = [x.clone() for x in ranks]
    local.all_reduce(results, kept, op, f"low_rank/{rank}", **options)
    for x in results:
        assert torch.equal(x.nan_to_num(7.0), results[0].nan_to_num(7.0))
        assert torch.equal(x.isnan(), results[0].isnan())
    return results[0]


@pytest.mark.parametrize("feedback", [False, True])
@pytest.mark.parametrize(("shape", "rank"), [((20, 30), 2), ((40, 9), 1), ((16, 3, 5), 4), ((64, 64), 8)])
def test_steps_are_those_of_the_paper(shape, rank, feedback):
    world = 3
    q = gauss(math.prod(shape[1:]), rank, seed=99)
    oracle = PowerSGD(q.double().numpy(), world, feedback=feedback)
    kept = [Channel("fp32+ef" if feedback else "fp32") for _ in range(world)]
    for channel in kept:  # as if a step before had ended there
        channel.residuals["tensor/q"], channel.shapes["tensor/q"] = q.clone(), tuple(q.shape)
    for step in range(6):
        ranks = [gauss(*shape, seed=10 * step + i) for i in range(world)]
        expected = oracle.step([x.view(shape[0], -1).numpy() for x in ranks])
        mean = run(ranks, kept, rank=rank)
        np.testing.assert_allclose(mean.view(shape[0], -1).numpy(), expected, rtol=0, atol=2e-4)
        if feedback:
            for channel, error in zip(kept, oracle.errors, strict=True):
                np.testing.assert_allclose(channel.residuals["tensor/error"].numpy(), error, atol=5e-4)


def test_a_matrix_that_joins_later_does_not_set_another_back():
    """Its own start is drawn; the other goes on from where its last step ended."""
    alone, joined = ([Channel("fp32+ef") for _ in range(2)] for _ in range(2))
    steps = [[gauss(20, 30, seed=10 * step + i) for i in range(2)] for step in range(2)]
    for kept in (alone, joined):
        run(steps[0], kept, name="first")
    expected = run(steps[1], alone, name="first")
    buckets = [[x.clone(), gauss(12, 18, seed=i)] for i, x in enumerate(steps[1])]
    local.all_reduce(buckets, joined, "avg", "low_rank/2", name=["first", "second"])
    assert torch.equal(buckets[0][0], expected)


@pytest.mark.parametrize("rank", [1, 2, 5])
def test_torch_makes_the_same_columns_orthonormal(rank):
    """Its hook's Gram-Schmidt spans what QR does, so P P' is the same."""
    p = gauss(40, rank)
    theirs = p.clone()
    powerSGD_hook._orthogonalize_gram_schmidt(theirs[None])
    ours = torch.linalg.qr(p).Q
    torch.testing.assert_close(ours @ ours.T, theirs @ theirs.T, rtol=0, atol=1e-5)


@pytest.mark.parametrize("true_rank", [0, 1, 3, 4])
def test_cholesky_spans_what_qr_does(true_rank):
    """All matrices in one go, whatever their heights; columns that depend on others are replaced."""
    heights = (40, 700, 9)
    ps = [gauss(height, 4, seed=height) for height in heights]
    ps = [p[:, :true_rank] @ gauss(true_rank, 4, seed=5) if true_rank < 4 else p for p in ps]
    bases = [p.clone() for p in ps]
    cholesky_qr(bases)
    for p, q in zip(ps, bases, strict=True):
        assert bool(q.isfinite().all())
        torch.testing.assert_close(q @ (q.T @ p), p, rtol=0, atol=2e-5 * float(p.norm() + 1))
        if true_rank:
            torch.testing.assert_close(q.T @ q, torch.eye(4), rtol=0, atol=1e-5)


def test_the_approximation_and_the_errors_are_what_came_in():
    world, kept = 4, [Channel("fp32+ef") for _ in range(4)]
    residual = torch.zeros(30, 50, dtype=torch.float64)
    for step in range(5):
        ranks = [gauss(30, 50, seed=10 * step + i) for i in range(world)]
        given = sum(x.double() for x in ranks) / world + residual
        mean = run(ranks, kept)
        residual = sum(channel.residuals["tensor/error"].double() for channel in kept) / world
        torch.testing.assert_close(mean.double() + residual, given, rtol=0, atol=1e-5)


@pytest.mark.parametrize("true_rank", [0, 1, 2])
@pytest.mark.parametrize("op", ["sum", "avg"])
def test_a_matrix_of_low_rank_is_reproduced(true_rank, op):
    world, left = 3, gauss(40, true_rank, seed=1)
    ranks = [left @ gauss(true_rank, 60, seed=2 + i) for i in range(world)]
    exact = sum(x.double() for x in ranks) / (world if op == "avg" else 1)
    for _ in range(3):
        product = run(ranks, [Channel("fp32")] * world, op)
        torch.testing.assert_close(product.double(), exact, rtol=0, atol=2e-5)


def test_the_warm_start_improves_from_step_to_step():
    """On the same matrix, power iteration comes to the best approximation there is."""
    x = gauss(60, 80) @ torch.diag(0.9 ** torch.arange(80))
    best = float(torch.linalg.svdvals(x)[4:].norm())
    kept, errors = [Channel("fp32") for _ in range(2)], []
    for _ in range(30):
        errors.append(float((run([x, x], kept, rank=4) - x).norm()))
    assert errors[0] > 1.05 * best
    assert errors[-1] < 1.01 * best
    assert all(later <= earlier * 1.0001 for earlier, later in itertools.pairwise(errors))


def test_with_feedback_the_mean_over_steps_is_the_gradient():
    ranks = [gauss(20, 30, seed=i) for i in range(3)]
    exact = sum(x.double() for x in ranks) / 3
    off = {}
    for spec in ("fp32", "fp32+ef"):
        kept = [Channel(spec) for _ in ranks]
        mean = sum(run(ranks, kept).double() for _ in range(100)) / 100
        off[spec] = float((mean - exact).norm() / exact.norm())
    assert off["fp32"] > 0.5
    assert off["fp32+ef"] < 0.15


@pytest.mark.parametrize("shape", [(100,), (1, 50), (50, 1), (3, 4), (0, 5), (7, 0)])
def test_vectors_and_small_matrices_go_uncompressed(shape):
    ranks = [gauss(*shape, seed=i) for i in range(3)]
    kept = [Channel("fp32+ef") for _ in ranks]
    assert torch.equal(run(ranks, kept, "sum"), ranks[0] + ranks[1] + ranks[2])
    assert not kept[0].residuals


@pytest.mark.parametrize("spec", ["fp32", "bf16", "fp16", "fp32+ef", "bf16+ef"])
@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_what_is_not_finite_is_seen_by_all_and_forgotten_afterwards(spec, bad):
    kept = [Channel(spec) for _ in range(3)]
    for step in range(3):
        ranks = [gauss(20, 30, seed=10 * step + i) for i in range(3)]
        if step == 1:
            ranks[1][2, 3] = bad
        mean = run(ranks, kept)
        assert bool(mean.isfinite().all()) == (step != 1)
        assert step != 1 or not bool(mean[2, 3].isfinite())


@pytest.mark.parametrize("spec", ["bf16", "fp16"])
def test_sixteen_bits_on_the_network_cost_little(spec):
    ranks = [gauss(20, 30, seed=i) for i in range(3)]
    one, other = (run(ranks, [Channel(each) for _ in ranks]) for each in ("fp32", spec))
    assert 0 < float((one - other).norm() / one.norm()) < 0.02


def test_a_bucket_is_one_call_for_each_tensor():
    shapes, names = ((20, 30), (7,), (16, 3, 5)), ["a", "b", "c"]
    ranks = [[gauss(*shape, seed=10 * i + j) for j, shape in enumerate(shapes)] for i in range(3)]
    results = [[x.clone() for x in each] for each in ranks]
    local.all_reduce(results, [Channel("fp32+ef") for _ in ranks], "avg", "low_rank/2", name=names)
    for j, name in enumerate(names):
        alone = run([each[j] for each in ranks], [Channel("fp32+ef") for _ in ranks], name=name)
        assert torch.equal(alone, results[0][j])


def test_tensors_of_other_names_start_elsewhere():
    one, same, other = (drawn(3000, 2, name, torch.device("cpu")) for name in ("a", "a", "b"))
    assert torch.equal(one, same)
    assert not torch.equal(one, other)
    assert abs(float(one.mean())) < 0.05
    assert abs(float(one.std()) - 1) < 0.05


def test_a_vector_is_traced_as_a_plain_sum():
    assert trace(1000, "fp32", 4, "low_rank/2").sent_nbytes == trace(1000, "fp32", 4, "native").sent_nbytes
