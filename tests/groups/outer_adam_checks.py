"""1-bit Adam and 0/1 Adam beside torch's Adam and plain implementations."""

import torch
from outer_optimizer_tools import (
    SHAPES,
    alike,
    away,
    give,
    gradient,
    resumes,
    run,
    same,
    saved,
    trains,
    weights,
)
from start_program import digest, raises
from torch import nn

from thinwire import codecs
from thinwire.errors import Disagreement, InputError
from thinwire.outer import OneBitAdam, ZeroOneAdam

BLOCK, EXACT = 64, (1, 3)  #: elements of a block; tensors that are sent in float32
CODEC = {"codec": f"onebit/{BLOCK}+ef", "min_numel": 100}
LR, BETAS, EPS, DECAY = 0.02, (0.8, 0.95), 1e-6, 0.1


def one_bit(u):
    """The mean of a block's elements of the same sign."""
    blocks = nn.functional.pad(u.flatten(), (0, -u.numel() % BLOCK), value=torch.nan).view(-1, BLOCK)
    high = torch.where(blocks >= 0, blocks, torch.nan).nanmean(1, keepdim=True)
    low = torch.where(blocks < 0, blocks, torch.nan).nanmean(1, keepdim=True)
    return torch.where(blocks >= 0, high, low).flatten()[: u.numel()].view(u.shape)


class Mean:
    """Of all ranks, by one bit with a residual of every rank, and one of what owners send."""

    def __init__(self, world, x):
        self.sent, self.owned = [torch.zeros_like(x) for _ in range(world)], torch.zeros_like(x)

    def __call__(self, xs):
        total = torch.zeros_like(self.owned)
        for rank, x in enumerate(xs):
            u = x + self.sent[rank]
            total += one_bit(u) / len(xs)
            self.sent[rank] = u - one_bit(u)
        u = total + self.owned
        self.owned = u - one_bit(u)
        return one_bit(u)


def gradients(world, step, i):
    return [gradient(rank, step, i, SHAPES[i]).double() for rank in range(world)]


def expected_one_bit(world, steps, warmup):
    xs = [p.detach().double() for p in weights()]
    for i, x in enumerate(xs):
        m, v, mean = torch.zeros_like(x), torch.zeros_like(x), Mean(world, x)
        for step in range(1, steps + 1):
            gs = gradients(world, step - 1, i)
            ms = [BETAS[0] * m + (1 - BETAS[0]) * g for g in gs]
            exact = step <= warmup or i in EXACT
            m = sum(ms) / world if exact else mean(ms)
            if step <= warmup:
                v = BETAS[1] * v + (1 - BETAS[1]) * (sum(gs) / world) ** 2
            root = (v / (1 - BETAS[1] ** min(step, warmup))).sqrt() + EPS
            x *= 1 - LR * DECAY
            x -= LR / (1 - BETAS[0] ** step) * m / root
    return xs


def one_bit_adam(given, **options):
    options = {
        "lr": LR,
        "betas": BETAS,
        "eps": EPS,
        "weight_decay": DECAY,
        "warmup_steps": 4,
        **CODEC,
        **options,
    }
    return OneBitAdam(given, **options)


def zero_one_adam(given, **options):
    usual = {"lr": LR, "betas": BETAS, "eps": EPS, "weight_decay": DECAY, **CODEC}
    intervals = {
        "var_freeze_step": 8, "var_update_scaler": 2, "local_step_scaler": 4, "local_step_clipper": 4,
    }  # fmt: skip
    return ZeroOneAdam(given, **{**usual, **intervals, **options})


def the_warm_up_is_torchs_adam(rank, world):
    """With two ranks bit by bit: there the order of sums is the same."""
    for decay, theirs in ((0.0, torch.optim.Adam), (0.1, torch.optim.AdamW)):
        for make in (
            lambda given, decay=decay: one_bit_adam(given, weight_decay=decay, warmup_steps=99),
            lambda given, decay=decay: zero_one_adam(
                given, weight_decay=decay, var_freeze_step=99, var_update_scaler=99
            ),
        ):
            params, others = weights(), weights()
            run(make(params), params, rank, 6)
            other = theirs(others, lr=LR, betas=BETAS, eps=EPS, weight_decay=decay)
            for step in range(6):
                for i, p in enumerate(others):
                    gs = [gradient(r, step, i, SHAPES[i]) for r in range(world)]
                    p.grad = sum(gs[1:], gs[0]) * (1.0 / world)
                other.step()
            assert away(params, others) < 1e-6
            assert world > 2 or digest(params) == digest(others), away(params, others)
            alike(params)
    return params


def one_bit_adam_is_the_published_one(rank, world):
    params = weights()
    run(one_bit_adam(params), params, rank, 10)
    expected = expected_one_bit(world, 10, 4)
    assert away(params, expected) < 1e-5, away(params, expected)
    alike(params)
    return params


def expected_zero_one(world, steps, variance_steps, syncs):
    xs = [p.detach().double() for p in weights()]
    for i, start in enumerate(xs):
        ms, v, mean = [torch.zeros_like(start)] * world, torch.zeros_like(start), Mean(world, start)
        locals_, us, updates, sizes, decay = [start.clone() for _ in range(world)], None, 0, 0.0, 1.0
        for step in range(1, steps + 1):
            gs, size = gradients(world, step - 1, i), LR / (1 - BETAS[0] ** step)
            if step in variance_steps:
                g = sum(gs) / world
                updates, v = updates + 1, BETAS[1] * v + (1 - BETAS[1]) * g**2
                gs = [g] * world
            root = (v / (1 - BETAS[1] ** updates)).sqrt() + EPS
            ms = [BETAS[0] * m + (1 - BETAS[0]) * g for m, g in zip(ms, gs, strict=True)]
            us = [size * m + (us[r] if us else 0) for r, m in enumerate(ms)]
            sizes, decay = sizes + size, decay * (1 - LR * DECAY)
            steps_ = [m / root for m in ms]
            locals_ = [(1 - LR * DECAY) * x - size * s for x, s in zip(locals_, steps_, strict=True)]
            if step in syncs or step in variance_steps:
                each = [u / sizes for u in us]
                m = each[0] if step in variance_steps else sum(each) / world if i in EXACT else mean(each)
                start = decay * start - sizes * m / root
                ms, locals_ = [m] * world, [start.clone() for _ in range(world)]
                us, sizes, decay = None, 0.0, 1.0
        xs[i] = locals_
    return xs


def zero_one_adam_is_the_published_one(rank, world):
    """Variance steps at 1, 2, 4, 6 (two of each interval); syncs at each step to 8, then further apart."""
    params = weights()
    optimizer = zero_one_adam(params)
    variance_steps, syncs, sent = {1, 2, 4, 6}, {3, 5, 7, 8, 9, 10, 11, 12, 14, 16, 20}, []
    for step in range(1, 20):
        before = optimizer.sent_nbytes
        run(optimizer, params, rank, 1, step - 1)
        if optimizer.sent_nbytes > before:
            sent.append(step)
        assert optimizer.in_sync == (step in syncs | variance_steps), step
        if optimizer.in_sync:
            alike(params, f"step {step}")
        expected = [x[rank] for x in expected_zero_one(world, step, variance_steps, syncs)]
        assert away(params, expected) < 1e-4, (step, away(params, expected))
    assert sent == sorted(each for each in syncs | variance_steps if each < 20)
    optimizer.synchronize()
    optimizer.synchronize()
    alike(params, "synchronize")
    return params


def all_intervals_one_is_one_bit_at_each_step(rank, world):
    """Of syncs: no local steps, whatever the step; with a variance of step 1 alone."""
    params = weights()
    optimizer = zero_one_adam(params, var_freeze_step=1, local_step_clipper=1)
    assert "anchor" not in (optimizer.kept or ())
    run(optimizer, params, rank, 9)
    expected = [x[rank] for x in expected_zero_one(world, 9, {1}, set(range(10)))]
    assert away(params, expected) < 1e-4, away(params, expected)
    alike(params)
    return params


def loaded_runs_continue_bit_by_bit(rank, world):
    params = resumes(one_bit_adam, rank, before=2)
    params += resumes(one_bit_adam, rank, before=6)
    for before in (3, 13):  # 13: between two syncs
        resumes(zero_one_adam, rank, before, after=12)
    alike(params)
    del world
    return params


def bfloat16_keeps_float32_state(rank, world):
    del world
    for make in (one_bit_adam, lambda given: zero_one_adam(given, local_step_clipper=1)):
        params = weights(dtype=torch.bfloat16)
        optimizer = make(params)
        run(optimizer, params, rank, 7)
        state = saved(optimizer.state_dict())
        assert {x.dtype for kept in state["state"].values() for x in kept.values()} == {torch.float32}
        assert {p.dtype for p in params} == {torch.bfloat16}
        others = [nn.Parameter(p.detach().clone()) for p in params]
        again = make(others)
        again.load_state_dict(state)
        assert same(again.state_dict(), optimizer.state_dict())
        run(optimizer, params, rank, 2, 7)
        run(again, others, rank, 2, 7)
        assert digest(params) == digest(others)
        alike(params)
    return params


def elements_without_variance_stay(rank, world):
    """One bit gives them a momentum; without a variance, a division would blow it up, in exact steps too."""
    del world
    for make in (one_bit_adam, zero_one_adam):
        params = weights()
        optimizer = make(params, weight_decay=0.0)
        for step in range(16):
            give(params, rank, step)
            params[0].grad[5:9] = 0.0
            optimizer.step()
        assert torch.equal(params[0][5:9], weights()[0][5:9])
        assert away(params, weights()) < 1.0
        alike(params)
    return params


def nan_reaches_every_rank(rank, world):
    for when in (1, 6):
        params = weights()
        optimizer = one_bit_adam(params)
        run(optimizer, params, rank, when)
        give(params, rank, when)
        if rank == world - 1:
            params[0].grad[3, 4] = torch.nan
        optimizer.step()
        assert bool(params[0].isnan().any())
        assert not bool(params[2].isnan().any())
        alike(params)
    return params


def bytes_of_each_phase(rank, world):
    """Those of the wires of two_shot; exact vectors take one_shot between two ranks."""
    params = weights()
    optimizer = one_bit_adam(params, warmup_steps=2)
    plain = codecs.get(CODEC["codec"])
    sizes = []
    for step in range(4):
        before = optimizer.sent_nbytes
        run(optimizer, params, rank, 1, step)
        sizes.append(optimizer.sent_nbytes - before)
    numels = [p.numel() for p in params]
    if world == 2:
        exact = 4 * sum(numels)
        half = sum(plain.nbytes(-(-numels[i] // (2 * BLOCK)) * BLOCK) for i in (0, 2))
        assert sizes == [exact, exact, *[2 * half + 4 * sum(numels[i] for i in EXACT)] * 2], sizes
    assert sizes[0] == sizes[1] > 5 * sizes[2] == 5 * sizes[3], sizes
    alike(params)
    return params


def ranks_that_disagree_raise(rank, world):
    del world
    cases = (
        (one_bit_adam, {"warmup_steps": 3 + rank}, "warmup_steps 3"),
        (one_bit_adam, {"betas": (0.9, 0.99 if rank else 0.9)}, "betas (0.9, 0.99)"),
        (one_bit_adam, {"codec": "int8" if rank else "int4"}, "int8/256+ef"),
        (zero_one_adam, {"local_step_scaler": 5 + rank}, "local_step_scaler 5"),
    )
    for make, options, text in cases:
        params = weights()
        optimizer = make(params, **options)
        give(params, rank, 0)
        raises(Disagreement, text, optimizer.step)
        assert digest(params) == digest(weights())
    params = weights()
    both = one_bit_adam(params) if rank else zero_one_adam(params)
    give(params, rank, 0)
    raises(Disagreement, ["step of OneBitAdam", "step of ZeroOneAdam"], both.step)
    run(one_bit_adam(params), params, rank, 1)
    return params


def damaged_states_change_nothing(rank, world):
    del world
    params = weights()
    optimizer = zero_one_adam(params)
    run(optimizer, params, rank, 13)
    before, good = optimizer.state_dict(), optimizer.state_dict()
    own = good["thinwire"]

    def kept(**changed):
        return {**good, "state": {**good["state"], 0: {**good["state"][0], **changed}}}

    wrong = (
        ({**good, "thinwire": {**own, "counters": {}}}, "counters"),
        ({**good, "thinwire": {**own, "more": [[0.1, float("nan")]]}}, "more"),
        ({**good, "thinwire": {**own, "more": [[0.1, 1.0]] * 2}}, "one row for each parameter group"),
        (kept(exp_avg=torch.zeros(3)), "exp_avg of parameter 0"),
        (kept(exp_avg=good["state"][0]["exp_avg"].bfloat16()), "exp_avg of parameter 0"),
        (kept(other=torch.zeros(3)), "the state of parameter 0 must have"),
        (zero_one_adam(weights(), codec="int8").state_dict(), "other tensors or codecs"),
        (one_bit_adam(weights()).state_dict(), "of OneBitAdam"),
    )
    for state, text in wrong:
        raises(InputError, text, optimizer.load_state_dict, state)
    assert same(before, optimizer.state_dict())
    run(optimizer, params, rank, 2, 13)
    optimizer.synchronize()
    alike(params)
    return params


def a_scheduler_from_zero(rank, world):
    """A learning rate of 0 in a whole interval of local steps."""
    del world
    params = weights()
    optimizer = zero_one_adam(params, weight_decay=0.0)
    for step in range(16):
        optimizer.param_groups[0]["lr"] = 0.0 if step > 11 else LR
        run(optimizer, params, rank, 1, step)
    assert optimizer.in_sync
    assert all(bool(p.isfinite().all()) for p in params)
    alike(params)
    return params


def groups_have_their_own_options(rank, world):
    params = weights()
    optimizer = one_bit_adam([{"params": params[:1], "lr": 0.0, "weight_decay": 0.0}, {"params": params[1:]}])
    run(optimizer, params, rank, 8)
    assert torch.equal(params[0], weights()[0])
    expected = expected_one_bit(world, 8, 4)
    assert away(params[1:], expected[1:]) < 1e-5
    alike(params)
    return params


def one_bit_adam_learns_digits(rank, world):
    accuracy, optimizer = trains(
        lambda p: OneBitAdam(p, lr=2e-3, warmup_steps=60, min_numel=1000), rank, world
    )
    assert accuracy > 0.9, accuracy
    del optimizer
    return [torch.tensor(accuracy)]


def zero_one_adam_learns_digits(rank, world):
    def make(params):
        return ZeroOneAdam(params, lr=2e-3, var_freeze_step=80, local_step_scaler=40, local_step_clipper=4,
                           min_numel=1000)  # fmt: skip

    accuracy, _ = trains(make, rank, world)
    assert accuracy > 0.9, accuracy
    return [torch.tensor(accuracy)]


CHECKS = (
    the_warm_up_is_torchs_adam,
    one_bit_adam_is_the_published_one,
    zero_one_adam_is_the_published_one,
    all_intervals_one_is_one_bit_at_each_step,
    loaded_runs_continue_bit_by_bit,
    bfloat16_keeps_float32_state,
    elements_without_variance_stay,
    nan_reaches_every_rank,
    bytes_of_each_phase,
    ranks_that_disagree_raise,
    damaged_states_change_nothing,
    a_scheduler_from_zero,
    groups_have_their_own_options,
)
LEARNING = (one_bit_adam_learns_digits, zero_one_adam_learns_digits)
