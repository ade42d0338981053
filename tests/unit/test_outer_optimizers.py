"""Optimizers that communicate: options, what is refused, and a world of one rank."""

import math

import pytest
import torch
import torch.distributed as dist
from torch import nn

from thinwire import Policy, outer
from thinwire.errors import CommError, InputError
from thinwire.outer import DeMo, LoCo, OneBitAdam, ZeroOneAdam
from thinwire.outer.first_step import checksum
from thinwire.outer.mean import Sending
from thinwire.policy import LADDER, Ladder, Rule


@pytest.fixture
def group():
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


def weights(*shapes, dtype=torch.float32):
    generator = torch.Generator().manual_seed(0)
    return [nn.Parameter(torch.randn(shape, generator=generator).to(dtype)) for shape in shapes]


def give(params, step=0):
    generator = torch.Generator().manual_seed(step + 1)
    for p in params:
        p.grad = torch.randn(p.shape, generator=generator).to(p.dtype)


def test_names_are_those_listed():
    for name in ("DeMo", "LoCo", "OneBitAdam", "ZeroOneAdam"):
        assert name in outer.__all__
        assert getattr(outer, name).__name__ == name
    assert dir(outer) == sorted(outer.__all__)
    with pytest.raises(AttributeError, match=r"'thinwire\.outer' has no attribute 'Demo'"):
        _ = outer.Demo


def test_without_a_group_the_error_says_what_to_call():
    with pytest.raises(CommError, match="init_process_group before you make it"):
        DeMo(weights((3, 3)))


@pytest.mark.usefixtures("group")
def test_demo_of_one_rank_keeps_its_momentum():
    """Chunks of a vector: the two largest of four cosines are sent, the rest stays."""
    for sign in (True, False):
        (x,) = weights((8,))
        optimizer = DeMo([x], lr=0.1, decay=0.5, codec="dct/4:2", sign=sign, min_numel=0)
        k = torch.arange(4, dtype=torch.float64)
        basis = math.sqrt(0.5) * torch.cos(math.pi / 4 * (k + 0.5)[None] * k[:, None])
        basis[0] = 0.5
        expected, delta = x.detach().double(), torch.zeros(2, 4, dtype=torch.float64)
        for step in range(5):
            give([x], step)
            optimizer.step()
            delta = 0.5 * delta + 0.1 * x.grad.double().view(2, 4)
            there = delta @ basis.T
            places = there.abs().topk(2).indices
            sent = torch.zeros_like(there).scatter(1, places, there.gather(1, places)) @ basis
            delta -= sent
            expected -= 0.1 * sent.flatten().sign() if sign else sent.flatten()
        assert torch.allclose(x.double(), expected, atol=1e-5)
    assert optimizer.sent_nbytes == 0


@pytest.mark.parametrize("decay", [0.0, 0.1])
@pytest.mark.usefixtures("group")
def test_one_bit_adam_of_one_rank_warms_up_as_torchs_adam(decay):
    params, others = weights((5, 7), (9,)), weights((5, 7), (9,))
    ours = OneBitAdam(params, lr=0.1, weight_decay=decay, warmup_steps=4)
    theirs = torch.optim.AdamW(others, lr=0.1, weight_decay=decay)
    for step in range(4):
        give(params, step)
        give(others, step)
        ours.step()
        theirs.step()
    assert all(map(torch.equal, params, others))
    variance = ours.state[params[0]]["exp_avg_sq"].clone()
    give(params, 4)
    ours.step()
    assert torch.equal(ours.state[params[0]]["exp_avg_sq"], variance)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.usefixtures("group")
def test_nan_and_infinity_reach_the_weights(dtype):
    for bad in (torch.nan, torch.inf, -torch.inf):
        for make in (
            lambda p: DeMo(p, min_numel=0),
            lambda p: DeMo(p),
            lambda p: OneBitAdam(p, warmup_steps=1),
        ):
            params = weights((4, 8), (6, 6), dtype=dtype)
            optimizer = make(params)
            for step in range(2):
                give(params, step)
                params[0].grad[1, 2] = bad if step else 0.0
                optimizer.step()
            assert not bool(params[0][1, 2].isfinite())
            assert bool(params[1].isfinite().all())


@pytest.mark.usefixtures("group")
def test_wrong_options_are_refused():
    (x,) = weights((4, 4))
    adam = {"warmup_steps": 3}
    wrong = (
        (DeMo, {"lr": -1.0}, "lr must be a number from 0 on"),
        (DeMo, {"lr": torch.tensor(0.1)}, "lr must be a plain number: lr=0.1"),
        (DeMo, {"decay": 1.0}, "decay must be a number from 0 on and under 1"),
        (DeMo, {"weight_decay": "much"}, "weight_decay must be"),
        (DeMo, {"mean": "everyone"}, "mean must be one of: senders, ranks"),
        (DeMo, {"min_numel": -1}, "min_numel must be"),
        (OneBitAdam, {"warmup_steps": 0}, "warmup_steps must be a number of steps, 1 or more"),
        (OneBitAdam, {**adam, "betas": (0.9,)}, "betas must be two numbers"),
        (OneBitAdam, {**adam, "betas": (0.9, 1.0)}, "each of betas"),
        (OneBitAdam, {**adam, "eps": -1e-8}, "eps must be"),
        (ZeroOneAdam, {"var_freeze_step": 3, "local_step_clipper": 0}, "local_step_clipper must be"),
    )
    for make, options, text in wrong:
        with pytest.raises(InputError, match=text):
            make([x], **options)
    with pytest.raises(ValueError, match="unknown codec 'dtc'"):
        DeMo([x], codec="dtc")
    ladder = Policy("up", (Rule(LADDER),), Ladder(("int4", "int8")))
    late = Policy("late", (Rule("int8", first_step=5), Rule("fp32")))
    for policy in (ladder, late):
        with pytest.raises(InputError, match="changes with steps"):
            DeMo([x], codec=policy)
    for beta in (0.0, 1.5, "1"):
        with pytest.raises(InputError, match="beta must be"):
            LoCo(torch.optim.SGD([x], 0.1), beta=beta)
    with pytest.raises(InputError, match=r"LoCo wraps an optimizer of torch's.*not list"):
        LoCo([x])


@pytest.mark.usefixtures("group")
def test_wrong_parameters_and_gradients_are_refused():
    with pytest.raises(InputError, match=r"not torch\.float64"):
        DeMo([nn.Parameter(torch.zeros(3, dtype=torch.float64))])
    (x,) = weights((4, 4))
    frozen = DeMo([x.detach().clone()])
    with pytest.raises(InputError, match="no parameter requires a gradient"):
        frozen.step()
    embedding = nn.Embedding(5, 3, sparse=True)
    embedding(torch.tensor([1, 2])).sum().backward()
    with pytest.raises(InputError, match="sparse=False"):
        DeMo(embedding.parameters()).step()
    optimizer = DeMo([x])
    with pytest.raises(InputError, match="lr must be"):
        optimizer.add_param_group({"params": weights((2, 2)), "lr": -1.0})
    assert len(optimizer.param_groups) == 1
    optimizer.add_param_group({"params": weights((2, 2)), "lr": 0.5})
    give([x])
    optimizer.step()
    with pytest.raises(InputError, match="before its first step"):
        optimizer.add_param_group({"params": weights((3, 3))})


def test_codecs_get_feedback_and_small_tensors_stay_exact():
    def codecs(*args, **options):
        return [rule.codec for rule in Sending(*args, **options).policy().rules]

    assert codecs("int8", "two_shot") == ["fp32", "fp32", "int8/256+ef"]
    assert codecs("int8+ef:bf16", "two_shot", min_numel=0) == ["int8/256+ef:bf16"]
    assert codecs("fp32", "two_shot", min_numel=0) == ["fp32"]
    policy = Policy("two", (Rule("int4", min_ndim=2), Rule("fp32")))
    assert codecs(policy, "two_shot") == ["int4/128+ef", "fp32"]


@pytest.mark.usefixtures("group")
def test_demo_refuses_a_momentum_of_few_bits():
    with pytest.raises(InputError, match="dct/64:8"):
        DeMo(weights((4, 4)), codec="dct/64:8+ef:8bit")


def test_a_checksum_tells_a_bit_and_a_place():
    x = torch.randn(100)
    other, swapped = x.clone(), x.clone()
    other[7] = torch.nextafter(other[7], torch.tensor(9.0))
    swapped[[3, 5]] = x[[5, 3]]
    sums = [tuple(checksum([each]).tolist()) for each in (x, other, swapped, x.bfloat16())]
    assert len(set(sums)) == 4
    assert sums[0] == tuple(checksum([x.clone()]).tolist())
    assert not checksum([torch.zeros(9), torch.zeros(3, dtype=torch.bfloat16)]).any()
    assert all(0 <= word < 1 << 16 for word in sums[0])
