"""What ranks of sharded models (FSDP2, HSDP) do, on a CPU over gloo or on a GPU over NCCL, and compare.

Calls are compared with an answer of their own: codecs that encode and decode on a CPU, one tensor at a time.
"""

import copy
import gc
import io
import json
import math
import tempfile
import time
import weakref
from contextlib import contextmanager, suppress
from functools import partial

import torch
import torch.distributed as dist
from start_program import digest, raises
from torch import nn
from torch.distributed import checkpoint as dcp
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import Shard
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

import thinwire
from thinwire import Channel, CodecError, InputError, Stream, codecs, policy
from thinwire.integrations import fsdp, load_sharded, reshard, sharded_auto, sharded_state
from thinwire.integrations.fsdp_seam import sharded_groups
from thinwire.policy import Policy, Rule

WIDTH, MORE = 37, 307  # of a layer: neither is divisible by 2, 3 or 4
RECIPES = (
    "int8",
    "int4",
    "onebit",
    "fp8",
    "qsgd4",
    "bf16",
    "int8/tensor",
    "topk/0.05+ef",
    "int4/128+ef:8bit",
)
EXACT = {torch.float32: "fp32", torch.bfloat16: "bf16"}
SEED = 5


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.up, self.norm, self.down = nn.Linear(WIDTH, MORE), nn.LayerNorm(MORE), nn.Linear(MORE, WIDTH)

    def forward(self, x):
        return x + self.down(self.norm(self.up(x)).relu())


class Net(nn.Module):
    """Two blocks, an unused layer, a frozen one, and a layer that is large enough to be cut into pieces."""

    def __init__(self, unused=False):
        super().__init__()
        self.blocks = nn.Sequential(Block(), Block())
        self.frozen = nn.Linear(WIDTH, WIDTH).requires_grad_(False)
        self.head = nn.Linear(WIDTH, 300)
        self.unused = nn.Linear(WIDTH, 290) if unused else None

    def forward(self, x):
        return self.head(self.frozen(self.blocks(x)))


def meshed(device, *shape):
    names = ("replicas", "shards")[-len(shape) :]
    return init_device_mesh(device.type, shape, mesh_dim_names=names)


def build(device, mesh, net=None, **options):
    torch.manual_seed(0)
    net = (net or Net)().to(device)
    for block in net.blocks:
        fully_shard(block, mesh=mesh, **options)
    return fully_shard(net, mesh=mesh, **options)


def batch(device, rank, step):
    made = torch.Generator().manual_seed(1000 * step + rank)
    return torch.randn(8, WIDTH, generator=made).to(device)


def train(net, device, rank, steps, first=0, lr=0.05):
    optimizer = torch.optim.SGD(net.parameters(), lr)
    for step in range(first, first + steps):
        optimizer.zero_grad()
        (net(batch(device, rank, step)) - 1).square().mean().backward()
        optimizer.step()


def weights(net):
    return [each.full_tensor().detach().cpu() for each in net.parameters()]


def gradients_of(net):
    return [each.grad.full_tensor().clone() for each in net.parameters() if each.grad is not None]


def tensors_of(state):
    """All tensors of a nested state."""
    if isinstance(state, torch.Tensor):
        return [state]
    return [each for value in state.values() for each in tensors_of(value)] if isinstance(state, dict) else []


def residuals_of(handle):
    return [each for channel in handle.gradients.channels.values() for each in channel.residuals.values()]


def everyone(thing):
    things = [None] * dist.get_world_size()
    dist.all_gather_object(things, thing)
    return things


@contextmanager
def watched(handle, method):
    """The calls that FSDP makes: copies of what went in and of what came out."""
    calls, inner = [], getattr(handle, method)

    def watch(group, output, given, *more):
        before = given.detach().clone()
        did = inner(group, output, given, *more)
        calls.append((group, tuple(group.present), before.cpu(), output.detach().clone().cpu(), did))
        return did

    for group in handle.groups:
        comm = group.inner._reduce_scatter_comm if method == "reduce" else group.inner._all_gather_comm
        setattr(comm, {"reduce": "reduce", "gather": "gather"}[method], watch)
    yield calls


def parts(parameters, row):
    """Every parameter and its place in a row."""
    at = 0
    for each in parameters:
        yield each, slice(at, at + each.numel)
        at += each.numel
    assert at == row


def encoded(channel, rows, name, rng):
    """A rank's rows [world, numel] after a trip, by the codec alone; it keeps residuals as a plan does.

    The weight of a mean is a factor of the codec's scales.
    """
    wire = channel.encode(rows.float(), f"{name}/sent", rng)
    return channel.codec.decode(wire, rows.shape[1], weight=1.0 / len(rows))


def codec_of(rules, tensor, dtype):
    chosen = rules.route(tensor).codec
    return EXACT[dtype] if chosen == "fp32" else chosen


def expected_reduction(rules, calls, world, channels, step):
    """What every call should have written: the mean of all ranks' rows after a trip, in rank order."""
    for _, present, given, output, _ in calls:
        dtype, mine = given.dtype, given.view(world, -1)
        total = torch.zeros(output.shape)
        for parameter, place in parts(present, output.numel()):
            codec = codec_of(rules, parameter.info, dtype)
            name = parameter.info.name
            rng = Stream(SEED, step=step, rank=dist.get_rank(), tensor=f"{name}/sent")
            rng = rng if codecs.get(codec).needs_rng else None
            channel = channels.setdefault(codec, Channel(codec))
            trip = encoded(channel, mine[:, place], name, rng)
            all_of_them = everyone(trip)
            sums = None
            for each in all_of_them:
                part = each[dist.get_rank()]
                sums = part if sums is None else sums + part
            total[place] = sums
        yield output, total.to(dtype)


# Checks: each takes a device, this rank and the number of ranks


def bits(device, rank, world):
    """Every codec gives the bits of its codec on a CPU, with residuals over steps; gradients of any dtype."""
    mesh = meshed(device, world)
    for dtype in (torch.float32, torch.bfloat16):
        dtypes = MixedPrecisionPolicy(dtype, dtype)
        for recipe in RECIPES if dtype == torch.float32 else ("int8", "int4"):
            net = build(device, mesh, mp_policy=dtypes)
            handle = thinwire.attach(net, recipe, seed=SEED)
            rules, channels = policy.get(recipe), {}
            for step in range(1, 4):
                with watched(handle, "reduce") as calls:
                    train(net, device, rank, 1, first=step)
                assert handle.step == step, (recipe, handle.step)
                assert [call[-1] for call in calls] == [True] * 3, recipe
                for found, wanted in expected_reduction(rules, calls, world, channels, step):
                    assert torch.equal(found, wanted), (recipe, dtype, step, (found - wanted).abs().max())


def gathered(device, rank, world):
    """Weights that all ranks compute with are the decoded ones, the same in both passes of a step."""
    mesh = meshed(device, world)
    for recipe in ("int8", "int4/128", "qsgd4/512", "bf16"):
        net = build(device, mesh)
        handle = thinwire.attach(net, "fp32", weights=recipe, seed=SEED)
        with watched(handle, "gather") as calls:
            train(net, device, rank, 1)
        by_group = {}
        for group, _, given, output, did in calls:
            assert did, recipe
            by_group.setdefault(group.index, []).append((given, output))
            own = output.view(world, -1)[rank]
            for each, place in parts(group.parameters, own.numel()):
                codec = codec_of(policy.get(recipe), each.info, torch.float32)
                rng = Stream(SEED, step=0, rank=rank, tensor=f"{each.info.name}/sent")
                rng = rng if codecs.get(codec).needs_rng else None
                wanted = codecs.get(codec).decode(codecs.get(codec).encode(given[place], rng), each.numel)
                assert torch.equal(own[place], wanted), (recipe, each.info.name)
            assert len(set(everyone(digest([output])))) == 1, (recipe, "ranks hold other weights")
        assert {len(each) for each in by_group.values()} == {1, 2}, "the root is gathered once, blocks twice"
        for pair in by_group.values():
            assert all(torch.equal(each[1], pair[0][1]) for each in pair), (recipe, "backward has other bits")


def plain(device, rank, world):
    """With fp32, and once detached, a model trains as without thinwire, bit for bit."""
    mesh = meshed(device, world)
    reference = build(device, mesh)
    train(reference, device, rank, 3)
    net = build(device, mesh)
    handle = thinwire.attach(net, "fp32", weights="fp32")
    train(net, device, rank, 2)
    assert handle.step == 2
    handle.detach()
    train(net, device, rank, 1, first=2)
    assert handle.step == 2
    assert digest(weights(net)) == digest(weights(reference))
    again = build(device, mesh)
    lossy = thinwire.attach(again, "int4")
    assert thinwire.integrations.attached(again) is lossy
    exact = thinwire.attach(again, "fp32")  # takes the place of the first
    assert thinwire.integrations.attached(again) is exact
    train(again, device, rank, 3)
    assert (lossy.step, exact.step) == (0, 3)
    assert digest(weights(again)) == digest(weights(reference))


def replicas(device, rank, world):
    """HSDP: replicas end equal; only the all-reduce is compressed, or the reduce-scatter too."""
    mesh = meshed(device, 2, world // 2)
    reference = build(device, mesh)
    train(reference, device, rank, 4)
    wanted = torch.cat([each.flatten() for each in weights(reference)])
    start = torch.cat([each.flatten() for each in weights(build(device, mesh))])
    for recipe, inside, bound in (
        ("fp32", None, 0.0), ("int8", None, 0.02), ("int4", "int8", 0.3), ("powersgd", None, 2.0),
        ("onebit", "fp32", 2.0),
    ):  # fmt: skip
        net = build(device, mesh)
        handle = thinwire.attach(net, recipe, inside=inside, seed=SEED)
        train(net, device, rank, 4)
        mine = [each.to_local() for each in net.parameters()]
        copies = everyone((rank % (world // 2), digest(mine)))
        assert len(set(copies)) == world // 2, (recipe, "replicas differ")
        found = torch.cat([each.flatten() for each in weights(net)])
        error = ((found - wanted).norm() / (wanted - start).norm()).item()
        assert error <= bound, (recipe, inside, error)
        assert (error > 0) == (recipe != "fp32"), (recipe, error)
        sent = handle.stats()["directions"]
        assert sent["replicas"]["sent_nbytes"] <= sent["replicas"]["plain_nbytes"] * (
            1 if recipe == "fp32" else 0.5
        )
        assert (sent["gradients"]["sent_nbytes"] < sent["gradients"]["plain_nbytes"]) == (inside == "int8")


def accumulation(device, rank, world):
    """Micro-batches without communication, and several reductions: as torch, but for what a codec loses."""
    mesh = meshed(device, world)
    sums = {}
    for recipe in (None, "int8"):
        net = build(device, mesh)
        handle = thinwire.attach(net, recipe) if recipe else None
        for micro in range(3):
            net.set_requires_gradient_sync(micro == 2)
            (net(batch(device, rank, micro)) - 1).square().mean().backward()
        sums[recipe] = gradients_of(net)
        assert handle is None or handle.step == 1, "three passes, one reduction"
        net.set_requires_gradient_sync(True)
        for micro in range(2):
            (net(batch(device, rank, micro)) - 1).square().mean().backward()
        sums[recipe] += gradients_of(net)
        assert handle is None or handle.step == 3
    for one, other in zip(sums["int8"], sums[None], strict=True):
        assert (one - other).norm() <= 0.02 * other.norm()
    assert any(not torch.equal(one, other) for one, other in zip(sums["int8"], sums[None], strict=True))


def options(device, rank, world):  # noqa: C901, PLR0915
    """Unused parameters, checkpointed activations, resharding, clipping, meta devices, divide factors."""
    mesh = meshed(device, world)

    def compare(make, run, recipe="int8", bound=0.02):
        gradients = []
        for codec in (None, recipe):
            net = make()
            if codec:
                thinwire.attach(net, codec)
            run(net)
            gradients.append(
                torch.cat(
                    [each.grad.full_tensor().flatten() for each in net.parameters() if each.grad is not None]
                )
            )
        error = ((gradients[1] - gradients[0]).norm() / gradients[0].norm()).item()
        assert 0 < error <= bound, (error, recipe)
        return gradients

    def backward(net):
        (net(batch(device, rank, 0)) - 1).square().mean().backward()

    compare(lambda: build(device, mesh, partial(Net, unused=True)), backward)
    for after in (False, True, *([2] if world == 4 else [])):
        compare(lambda after=after: build(device, mesh, reshard_after_forward=after), backward)

    def checkpointed():
        torch.manual_seed(0)
        net = Net()
        net.blocks = nn.Sequential(*(checkpoint_wrapper(each) for each in net.blocks))
        return build(device, mesh, lambda: net)

    compare(checkpointed, backward)
    names = [each.info.name for group in sharded_groups(checkpointed()) for each in group.parameters]
    assert "blocks.0.up.weight" in names, names

    def divided(net):
        for module in net.modules():
            if isinstance(module, FSDPModule):
                module.set_gradient_divide_factor(0.5)
                module.set_force_sum_reduction_for_comms(True)
        backward(net)

    one, _ = compare(lambda: build(device, mesh), divided)
    other, _ = compare(lambda: build(device, mesh), backward)
    assert torch.allclose(one, other * world / 0.5, rtol=1e-4, atol=1e-5)

    def clipped(net):
        backward(net)
        norm = nn.utils.clip_grad_norm_(net.parameters(), 1e-3)
        assert norm.full_tensor() > 1e-3

    compare(lambda: build(device, mesh), clipped)
    net = build(torch.device("meta"), mesh)
    handle = thinwire.attach(net, "int8", weights="int8")
    net.to_empty(device=device)
    for each in net.parameters():
        nn.init.constant_(each, 0.01)
    train(net, device, rank, 2)
    assert handle.step == 2
    assert all(each.isfinite().all() for each in weights(net))
    compiled = build(device, mesh)
    thinwire.attach(compiled, "int8")
    for block in compiled.blocks:
        block.compile(backend="aot_eager")
    train(compiled, device, rank, 2)
    eager = build(device, mesh)
    thinwire.attach(eager, "int8")
    train(eager, device, rank, 2)
    for one, other in zip(weights(compiled), weights(eager), strict=True):
        torch.testing.assert_close(one, other, rtol=1e-3, atol=1e-4)


def not_finite(device, rank, world):
    """NaN and infinity of one rank reach all ranks' gradients, and do not spoil the next step."""
    mesh = meshed(device, world)
    for recipe in ("int8", "int4", "onebit"):
        net = build(device, mesh)
        thinwire.attach(net, recipe, weights="int8")
        x = batch(device, rank, 0)
        if rank == world - 1:
            x[0, 0] = math.nan
        (net(x) - 1).square().mean().backward()
        head = net.head.weight.grad.full_tensor()
        assert not head.isfinite().all(), recipe
        for each in net.parameters():
            each.grad = None
        (net(batch(device, rank, 1)) - 1).square().mean().backward()
        assert all(
            each.grad.full_tensor().isfinite().all() for each in net.parameters() if each.grad is not None
        )


def resumed(device, rank, world):
    """A state goes on with the same bits, through a file; it is a snapshot; a damaged one changes nothing."""
    mesh = meshed(device, world)
    net = build(device, mesh)
    handle = thinwire.attach(net, "int4", seed=SEED)
    train(net, device, rank, 3)
    kept = copy.deepcopy([each.detach().clone() for each in net.parameters()])
    state = handle.state_dict()
    before = digest(tensors_of(state))
    file = io.BytesIO()
    torch.save(state, file)
    train(net, device, rank, 3, first=3)
    assert digest(tensors_of(state)) == before, "a state is a snapshot"
    assert digest(tensors_of(handle.state_dict())) != before
    file.seek(0)
    again = build(device, mesh)
    with torch.no_grad():
        for each, value in zip(again.parameters(), kept, strict=True):
            each.copy_(value)
    other = thinwire.attach(again, "int4", seed=SEED)
    other.load_state_dict(torch.load(file, weights_only=True))
    train(again, device, rank, 3, first=3)
    assert digest(weights(again)) == digest(weights(net))
    for wrong in (
        {}, {**state, "version": 2}, {**state, "world": world + 1}, {**state, "policies": "name = 'x'"},
        {**state, "channels": {"gradients": {"int4/128+ef": {}}}},
        {**state, "pending": {"no": torch.ones(2)}},
        {**state, "rank": (rank + 1) % world}, {key: each for key, each in state.items() if key != "dims"},
    ):  # fmt: skip
        before = digest(
            [each for channel in other.gradients.channels.values() for each in channel.residuals.values()]
        )
        raises(InputError, "", other.load_state_dict, wrong)
        after = digest(
            [each for channel in other.gradients.channels.values() for each in channel.residuals.values()]
        )
        assert before == after


def resharded(device, rank, world):
    """Residuals move to another mesh: gradients and residuals there add up to what the first mesh owed."""
    flat, square = meshed(device, world), meshed(device, 2, world // 2)
    for recipe in ("onebit", "int4"):
        for first, second in ((flat, square), (square, flat), (flat, flat)):
            net = build(device, first)
            handle = thinwire.attach(net, recipe)
            train(net, device, rank, 3)
            owed = reshard(everyone(handle.state_dict()), handle.shapes)
            target = build(device, second)
            taker = thinwire.attach(target, recipe)
            taker.load_state_dict(owed)
            assert taker.step == 3
            (target(batch(device, rank, 0)) * 0).sum().backward()
            assert not taker.pending, "all of it was added to the first gradients"
            left = reshard(everyone(taker.state_dict()), taker.shapes)["pending"]
            for name, each in target.named_parameters():
                if name in owed["pending"]:
                    assert owed["pending"][name].norm() > 0, name
                    wanted = owed["pending"][name].cpu()
                    found = each.grad.full_tensor().cpu() + left[name].cpu()
                    torch.testing.assert_close(found, wanted, rtol=1e-4, atol=1e-6)
            assert "head.weight" in owed["pending"]
            raises(InputError, "not of one run", reshard, everyone(handle.state_dict())[:-1], handle.shapes)


def phases(device, rank, world):
    """Rules by step: when a codec changes, its residual is added to the next gradient."""
    mesh = meshed(device, world)
    rules = Policy("two", (Rule("onebit/512+ef", min_ndim=2, last_step=1), Rule("fp32")))
    net = build(device, mesh)
    handle = thinwire.attach(net, rules)
    zero = [torch.zeros(each.shape) for each in weights(net)]
    sums = [each.clone() for each in zero]
    for step in range(3):
        for each in net.parameters():
            each.grad = None
        (net(batch(device, rank, step)) - 1).square().mean().backward()
        for total, each in zip(sums, net.parameters(), strict=True):
            total += each.grad.full_tensor().cpu() if each.grad is not None else 0
    assert not any(channel.residuals for channel in handle.gradients.channels.values())
    exact = build(device, mesh)
    wanted = [each.clone() for each in zero]
    for step in range(3):
        for each in exact.parameters():
            each.grad = None
        (exact(batch(device, rank, step)) - 1).square().mean().backward()
        for total, each in zip(wanted, exact.parameters(), strict=True):
            total += each.grad.full_tensor().cpu() if each.grad is not None else 0
    for found, want in zip(sums, wanted, strict=True):
        torch.testing.assert_close(found, want, rtol=1e-4, atol=1e-5)


def refusals(device, rank, world):
    """What cannot be done is refused, in words, on every rank; the model then still trains."""
    mesh = meshed(device, world)
    net = build(device, mesh)
    raises(CodecError, "low-rank", thinwire.attach, net, "powersgd")
    raises(CodecError, "agree", thinwire.attach, net, "aps8")
    raises(CodecError, "feed back", thinwire.attach, net, "int8", weights="int4/128+ef")
    raises(thinwire.FormatError, "seed must be an integer", thinwire.attach, net, "int8", seed=0.5)
    raises(InputError, "HSDP", thinwire.attach, net, "int8", inside="int8")
    raises(thinwire.PolicyError, "itn8", thinwire.attach, net, "itn8")
    raises(InputError, "wrap it", thinwire.attach, Net(), "int8")
    raises(thinwire.Disagreement, "attach", thinwire.attach, net, "int8" if rank else "int4")
    own = build(device, mesh)
    own.set_custom_reduce_scatter(type("Own", (), {})())
    raises(InputError, "communication of its own", thinwire.attach, own, "int8")
    thinwire.attach(net, "int8")
    train(net, device, rank, 1)
    assert all(each.isfinite().all() for each in weights(net))


def nbytes_of(parameter, rules):
    """Bytes of a residual's element, if the parameter is trained and compressed."""
    frozen = parameter.info.name.startswith("frozen")
    return 0 if frozen or rules.route(parameter.info).codec == "fp32" else 4


def counts(device, rank, world):
    """Bytes are those of the codecs, and a summary says so."""
    mesh = meshed(device, world)
    net = build(device, mesh)
    handle = thinwire.attach(net, "int8", weights="int8")
    train(net, device, rank, 2)
    stats = handle.stats()
    groups = sharded_groups(net)
    rules = policy.get("int8")

    def nbytes(group, *, trained):
        chosen = [each for each in group.parameters if not trained or not each.info.name.startswith("frozen")]
        return (world - 1) * sum(
            codecs.get(rules.route(each.info).codec).nbytes(each.numel) for each in chosen
        )

    wanted = 2 * sum(nbytes(group, trained=True) for group in groups)
    assert stats["directions"]["gradients"]["sent_nbytes"] == wanted
    passes = [1 if isinstance(group.inner.modules[0], Net) else 2 for group in groups]
    wanted = 2 * sum(
        count * nbytes(group, trained=False) for count, group in zip(passes, groups, strict=True)
    )
    assert stats["directions"]["weights"]["sent_nbytes"] == wanted
    assert stats["sent_nbytes"] == sum(each["sent_nbytes"] for each in stats["directions"].values())
    assert stats["steps"] == 2
    assert stats["layers"]["head.weight"]["codec"] == "int8/256"
    handle.summary()
    told = fsdp._first_lines(thinwire.attach(net, "int4"))
    kept = sum(parameter.numel for parameter in handle.tensors.values() if nbytes_of(parameter, rules))
    assert told[0].startswith("thinwire: gradients: int4 on 5 of 14 tensors, "), "two of 16 are frozen"
    assert f"residuals of {4 * world * kept / 1e6:,.1f} MB" in told[1]
    silent = build(device, mesh)
    alone = thinwire.attach(silent, "noop", weights="noop")
    train(silent, device, rank, 2)
    assert (alone.step, alone.sent_nbytes) == (2, 0)


def auto(device, rank, world):
    """It tries every candidate, all ranks choose the same, and training goes on with equal bits."""
    net = build(device, meshed(device, world))
    handle = thinwire.attach(net, "auto")
    steps = len(sharded_auto.CANDIDATES) * (sharded_auto.SETTLE[device.type] + sharded_auto.TRIAL) + 1
    train(net, device, rank, steps - 1)
    assert not handle.auto.settled
    train(net, device, rank, 4, first=steps)
    assert handle.auto.settled
    described = handle.stats()["auto"]
    assert len(set(everyone(json.dumps(described)))) == 1, "ranks chose or measured differently"
    assert all(seconds > 0 for seconds in described["candidates"].values())
    chosen = handle.auto.chosen
    assert handle.stats()["label"] == f"auto -> {chosen.gradients}"
    assert (handle.parameters.policy.name if handle.parameters.policy else None) == chosen.weights
    assert handle.gradients.policy.name == chosen.gradients
    assert all(each.isfinite().all() for each in weights(net))
    again = thinwire.attach(build(device, meshed(device, world)), "auto")
    again.load_state_dict(handle.state_dict())
    assert (again.auto.chosen, again.step) == (chosen, handle.step)
    onebit = build(device, meshed(device, world))
    lossy = thinwire.attach(onebit, "onebit")
    train(onebit, device, rank, 2)
    fresh = thinwire.attach(build(device, meshed(device, world)), "auto")
    fresh.load_state_dict(lossy.state_dict())
    assert not fresh.auto.settled
    assert fresh.pending["head.weight"].norm() > 0, "its residuals are added to the next gradients"


class Tied(nn.Module):
    """Two modules that share a weight, and a layer between."""

    def __init__(self):
        super().__init__()
        self.first, self.second = nn.Linear(WIDTH, 300, bias=False), nn.Linear(WIDTH, 300, bias=False)
        self.second.weight = self.first.weight
        self.middle = nn.Linear(300, 300)

    def forward(self, x):
        return self.middle(self.first(x)) + self.second(x)


def backward(net, device, rank, step=0):
    (net(batch(device, rank, step)) - 1).square().mean().backward()


def far(make, run, recipe="int8", **options):
    """The error of a model's gradients against those of the same model without thinwire; and its handle."""
    found = []
    for codec in (None, recipe):
        net = make()
        handle = thinwire.attach(net, codec, **options) if codec else None
        run(net)
        found.append(torch.cat([each.flatten().float() for each in gradients_of(net)]))
    return ((found[1] - found[0]).norm() / found[0].norm()).item(), handle


def shared(device, rank, world):
    """Modules that `fully_shard` puts into one group are one; tied weights have one name."""
    mesh = meshed(device, world)

    def make():
        torch.manual_seed(0)
        net = Tied().to(device)
        fully_shard([net.first, net.second], mesh=mesh)
        return fully_shard(net, mesh=mesh)

    error, handle = far(make, lambda net: backward(net, device, rank), weights="int8")
    assert 0 < error < 0.03
    assert (len(handle.groups), handle.step) == (2, 1)
    assert sorted(handle.tensors) == ["first.weight", "middle.bias", "middle.weight"]
    handle.detach()

    def columns():
        torch.manual_seed(0)
        net = nn.Sequential(nn.Linear(WIDTH, 48 * world), nn.Linear(48 * world, 300)).to(device)
        place = lambda each: Shard(1) if each.shape[-1] == 48 * world and each.ndim == 2 else None  # noqa: E731
        return fully_shard(net, mesh=mesh, shard_placement_fn=place)

    error, handle = far(columns, lambda net: backward(net, device, rank), "int4", weights="int8")
    assert 0 < error < 0.5
    owed = reshard(everyone(handle.state_dict()), handle.shapes)
    net = columns()
    taker = thinwire.attach(net, "int4")
    taker.load_state_dict(owed)
    (net(batch(device, rank, 0)) * 0).sum().backward()
    left = reshard(everyone(taker.state_dict()), taker.shapes)["pending"]["1.weight"]
    found = net[1].weight.grad.full_tensor().cpu() + left.cpu()
    torch.testing.assert_close(found, owed["pending"]["1.weight"].cpu(), rtol=1e-4, atol=1e-6)
    raises(InputError, "other dimensions", taker.load_state_dict, {**taker.state_dict(), "dims": {}})


def anytime(device, rank, world):
    """Attach, detach and ask between any two passes; a compiled model; nothing is kept alive."""
    mesh = meshed(device, world)
    net = build(device, mesh)
    first = thinwire.attach(net, "int8")
    with torch.no_grad():
        net(batch(device, rank, 0))  # the outermost module's parameters stay gathered
    assert thinwire.integrations.attached(net) is first
    second = thinwire.attach(torch.compile(net, backend="eager"), "int4", weights="int8")
    assert thinwire.integrations.attached(net) is second
    train(net, device, rank, 1)
    with torch.inference_mode():
        net(batch(device, rank, 0))
    net.unshard(async_op=True).wait()
    assert (first.step, second.step) == (0, 1)
    thinwire.integrations.detach(net)
    train(net, device, rank, 1)
    assert second.step == 1
    third = thinwire.attach(net, "int4")
    train(net, device, rank, 1)
    alive = weakref.ref(net), weakref.ref(third)
    del net, first, second, third
    for _ in range(100):  # a thread of autograd may still be releasing its last work
        gc.collect()
        if not any(each() for each in alive):
            break
        time.sleep(0.1)
    assert [each() for each in alive] == [None, None]


def separate(device, rank, world):
    """A group of its own for the reduce-scatter; unused parameters that are reduced too."""
    mesh = meshed(device, world)
    for late in (False, True):
        net = build(device, mesh)
        if not hasattr(net, "set_separate_reduce_scatter_group"):
            break
        if not late:
            net.set_separate_reduce_scatter_group(True)
        handle = thinwire.attach(net, "int8", weights="int8")
        if late:
            net.set_separate_reduce_scatter_group(True)
        train(net, device, rank, 1)
        for name, sent in handle.stats()["directions"].items():
            assert sent["sent_nbytes"] < 0.5 * sent["plain_nbytes"], (name, sent)
    net = Net(unused=True).to(device)
    for each in (net.unused, net):
        fully_shard(each, mesh=mesh)
    for group in sharded_groups(net):
        group.inner.reduce_scatter_unused_params = True
    handle = thinwire.attach(net, "int8")
    backward(net, device, rank)
    assert handle.step == 1


def moments(device, rank, world):
    """Rules by step for weights: both passes of a step use the same bits, also at the step that changes."""
    mesh = meshed(device, world)
    rules = Policy(
        "two", (Rule("int4/128", min_ndim=2, last_step=1), Rule("int8/256", min_ndim=2), Rule("fp32"))
    )

    def deep():
        net = Net()
        net.blocks = nn.Sequential(*(Block() for _ in range(4)))
        return net

    net = build(device, mesh, deep)
    handle = thinwire.attach(net, "fp32", weights=rules)
    for step in range(3):
        with watched(handle, "gather") as calls:
            train(net, device, rank, 1)
        outputs = {}
        for group, _, _, output, _ in calls:
            outputs.setdefault(group.index, []).append(output)
        for several in outputs.values():
            assert all(torch.equal(each, several[0]) for each in several), step
    raises(thinwire.PolicyError, "", thinwire.attach, net, Policy("none", (Rule("int8/256", min_ndim=9),)))


def sums(device, rank, world):
    """HSDP where FSDP asks for sums: 16-bit floats, divide factors; all-reduces left out; rules by step."""
    square = meshed(device, 2, world // 2)
    half = MixedPrecisionPolicy(torch.float16, torch.float16)

    def divided(net):
        for module in net.modules():
            if isinstance(module, FSDPModule):
                module.set_gradient_divide_factor(0.5)
                module.set_force_sum_reduction_for_comms(True)
        backward(net, device, rank)

    def accumulated(net):
        for micro in range(3):
            net.set_requires_all_reduce(micro == 2)
            backward(net, device, rank, micro)

    plain = partial(backward, device=device, rank=rank)
    for make, run in (
        (lambda: build(device, square, mp_policy=half), plain), (lambda: build(device, square), divided),
        (lambda: build(device, square), accumulated),
    ):  # fmt: skip
        error, handle = far(make, run, inside="int8")
        assert 0 < error < 0.03, error
        sent = handle.stats()["directions"]["replicas"]
        assert sent["sent_nbytes"] < 0.6 * sent["plain_nbytes"], sent
    rules = Policy("two", (Rule("onebit/512+ef", min_ndim=2, last_step=1), Rule("fp32")))

    def three(net):
        for step in range(3):
            backward(net, device, rank, step)

    error, handle = far(lambda: build(device, square), three, rules)
    assert error < 1e-4, "the residuals of the first codec were lost"
    assert not any(channel.residuals for channel in handle.averages.channels.values())


def unsplit(device, rank, world):
    """Replicas that split nothing count steps; what they owe goes to other meshes, also to those of sums."""
    square, tall = meshed(device, 2, world // 2), meshed(device, world, 1)
    net = build(device, tall)
    handle = thinwire.attach(net, "int4")
    train(net, device, rank, 3)
    assert handle.step == 3
    owed = reshard(everyone(handle.state_dict()), handle.shapes)
    for target in (tall, square):
        net = build(device, target)
        taker = thinwire.attach(net, "int4")
        taker.load_state_dict(owed)
        if target is square:
            for module in net.modules():
                if isinstance(module, FSDPModule):
                    module.set_force_sum_reduction_for_comms(True)
        (net(batch(device, rank, 0)) * 0).sum().backward()
        assert not taker.pending
        left = reshard(everyone(taker.state_dict()), taker.shapes)["pending"]["head.weight"]
        found = net.head.weight.grad.full_tensor().cpu() + left.cpu()
        torch.testing.assert_close(found, owed["pending"]["head.weight"].cpu(), rtol=1e-4, atol=1e-6)


def meshes(device, rank, world):
    """Tensor parallelism beside shards; replicas alone are refused; a rank of HSDP that attaches another."""
    for shape in ((2, world // 2), (2, 1, world // 2)):
        names = ("replicas", "shards", "tensors")[-len(shape) :]
        mesh = init_device_mesh(device.type, shape, mesh_dim_names=names)

        def make(mesh=mesh, names=names):
            torch.manual_seed(0)
            net = nn.Sequential(nn.Linear(WIDTH, 512), nn.ReLU(), nn.Linear(512, 300)).to(device)
            parallelize_module(net, mesh["tensors"], {"0": ColwiseParallel(), "2": RowwiseParallel()})
            return fully_shard(net, mesh=mesh[names[:-1]])

        run = partial(backward, device=device, rank=rank // (world // 2))
        error, _ = far(make, run)
        assert 0 < error < 0.03, (shape, error)
        net = make()
        handle = thinwire.attach(net, "int4")
        run(net)
        for each in handle.averages.channels.values():
            for name in ("0.weight", "2.weight"):
                numel = sum(residual.numel() for residual in each.residuals_of(name).values())
                assert numel <= 1.5 * math.prod(handle.shapes[name]), "of this rank's part alone"
        handle.load_state_dict(handle.state_dict())
        raises(InputError, "tensor parallel", sharded_state, handle)
    with suppress(ImportError):
        from torch.distributed._composable.replicate_with_fsdp import replicate

        alone = replicate(Net(), mesh=meshed(device, world))
        raises(InputError, "replicated, not sharded", thinwire.attach, alone, "int8")
    net = build(device, meshed(device, 2, world // 2))
    raises(thinwire.Disagreement, "attach", thinwire.attach, net, "int4" if rank == world - 1 else "int8")


def checkpointed(device, rank, world):
    """A distributed checkpoint: the same mesh goes on with the same bits, another owes the same."""
    mesh, square = meshed(device, world), meshed(device, 2, world // 2)
    with tempfile.TemporaryDirectory() as own:
        folder = everyone(own)[0]
        net = build(device, mesh)
        handle = thinwire.attach(net, "int4", seed=SEED)
        train(net, device, rank, 3)
        dcp.save({"model": net.state_dict(), "thinwire": sharded_state(handle)}, checkpoint_id=folder)
        again = build(device, mesh)
        loaded = {"model": again.state_dict()}
        dcp.load(loaded, checkpoint_id=folder)
        again.load_state_dict(loaded["model"])
        other = thinwire.attach(again, "int4", seed=SEED)
        load_sharded(other, folder)
        taker = thinwire.attach(build(device, square), "int4")
        load_sharded(taker, folder)
        dist.barrier()
    owed = reshard(everyone(handle.state_dict()), handle.shapes)["pending"]
    assert taker.step == 3
    assert taker.pending.keys() == owed.keys()
    for name, each in owed.items():
        torch.testing.assert_close(taker.pending[name].cpu(), each.cpu())
        assert each.norm() > 0
    for each in (net, again):
        train(each, device, rank, 2, first=3)
    assert digest(weights(net)) == digest(weights(again))


CHECKS = (
    bits, gathered, plain, accumulation, options, not_finite, resumed, phases, refusals, counts, shared,
    anytime, separate, moments, auto,
)  # fmt: skip
SQUARE = (replicas, resharded, sums, unsplit, meshes, checkpointed)  #: for four ranks
