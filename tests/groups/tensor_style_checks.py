"""Checks of the parallel styles, against torch's own."""

import math

import torch
import torch.distributed.tensor.parallel as theirs
from start_program import raises
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.debug import CommDebugMode
from torch.distributed.tensor.parallel import parallelize_module
from torch.utils.checkpoint import checkpoint

import thinwire
from thinwire import codecs, parallel
from thinwire.errors import CodecError, Disagreement, InputError
from thinwire.parallel import ops
from thinwire.parallel.wires import Wires

BATCH, LENGTH, WIDTH, HEADS = 4, 24, 48, 12  # divisible by 2, 3 and 4 ranks
EXACT = Wires("fp32", "fp32", 0)  #: through thinwire's own collectives, unlike None
ULPS = 2.0**-20  #: of sums that are added in another order, in float32


class Attention(nn.Module):
    def __init__(self):
        super().__init__()
        self.wq, self.wv, self.wo = (nn.Linear(WIDTH, WIDTH) for _ in range(3))
        self.wk = nn.Linear(WIDTH, WIDTH, bias=False)  # the gradient of a bias would be zero

    def forward(self, x):
        heads = [
            each(x).unflatten(-1, (-1, WIDTH // HEADS)).transpose(1, 2)
            for each in (self.wq, self.wk, self.wv)
        ]
        y = nn.functional.scaled_dot_product_attention(*heads, is_causal=True)
        return self.wo(y.transpose(1, 2).flatten(2))


class MLP(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.second = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)

    def forward(self, x):
        return self.second(nn.functional.gelu(self.first(x)))


class Net(nn.Module):
    """One block of a transformer."""

    def __init__(self):
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        self.attention, self.mlp = Attention(), MLP()

    def forward(self, x):
        x = x + self.attention(self.norm1(x))
        return x + self.mlp(self.norm2(x))


def mesh(world):
    return init_device_mesh("cpu", (world,))


def style(library, name, how, **options):
    """torch's style, or thinwire's with some codecs."""
    if library is theirs:
        return getattr(theirs, name)(**options)
    if isinstance(how, Wires):
        found = getattr(library, name)(**options)
        found.wires = how
        return found
    return getattr(library, name)(**options, **how)


def tensor_parallel(library, how):
    """Every rank holds all activations between layers."""
    columns = {f"attention.{each}": style(library, "ColwiseParallel", how) for each in ("wq", "wk", "wv")}
    return columns | {
        "attention.wo": style(library, "RowwiseParallel", how),
        "mlp.first": style(library, "ColwiseParallel", how),
        "mlp.second": style(library, "RowwiseParallel", how),
    }


def sequence_parallel(library, how):
    """Between layers, every rank holds a part of the sequence; queries, keys and values share one gather."""
    gather = {"input_layouts": (Shard(1),), "desired_input_layouts": (Replicate(),)}
    columns = {f"attention.{each}": style(library, "ColwiseParallel", how) for each in ("wq", "wk", "wv")}
    scattered = {"output_layouts": Shard(1), "use_local_output": False}
    return columns | {
        "norm1": style(library, "SequenceParallel", how),
        "norm2": style(library, "SequenceParallel", how),
        "attention": style(library, "PrepareModuleInput", how, **gather),
        "attention.wo": style(library, "RowwiseParallel", how, **scattered),
        "mlp.first": style(library, "ColwiseParallel", how, input_layouts=Shard(1)),
        "mlp.second": style(library, "RowwiseParallel", how, **scattered),
        "": style(
            library,
            "PrepareModuleInput",
            how,
            input_layouts=(Replicate(),),
            desired_input_layouts=(Shard(1),),
        ),
    }


def split(plan, library, how, world, dtype=torch.float32, made=Net):
    torch.manual_seed(0)
    net = made().to(dtype)
    layers = plan(library, how)
    whole = layers.pop("", None)
    net = parallelize_module(net, mesh(world), layers)
    return net if whole is None else parallelize_module(net, mesh(world), whole)


def random(*shape, seed=1, dtype=torch.float32):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def full(x):
    return x.full_tensor() if isinstance(x, DTensor) else x


def step(net, x, seed=2):
    """The output, the input's gradient and the gradients of all parameters, whole."""
    x = x.clone().requires_grad_()
    net.zero_grad()
    y = full(net(x))
    (y * random(*y.shape, seed=seed).to(y.dtype)).sum().backward()
    return [y.detach(), full(x.grad), *(full(p.grad).clone() for p in net.parameters())]


def away(found, expected):
    """The largest relative error of several tensors."""
    pairs = [(a.detach().float(), b.detach().float()) for a, b in zip(found, expected, strict=True)]
    return max(float((a - b).norm() / (b.norm() + 1e-30)) for a, b in pairs)


def equal(found, expected):
    assert len(found) == len(expected)
    assert all(torch.equal(a, b) for a, b in zip(found, expected, strict=True)), away(found, expected)


PLANS = {"tensor": tensor_parallel, "sequence": sequence_parallel}
INPUT = random(BATCH, LENGTH, WIDTH)


def without_codecs_the_bits_are_torch_s(rank, world):
    del rank
    found = []
    for plan in PLANS.values():
        expected = step(split(plan, theirs, None, world), INPUT)
        found += step(split(plan, parallel, {"forward": None, "backward": "fp32"}, world), INPUT)
        equal(found[-len(expected) :], expected)
        small = step(split(plan, parallel, {"min_numel": INPUT.numel() + 1}, world), INPUT)
        equal(small, expected)
    return found


def float32_wires_change_nothing_but_the_order_of_sums(rank, world):
    """Two ranks have only one order. And torch's gradients are those of the whole net in one process."""
    del rank
    torch.manual_seed(0)
    alone = step(Net(), INPUT)
    for plan in PLANS.values():
        expected = step(split(plan, theirs, None, world), INPUT)
        found = step(split(plan, parallel, EXACT, world), INPUT)
        if world == 2:
            equal(found, expected)
        assert away(found, expected) < ULPS
        assert away(found, alone) < 16 * ULPS  # products are split too
    return found


def torch_sends_nothing_large(rank, world):
    """Every message that torch would send is thinwire's, and there are no more of them."""
    del rank
    for plan, calls in ((tensor_parallel, {"all_reduce": 2 + 4}), (sequence_parallel, None)):
        net, plain = split(plan, parallel, {"min_numel": 0}, world), split(plan, theirs, None, world)
        with CommDebugMode() as expected:
            step_alone(plain)
        with Spy() as seen, CommDebugMode() as rest:
            step_alone(net)
        assert rest.get_total_counts() == 0, rest.get_comm_counts()
        assert sum(seen.counts.values()) == expected.get_total_counts(), (
            seen.counts,
            expected.get_comm_counts(),
        )
        if calls is not None:
            assert seen.counts == calls
    assert seen.counts == {"all_gather": 5, "reduce_scatter": 4}, seen.counts


def step_alone(net):
    """A step without the reductions of the weights' own gradients."""
    x = INPUT.clone().requires_grad_()
    y = net(x)
    y = y.to_local() if isinstance(y, DTensor) else y
    y.square().sum().backward()


class Spy:
    """Count the calls of thinwire's collectives."""

    def __enter__(self):
        self.counts, self.kept = {}, {}
        for name in ("all_reduce", "all_gather", "reduce_scatter"):
            self.kept[name] = getattr(ops.calls, name)
            setattr(ops.calls, name, self.counting(name))
        return self

    def counting(self, name):
        def call(*args, **options):
            self.counts[name] = self.counts.get(name, 0) + 1
            return self.kept[name](*args, **options)

        return call

    def __exit__(self, *_):
        for name, call in self.kept.items():
            setattr(ops.calls, name, call)


def one_layer_is_off_by_no_more_than_its_codec(rank, world):
    """Every rank's part of a sum is rounded, then the sum; each by half a step of its largest number."""
    found = []
    for spec, steps in (("int8/256", 127), ("int4/128", 7)):
        for name, which in (("RowwiseParallel", 0), ("ColwiseParallel", 1)):
            results = []
            for library in (theirs, parallel):
                torch.manual_seed(0)
                layer = nn.Linear(WIDTH, WIDTH, bias=False)
                how = {"forward": spec, "backward": spec, "min_numel": 0}
                style(library, name, how)._apply(layer, mesh(world))
                x = INPUT if which else INPUT.chunk(world, -1)[rank]
                x = x.clone().requires_grad_()
                y = layer(x)
                y.backward(torch.ones_like(y))
                results.append([y.detach(), x.grad][which])
                weight = layer.weight.grad.to_local()
            exact, sent = results
            weight = full(layer.weight.detach())
            if which:
                mine = weight.chunk(world, 0)[rank].sum(0).expand_as(exact)
            else:
                mine = INPUT.chunk(world, -1)[rank] @ weight.chunk(world, 1)[rank].T
            largest = torch.stack([mine.abs().max()])
            torch.distributed.all_reduce(largest)  # the sum of the ranks' largest parts
            parts = float(largest) / (2 * steps)
            bound = parts + (float(exact.abs().max()) + parts) / (2 * steps)
            error = float((sent - exact).abs().max())
            assert bound / 40 < error < bound, (spec, name, error, bound)
            found.append(sent)
    return found


def a_block_is_off_by_a_few_roundings(rank, world):
    """Eight bits change outputs and gradients by less than two percent, four bits by about 18 times that."""
    del rank
    found = []
    for plan in PLANS.values():
        expected = step(split(plan, theirs, None, world), INPUT)
        errors = []
        for spec in ("int8", "int4", "qsgd8/512", "bf16"):
            got = step(
                split(plan, parallel, {"forward": spec, "backward": spec, "min_numel": 0}, world), INPUT
            )
            found += got
            errors.append(away(got, expected))
        eight, four, random8, sixteen = errors
        assert 1e-4 < eight < 0.02, errors
        assert 6 * eight < four < 0.4, errors
        assert 1e-4 < random8 < 0.1, errors
        assert 1e-5 < sixteen < 0.01, errors
    return found


def each_direction_has_its_codec(rank, world):
    del rank
    for plan in PLANS.values():
        expected = step(split(plan, theirs, None, world), INPUT)
        there = step(
            split(plan, parallel, {"forward": "int8", "backward": None, "min_numel": 0}, world), INPUT
        )
        back = step(
            split(plan, parallel, {"forward": None, "backward": "int8", "min_numel": 0}, world), INPUT
        )
        assert torch.equal(back[0], expected[0])
        assert not torch.equal(back[1], expected[1])
        assert not torch.equal(there[0], expected[0])
        assert away(there[1:2], expected[1:2]) < 0.02
    return [*there[:1], *back[:1]]


def sixteen_bit_activations(rank, world):
    del rank
    found = []
    for plan in PLANS.values():
        x = INPUT.bfloat16()
        expected = step(split(plan, theirs, None, world, torch.bfloat16), x)
        got = step(split(plan, parallel, {"min_numel": 0}, world, torch.bfloat16), x)
        assert {each.dtype for each in got} == {torch.bfloat16}
        assert away(got, expected) < 0.05, away(got, expected)
        found += got
    return found


LAYOUTS = (Replicate(), Shard(0), Shard(1), Shard(-1), Partial(), Partial("avg"))


def every_change_of_layout(rank, world):
    """From every layout to every other, with even and uneven sizes: values and gradients are torch's."""
    found, shape = [], (2 * world + 1, 5, world + 1)
    for shape in ((2 * world, 4 * world, 3 * world), (2 * world + 1, 5, world + 1), (1, 2 * world - 1, 3)):
        for source in LAYOUTS:
            for target in LAYOUTS:
                if refused(source, target):
                    continue
                expected, got = (
                    changed(library, source, target, shape, rank, world) for library in (theirs, parallel)
                )
                assert got[0].placements == expected[0].placements
                one, other = ([full(each).detach() for each in both] for both in (got, expected))
                assert away(one, other) < ULPS, (source, target, shape)
                assert world > 2 or all(map(torch.equal, one, other)), (source, target, shape)
                found += one
    return found


def refused(source, target):
    """torch changes no layout to a partial sum."""
    return target.is_partial() and source != target


def changed(library, source, target, shape, rank, world):
    """The output and the gradient of a module whose input changes its layout."""
    if source.is_partial():
        x = DTensor.from_local(random(*shape, seed=rank), mesh(world), (source,))
    else:
        x = distribute_tensor(random(*shape), mesh(world), (source,))
    x.requires_grad_()
    module = nn.Identity()
    style(library, "PrepareModuleInput", EXACT, input_layouts=source, desired_input_layouts=target)._apply(
        module, mesh(world)
    )
    y = module(x)
    y.backward(
        distribute_tensor(
            random(*shape, seed=3), mesh(world), (Replicate() if target.is_partial() else target,)
        )
    )
    return y, x.grad


def inputs_and_outputs_of_modules(rank, world):
    """Local tensors in and out, several of them, by position and by name, and what is no tensor."""

    class Pick(nn.Module):
        def forward(self, x, flag, *, y, z=None):
            assert flag == "flag"
            return x * y, z, x + 1

    results = []
    for library in (theirs, parallel):
        before = style(
            library,
            "PrepareModuleInput",
            EXACT,
            input_layouts=(Shard(0), None),
            desired_input_layouts=(Shard(1), None),
            input_kwarg_layouts={"y": Replicate()},
            desired_input_kwarg_layouts={"y": Shard(1)},
            use_local_output=True,
        )
        after = style(
            library,
            "PrepareModuleOutput",
            EXACT,
            output_layouts=(Shard(1), None, Shard(1)),
            desired_output_layouts=(Replicate(), None, Shard(0)),
        )
        net = parallelize_module(parallelize_module(Pick(), mesh(world), before), mesh(world), after)
        x = random(6, world * 2, seed=rank).requires_grad_()
        y = random(6 * world, world * 2, seed=9).requires_grad_()
        a, z, b = net(x, "flag", y=y, z=7)
        assert z == 7
        (a.square().sum() + (b * random(*b.shape, seed=5)).sum()).backward()
        results.append([a.detach(), b.detach(), x.grad, y.grad])
    equal(results[1], results[0])
    ours = parallel.PrepareModuleInput(input_layouts=(Shard(0),), desired_input_layouts=(Shard(1),))
    said = raises(
        ValueError,
        "same length",
        parallelize_module(nn.Identity(), mesh(world), ours),
        random(4, 4),
        random(4, 4),
    )
    theirs_said = raises(
        ValueError,
        "same length",
        parallelize_module(
            nn.Identity(),
            mesh(world),
            theirs.PrepareModuleInput(input_layouts=(Shard(0),), desired_input_layouts=(Shard(1),)),
        ),
        random(4, 4),
        random(4, 4),
    )
    assert said == theirs_said
    return [results[1][0]]


def input_and_output_at_once(rank, world):
    """The style for both is the two styles, one after the other."""
    layouts = {"input_layouts": (Shard(0),), "desired_input_layouts": (Replicate(),)}
    after = {"output_layouts": Replicate(), "desired_output_layouts": Shard(1)}
    results = []
    for library, how in (
        (theirs, None),
        (parallel, {"forward": None, "backward": None}),
        (parallel, {"min_numel": 0}),
    ):
        both = style(library, "PrepareModuleInputOutput", how, **layouts, **after, use_local_input=True)
        net = parallelize_module(nn.Tanh(), mesh(world), both)
        x = random(6, 4 * world, seed=rank).requires_grad_()
        y = net(x)
        y.square().sum().backward()
        results.append([y.detach(), x.grad])
    equal(results[1], results[0])
    assert 1e-4 < away(results[2], results[0]) < 0.03, away(results[2], results[0])


def without_gradients_and_computed_again(rank, world):
    """Evaluation, and activations that are computed again in the backward pass: the same bits."""
    del rank
    for plan in PLANS.values():
        net = split(plan, parallel, {"min_numel": 0}, world)
        expected = step(net, INPUT)
        for off in (torch.no_grad, torch.inference_mode):
            with off():
                assert torch.equal(full(net(INPUT)), expected[0])
        mlp = net.mlp.forward
        net.mlp.forward = lambda x, mlp=mlp: checkpoint(mlp, x, use_reentrant=False)
        with Spy() as seen:
            equal(step(net, INPUT), expected)
        with Spy() as before:
            net.mlp.forward = mlp
            step(net, INPUT)
        again = sum(seen.counts.values()) - sum(before.counts.values())
        assert again == (plan is sequence_parallel), "the input of the first layer is gathered again, no more"
    return expected[:1]


def embeddings(rank, world):
    """Split by rows, every rank knows some of the words; split by columns, a part of every word."""
    del rank
    words = torch.randint(0, 40, (BATCH, 2 * LENGTH), generator=torch.Generator().manual_seed(4))
    found = []
    for name, layouts in (
        ("RowwiseParallel", {"input_layouts": Replicate()}),
        ("RowwiseParallel", {"input_layouts": Replicate(), "output_layouts": Shard(1)}),
        ("ColwiseParallel", {"output_layouts": Replicate()}),
        ("ColwiseParallel", {"output_layouts": Shard(1)}),
    ):
        results = []
        for library, how in ((theirs, None), (parallel, EXACT), (parallel, {"min_numel": 0})):
            torch.manual_seed(0)
            net = nn.Embedding(40, WIDTH)
            net = parallelize_module(
                net, mesh(world), style(library, name, how, use_local_output=False, **layouts)
            )
            y = full(net(words))
            (y * random(*y.shape, seed=2)).sum().backward()
            results.append([y.detach(), full(net.weight.grad)])
        equal(results[1], results[0])  # of every sum, only one part is not zero
        assert 1e-4 < away(results[2][:1], results[0][:1]) < 0.01
        assert away(results[2], results[0]) < 0.02
        found += results[2]
    return found


def what_cannot_be_sent_is_refused(rank, world):
    for wrong in ("int4/128+ef", thinwire.Channel("int8"), codecs.get("onebit/64+ef")):
        raises(
            CodecError,
            ["residuals" if isinstance(wrong, thinwire.Channel) else "other samples"],
            parallel.ColwiseParallel,
            forward=wrong,
        )
    raises(CodecError, "other samples", parallel.RowwiseParallel, backward="topk/0.1+ef")
    raises(InputError, "min_numel", parallel.SequenceParallel, min_numel=-1)
    for maximum in (Partial("max"), Partial("min")):
        x = DTensor.from_local(random(4, 4, seed=rank), mesh(world), (maximum,))
        net = nn.Identity()
        parallel.PrepareModuleInput(
            input_layouts=maximum, desired_input_layouts=Replicate(), min_numel=0
        )._apply(net, mesh(world))
        raises(InputError, ["int8/256 encodes sums and means", "torch's own style"], net, x)
    net = parallelize_module(
        nn.Linear(world, world).double(), mesh(world), parallel.RowwiseParallel(min_numel=0)
    )
    raises(InputError, "float64", net, random(3, 1).double())
    net = nn.Identity()
    parallel.PrepareModuleInput(
        input_layouts=Shard(0), desired_input_layouts=Replicate(), min_numel=0
    )._apply(net, mesh(world))
    both = init_device_mesh("cpu", (1, world))
    x = DTensor.from_local(random(4, 4), both, (Replicate(), Shard(0)))
    raises(InputError, "mesh of one dimension", net, x)
    assert "forward=int8/256, backward=fp32" in repr(parallel.ColwiseParallel(backward=None))
    parts = parallelize_module(
        nn.Linear(6, 6), mesh(world), parallel.ColwiseParallel(input_layouts=Shard(0), min_numel=0)
    )
    raises(Disagreement, "all_gather", parts, random(3 if rank else 2, 6))  # a DTensor may be uneven
    how = {"forward": "int8" if rank else "int4", "min_numel": 0}
    net = parallelize_module(nn.Linear(WIDTH, 77), mesh(world), parallel.RowwiseParallel(**how))
    raises(Disagreement, ["int8/256", "int4/128"], net, INPUT.chunk(world, -1)[rank])


def compiled(backend):
    def check(rank, world):
        """A compiled block has the bits of the same block without a compiler, or nearly so where it adds."""
        del rank
        found = []
        for plan in PLANS.values():
            for spec in ("int8", "qsgd4/512") if backend == "aot_eager" else ("int8",):
                how = {"forward": spec, "backward": spec, "min_numel": 0}
                torch._dynamo.reset()
                expected = [step(split(plan, parallel, how, world), INPUT)]
                net = torch.compile(split(plan, parallel, how, world), backend=backend, fullgraph=True)
                got = [step(net, INPUT) for _ in range(2)]  # the second is not compiled again
                if spec == "int8":
                    bound = 0.01 if backend == "inductor" else 0.0
                    assert away(got[0], expected[0]) <= bound, away(got[0], expected[0])
                    equal(got[1], got[0])
                else:
                    assert away(got[0], expected[0]) < 1
                    assert not torch.equal(got[1][0], got[0][0]), "every call draws its own numbers"
                found += got[0]
        return found

    check.__name__ = f"compiled_{backend}"
    return check


def training(rank, world):
    """Some steps: the loss falls as without codecs, and what all ranks hold stays equal."""
    del rank
    losses = {}
    for library, how in (
        (theirs, None),
        (parallel, {"min_numel": 0}),
        (parallel, {"forward": "int4", "backward": "int4", "min_numel": 0}),
    ):
        net = split(sequence_parallel, library, how, world)
        optimizer = torch.optim.SGD(net.parameters(), 1.0)
        goal = INPUT.flip(-1) / 2
        for _ in range(15):
            loss = nn.functional.mse_loss(full(net(INPUT)), goal)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            losses.setdefault(str(how), []).append(loss.item())
    plain, eight, four = losses.values()
    assert plain[-1] < 0.8 * plain[0]
    assert math.isclose(eight[-1], plain[-1], rel_tol=0.01), (eight[-1], plain[-1])
    assert math.isclose(four[-1], plain[-1], rel_tol=0.1), (four[-1], plain[-1])
    return [full(p.detach()) for p in net.parameters()] + [p.to_local() for p in net.norm1.parameters()]


QUICK = (
    without_codecs_the_bits_are_torch_s,
    float32_wires_change_nothing_but_the_order_of_sums,
    torch_sends_nothing_large,
    one_layer_is_off_by_no_more_than_its_codec,
    a_block_is_off_by_a_few_roundings,
    each_direction_has_its_codec,
    sixteen_bit_activations,
    every_change_of_layout,
    inputs_and_outputs_of_modules,
    input_and_output_at_once,
    without_gradients_and_computed_again,
    embeddings,
    what_cannot_be_sent_is_refused,
    training,
)
COMPILED = (compiled("aot_eager"), compiled("inductor"))
