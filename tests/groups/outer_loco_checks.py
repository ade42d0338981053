"""LoCo beside torch's optimizers and a plain implementation; GradScaler, schedulers and closures with all."""

import math

import torch
from outer_optimizer_tools import (
    SHAPES,
    alike,
    away,
    digits,
    give,
    gradient,
    random,
    resumes,
    run,
    saved,
    trains,
    weights,
)
from start_program import digest, raises
from torch import nn

import thinwire
from thinwire import codecs
from thinwire.errors import Disagreement, InputError
from thinwire.outer import DeMo, LoCo, OneBitAdam, ZeroOneAdam
from thinwire.runtimes.gloo_transport import GlooTransport

BETA, RESET, EXACT = 0.3, 4, (1, 3)


def loco(given, **options):
    return LoCo(torch.optim.AdamW(given, lr=0.02), min_numel=100, beta=BETA, reset_every=RESET, **options)


def exact_gradients_are_those_of_the_wrapped_optimizer(rank, world):
    for theirs in (
        lambda given: torch.optim.SGD(given, lr=0.1, momentum=0.9, nesterov=True),
        lambda given: torch.optim.Adam(given, lr=0.01, weight_decay=0.1),
    ):
        params, others = weights(), weights()
        run(LoCo(theirs(params), codec="fp32"), params, rank, 5)
        other = theirs(others)
        for step in range(5):
            for i, p in enumerate(others):
                gs = [gradient(r, step, i, SHAPES[i]) for r in range(world)]
                p.grad = sum(gs[1:], gs[0]) * (1.0 / world)
            other.step()
        assert away(params, others) < 1e-6
        assert world > 2 or digest(params) == digest(others)
        alike(params)
    return params


class Errors:
    """The average of errors of one rank, or of an owner."""

    def __init__(self):
        self.codec, self.store, self.e = codecs.get("int4/128"), codecs.get("int8/256"), 0.0

    def stored(self, x):
        return self.store.decode(self.store.encode(x), x.numel())

    def encoded(self, x):
        h = x + self.e
        sent = self.codec.decode(self.codec.encode(h), h.numel())
        self.e = self.stored((1 - BETA) * self.e + BETA * self.stored(h - sent))
        return sent


def the_average_of_errors(rank, world):
    """Gradients after each step are the means of a plain implementation; a reset drops all errors."""
    params = weights()
    optimizer = loco(params)
    senders = {i: [Errors() for _ in range(world)] for i in range(len(SHAPES))}
    owners = {i: Errors() for i in senders}
    for step in range(6):
        run(optimizer, params, rank, 1, step)
        for i, shape in enumerate(SHAPES):
            gs = [gradient(r, step, i, shape).flatten() for r in range(world)]
            if i in EXACT:
                mean = sum(gs[1:], gs[0]) / world
            else:
                sent = sum(each.encoded(g) for each, g in zip(senders[i], gs, strict=True)) / world
                mean = owners[i].encoded(sent)
            assert away([params[i].grad.flatten()], [mean]) < 2e-2, (step, i)
            if step + 1 == RESET:
                for each in (*senders[i], owners[i]):
                    each.e = 0.0
        held = [x for slot, x in optimizer.mean.residuals() if x.numel()]
        assert bool(held) == (step + 1 != RESET)
        assert {x.dtype for x in held} <= {torch.uint8}
    alike(params)
    return params


def a_loaded_run_continues(rank, world):
    del world
    params = resumes(loco, rank, before=2, after=5)
    alike(params)
    return params


def states_that_do_not_fit(rank, world):
    del world
    params = weights()
    optimizer = loco(params)
    run(optimizer, params, rank, 2)
    good = optimizer.state_dict()
    raises(InputError, "other tensors or codecs", loco(weights(), codec="int8").load_state_dict, good)
    raises(
        InputError, "no state of thinwire's LoCo", optimizer.load_state_dict, optimizer.optimizer.state_dict()
    )
    raises(InputError, "wraps an optimizer of torch's", LoCo, optimizer)
    others = weights()
    again = loco(others)
    again.load_state_dict(saved(good))
    assert again.param_groups is again.optimizer.param_groups
    assert again.state is again.optimizer.state
    return params


def disagreeing_ranks_raise(rank, world):
    del world
    params = weights()
    optimizer = LoCo(torch.optim.SGD(params, lr=0.1), beta=0.5 if rank else 0.4)
    give(params, rank, 0)
    raises(Disagreement, "beta 0.4", optimizer.step)
    assert digest(params) == digest(weights())
    inner = torch.optim.SGD(params, lr=0.1) if rank else torch.optim.Adagrad(params, lr=0.1)
    raises(Disagreement, ["SGD", "Adagrad"], LoCo(inner).step)
    return params


def a_scheduler_and_named_parameters(rank, world):
    """The learning rate is that of the wrapped optimizer's groups, whichever a scheduler holds."""
    del world
    for held in ("wrapped", "wrapper"):
        params = weights()
        named = [(f"layer.{i}.weight", p) for i, p in enumerate(params)]
        inner = torch.optim.SGD(named, lr=0.1)
        optimizer = LoCo(inner, min_numel=100)
        schedule = torch.optim.lr_scheduler.StepLR(inner if held == "wrapped" else optimizer, 2, 0.5)
        for step in range(4):
            run(optimizer, params, rank, 1, step)
            schedule.step()
        assert optimizer.param_groups[0]["lr"] == inner.param_groups[0]["lr"] == 0.025
        assert any(slot.startswith("layer.0.weight/") for slot, _ in optimizer.mean.residuals())
        optimizer.zero_grad()
        assert all(p.grad is None for p in params)
        alike(params)
    return params


def one_ranks_overflow_skips_the_step_of_all(rank, world):
    """torch's GradScaler sees the infinity on one rank only."""
    for make in (lambda p: DeMo(p, lr=0.02), lambda p: OneBitAdam(p, warmup_steps=9), loco):
        params = weights()
        optimizer, scaler = make(params), torch.amp.GradScaler("cpu", init_scale=4.0)
        scaler.scale(torch.zeros(1))
        for step in range(3):
            give(params, rank, step)
            for p in params:
                p.grad *= scaler.get_scale()
            if step == 1 and rank == world - 1:
                params[0].grad[0, 0] = torch.inf
            before = digest(params)
            scaler.step(optimizer)
            scaler.update()
            assert (digest(params) == before) == (step == 1), step
        assert optimizer.steps == 2
        others = weights()
        plain = make(others)
        for step in (0, 2):
            run(plain, others, rank, 1, step)
        assert away(params, others) < 1e-6, away(params, others)
        alike(params)
    return params


def sent_nbytes_are_the_bytes_given_to_gloo(rank, world):
    """In steps like earlier ones; ranks compare a call when it is new."""
    posted, start = [], GlooTransport._start

    def counting(self, post, parcels, way, tag, messages):
        if way == "was taken by":
            posted.extend(wire.numel() for _, wire in parcels)
        start(self, post, parcels, way, tag, messages)

    made = (
        lambda p: DeMo(p, min_numel=100),
        lambda p: OneBitAdam(p, warmup_steps=2, min_numel=100),
        lambda p: ZeroOneAdam(
            p,
            var_freeze_step=5,
            var_update_scaler=2,
            local_step_scaler=2,
            local_step_clipper=2,
            min_numel=100,
        ),
        loco,
    )
    for make in made:
        params = weights()
        optimizer = make(params)
        run(optimizer, params, rank, 4)
        GlooTransport._start = counting
        try:
            counts = []
            for step in range(4, 12):
                posted.clear()
                before = optimizer.sent_nbytes
                run(optimizer, params, rank, 1, step)
                counts.append((optimizer.sent_nbytes - before, sum(posted)))
        finally:
            GlooTransport._start = start
        assert all(said == real for said, real in counts), (type(optimizer).__name__, counts)
        assert any(real for _, real in counts)
        assert isinstance(optimizer, ZeroOneAdam) == any(real == 0 for _, real in counts)
    del world
    return []


def a_closure_is_run_once(rank, world):
    del world
    params, calls = weights(), []
    optimizer = DeMo(params, lr=0.02)

    def closure():
        calls.append(torch.is_grad_enabled())
        give(params, rank, len(calls))
        return 17.0

    assert optimizer.step(closure) == 17.0
    assert calls == [True]
    alike(params)
    return params


def a_group_of_some_ranks(rank, world):
    """Ranks outside of it make none; names of errors are global ranks."""
    import torch.distributed as dist

    group = dist.new_group(list(range(1, world)))
    params = weights()
    if rank:
        optimizer = DeMo(params, lr=0.02, min_numel=100, group=group)
        run(optimizer, params, rank, 3)
        codec = codecs.get("dct/64:32")
        sent = sum(
            codec.for_shape(s).nbytes(math.prod(s)) if len(s) == 2 and s != (7, 5) else 4 * math.prod(s)
            for s in SHAPES
        )
        assert optimizer.sent_nbytes == 3 * (world - 2) * sent
    else:
        raises(InputError, "not in the group", DeMo, params, group=dist.GroupMember.NON_GROUP_MEMBER)
    thinwire.broadcast(params[0].data, 1, "fp32")
    return []


def gradients_of_ddp_are_refused(rank, world):
    """They are averaged already; under no_sync they are not."""
    from torch.nn.parallel import DistributedDataParallel

    del world
    torch.manual_seed(1)
    model = DistributedDataParallel(nn.Linear(8, 4))
    optimizer = DeMo(model.parameters())
    x = random(5, 8, seed=rank)
    model(x).square().sum().backward()
    raises(InputError, ["averaged them already", "model.no_sync()", "check_start=False"], optimizer.step)
    optimizer.zero_grad()
    with model.no_sync():
        model(x).square().sum().backward()
    optimizer.step()
    alike(model.parameters())
    return list(model.parameters())


def learns_digits(rank, world):
    (x, y), _ = digits(rank, world)
    assert len(x) == len(y) == 1400 // world
    accuracy, optimizer = trains(lambda p: LoCo(torch.optim.Adam(p, lr=2e-3), min_numel=1000), rank, world)
    assert accuracy > 0.9, accuracy
    assert optimizer.steps == 6 * 42
    return [torch.tensor(accuracy)]


CHECKS = (
    exact_gradients_are_those_of_the_wrapped_optimizer,
    the_average_of_errors,
    a_loaded_run_continues,
    states_that_do_not_fit,
    disagreeing_ranks_raise,
    a_scheduler_and_named_parameters,
    one_ranks_overflow_skips_the_step_of_all,
    sent_nbytes_are_the_bytes_given_to_gloo,
    a_closure_is_run_once,
    a_group_of_some_ranks,
    gradients_of_ddp_are_refused,
)
LEARNING = (learns_digits,)
