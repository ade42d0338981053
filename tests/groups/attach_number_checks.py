"""`thinwire.attach` and numbers: 16 bits, infinities, double buffers, shadows, counts, errors everywhere."""

import contextlib
import io
import math
import shutil
import tempfile
import time
from datetime import timedelta

import own_codec
import torch
import torch.distributed as dist
from attach_tools import Bag, alike, bag, equal, everyone, feed, go, saved, wanted
from ddp_program import Net, batch, model, train
from start_program import digest, raises
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import thinwire
from thinwire import codecs, policy
from thinwire.errors import Disagreement, PolicyError
from thinwire.policy import Policy, Rule
from thinwire.runtimes.trace import trace

SHAPES = [(120, 100), (50,), (30, 20), (101, 130)]
SCALED = ("int8", "fp8", "aps8", "onebit", "int4", "topk/0.01")
BAD = (
    (math.inf, 7),
    (0.0, 0),
    (-math.inf, 24_999),
    (math.nan, 12_345),
    (0.0, 0),
)  # what comes where; 0: none
PATIENCE_S = 4  # of groups in which something goes wrong


def sixteen_bits(rank, world):
    """Parameters, and so gradients, of 16 bits."""
    del world
    for dtype in (torch.bfloat16, torch.float16):
        for name in ("fp32", "int8", "onebit", "powersgd", "hybrid-layers", "aps8"):
            torch.manual_seed(0)
            net = DistributedDataParallel(Net().to(dtype))
            handle = thinwire.attach(net, name)
            train(net, rank, 3, dtype=dtype)
            assert all(parameter.isfinite().all() for parameter in net.parameters()), (name, dtype)
            alike(digest([parameter.view(torch.int16) for parameter in net.parameters()]))
        plain = DistributedDataParallel(Bag(SHAPES, dtype=dtype))
        handle = thinwire.attach(plain, "fp32")
        feed(plain, wanted(SHAPES, rank, 0, dtype))
        numel = sum(map(math.prod, SHAPES))
        assert handle.sent_nbytes == trace(numel, "bf16", handle.world, "native").sent_nbytes, (
            handle.sent_nbytes
        )
    return None


def scaled(rank, world):
    """A GradScaler: after an infinity on one rank all skip the step, and go on."""
    for name in SCALED:
        net = model()
        thinwire.attach(net, name)
        optimizer = torch.optim.SGD(net.parameters(), 0.1)
        scaler = torch.amp.GradScaler("cpu", init_scale=256.0, growth_interval=3)
        for step in range(6):
            x, y = batch(rank, step)
            optimizer.zero_grad()
            loss = scaler.scale(nn.functional.cross_entropy(net(x), y))
            if step == 2 and rank == world - 1:
                loss = loss * float("inf")
            before, scale = digest(net.parameters()), scaler.get_scale()
            loss.backward()
            scaler.step(optimizer)
            scaler.update()
            skipped = digest(net.parameters()) == before
            assert skipped == (step == 2), f"{name}, step {step}: skipped is {skipped}"
            assert (scaler.get_scale() < scale) == skipped, f"{name}, step {step}: {scaler.get_scale()}"
            assert all(parameter.isfinite().all() for parameter in net.parameters()), name
            alike(digest(net.parameters()))
    return net


def one_infinity(rank, world):
    """One element of one rank is not finite: no recipe hides that, and the next step is as if nothing was."""
    for name in (*policy.RECIPES, "topk/0.01", "topk/0.01+ef", "randomk/0.1~unbiased", "sign/64+ef"):
        shapes = [(250, 100), (300, 100)]
        net = bag(shapes)
        thinwire.attach(net, name)
        came = []
        for step, (bad, at) in enumerate(BAD):
            gradients = wanted(shapes, rank, step)
            if rank == world - 1 and bad:
                gradients[0].view(-1)[at] = bad
            first, second = feed(net, gradients)
            assert bool(first.isfinite().all()) != bool(bad), f"{name} {bad} step {step}"
            assert second.isfinite().all(), f"{name} {bad} step {step}: the other tensor"
            came += [first.nan_to_num(7.0), second]
        alike(digest(came))
    return net


def double_buffer(rank, world):
    """Step t uses the mean gradient of step t - 1; runs resume; residuals are sent."""
    del world
    ours, reference = model(), model()
    thinwire.attach(ours, "fp32", double_buffer=True)
    held = [torch.zeros_like(each) for each in reference.parameters()]
    for step in range(5):
        train(ours, rank, 1, first=step)
        x, y = batch(rank, step)
        reference.zero_grad()
        nn.functional.cross_entropy(reference(x), y).backward()
        fresh = [parameter.grad.clone() for parameter in reference.parameters()]
        for parameter, gradient in zip(reference.parameters(), held, strict=True):
            parameter.data.add_(gradient, alpha=-0.2)
        held = fresh
        equal(ours, reference, f"step {step}")
    for name in ("int8", "onebit", "powersgd"):
        whole, first, second = (model(bucket_cap_mb=0.05) for _ in range(3))
        handles = [thinwire.attach(net, name, double_buffer=True) for net in (whole, first, second)]
        train(whole, rank, 6)
        train(first, rank, 3)
        second.load_state_dict(first.state_dict())
        handles[2].load_state_dict(saved(handles[1].state_dict()))
        train(first, rank, 3, first=3)
        train(second, rank, 3, first=3)
        equal(first, whole, f"{name}: saved")
        if name != "powersgd":  # sums of the network depend on buckets, which DDP makes anew
            equal(second, whole, f"{name}: resumed")
        alike(digest(second.parameters()))
    return ours


def shadows(rank, world):
    """A shadow measures the true error and changes nothing."""
    for name, low, high in (("int8", 0.001, 0.05), ("onebit", 0.1, 1.0), ("powersgd", 0.3, 1.2)):
        plain, watched = bag(SHAPES, decay=0.1), bag(SHAPES, decay=0.1)
        thinwire.attach(plain, name)
        handle = thinwire.attach(watched, name, shadow=2)
        for step in range(3):
            go(plain, SHAPES, rank, 1, step)
            go(watched, SHAPES, rank, 1, step)
            errors = {key: each["true_error"] for key, each in handle.stats()["layers"].items()}
            if step == 0:
                assert set(errors.values()) == {None}
        equal(plain, watched, name)
        assert low < min(errors["w0"], errors["w3"]), (name, errors)
        assert max(errors["w0"], errors["w3"]) < high, (name, errors)
        assert max(errors["w1"], errors["w2"]) < 1e-6, errors
    raises(thinwire.errors.InputError, "number of steps", thinwire.attach, plain, "int8", shadow=-1)
    del world
    return watched


def noop(rank, world):
    """Nothing is sent, so replicas drift apart."""
    net = model()
    handle = thinwire.attach(net, "noop")
    train(net, rank, 3)
    stats = handle.stats()
    assert (stats["steps"], stats["sent_nbytes"], stats["policy"]) == (3, 0, "noop")
    assert len(set(everyone(digest(net.parameters())))) == world
    alone = model()
    with alone.no_sync():
        train(alone, rank, 3)
    equal(net, alone, "as alone")
    with contextlib.redirect_stdout(io.StringIO()):
        handle.summary()
    return None


STATS = {
    "policy", "world", "step", "steps", "sent_nbytes", "fp32_nbytes", "ratio", "step_s", "seconds", "overlap",
    "usual_s", "layers", "uncompressed", "level", "auto", "buffers_nbytes", "residuals_nbytes",
    "label", "since",
}  # fmt: skip
LAYER = {
    "codec", "schedule", "numel", "wire_nbytes", "error", "snr_db", "true_error", "residual_norm", "why",
}  # fmt: skip
LINES = (
    "ratio", "step_s", "overlap", "sent_MB_per_step", "seconds_per_step/wire", "snr_db/w3", "true_error/w0",
    "residual_norm/w3",
)  # fmt: skip
COUNTED = [(301, 100), (50,), (30, 20), (700, 100)]


def counts(rank, world):
    """Every number of `stats`, against what the messages of a rank are; the table; TensorBoard."""
    folder = everyone("" if rank else tempfile.mkdtemp(prefix="thinwire-board-"))[0]
    began = time.perf_counter()
    net = bag(COUNTED, decay=0.1)
    handle = thinwire.attach(net, "int4", tensorboard=folder, shadow=3)
    assert (handle.board is not None) == (rank == 0)
    go(net, COUNTED, rank, 11)
    stats, elapsed = handle.stats(), time.perf_counter() - began
    assert set(stats) == STATS
    assert all(set(each) == LAYER for each in stats["layers"].values())
    assert [stats[key] for key in ("step", "steps", "world", "level", "auto")] == [11, 11, world, None, None]
    encoded = sum(each["numel"] for each in stats["layers"].values() if each["codec"] != "fp32")
    assert 4 * encoded <= stats["residuals_nbytes"] < 8 * encoded  # float32; owners of shards keep less
    sent = bytes_sent(stats, rank, world)
    seconds_and_errors(stats, elapsed)
    said = io.StringIO()
    with contextlib.redirect_stdout(said):
        handle.summary()
    assert bool(said.getvalue()) == (rank == 0)
    with contextlib.redirect_stdout(said):
        handle.summary(everywhere=True)
    assert repr(handle).startswith("<thinwire.Handle int4: 11 steps, ")
    assert len(repr(handle)) < 80
    for text in ("int4: 11 steps", "not compressed: 2 tensors", "w3", "int4/128+ef"):
        assert text in said.getvalue(), said.getvalue()
    if rank == 0:
        (line,) = scalars(folder, LINES)["sent_MB_per_step"]
        assert line.step == 10
        assert abs(line.value - sent / 1e6) < 1e-6, line
    return net


def bytes_sent(stats, rank, world):
    """By one rank in a step: tensors of the same codec and schedule travel together."""
    routes, sent, fp32 = {}, 0, 0
    for each, shape in zip(stats["layers"].values(), COUNTED, strict=True):
        routes.setdefault((each["codec"], each["schedule"]), []).append(math.prod(shape))
    assert {codec for codec, _ in routes} == {"int4/128+ef", "fp32"}
    for (codec, schedule), numels in routes.items():
        sent += trace(numels, codec, world, schedule, rank=rank).sent_nbytes
        fp32 += trace(sum(numels), "fp32", world, "native").sent_nbytes
    assert stats["sent_nbytes"] == 11 * sent, (stats["sent_nbytes"], 11 * sent)
    assert stats["fp32_nbytes"] == 11 * fp32
    assert abs(fp32 - 2 * (world - 1) / world * 4 * sum(map(math.prod, COUNTED))) < 64
    assert stats["ratio"] == stats["fp32_nbytes"] / stats["sent_nbytes"]
    return sent


def seconds_and_errors(stats, elapsed):
    seconds, layer, left = stats["seconds"], stats["layers"]["w3"], stats["uncompressed"]
    assert set(seconds) == {"encode", "wire", "decode", "wait"}
    assert min(seconds.values()) >= 0
    assert 0 < seconds["encode"] + seconds["wire"] + seconds["decode"] < elapsed
    assert seconds["wait"] <= elapsed
    assert 0 <= stats["overlap"] <= 1
    assert 0 < stats["step_s"] < elapsed
    assert layer["wire_nbytes"] == codecs.get("int4/128").nbytes(70_000)
    assert 0.03 < layer["error"] < 0.3
    assert abs(layer["snr_db"] + 20 * math.log10(layer["error"])) < 1e-9
    assert 0.01 < layer["true_error"] < 0.4
    assert layer["residual_norm"] > 0
    assert left["tensors"] == sum(left["why"].values()) == 2
    assert abs(left["share_of_bytes"] - 650 / sum(map(math.prod, COUNTED))) < 1e-9


def scalars(folder, names):
    """What TensorBoard would show."""
    board = EventAccumulator(folder)
    board.Reload()
    shutil.rmtree(folder)
    return {name: board.Scalars(f"thinwire/{name}") for name in names}


def low_rank_counts(rank, world):
    """PowerSGD sends two thin matrices, which is what the table says."""
    shapes = [(300, 100)]
    net = bag(shapes)
    handle = thinwire.attach(net, "powersgd")
    go(net, shapes, rank, 2)
    layer = handle.stats()["layers"]["w0"]
    assert layer["wire_nbytes"] == 4 * 400 * 4, layer
    assert handle.sent_nbytes == 2 * trace(30_000, "fp32", world, "low_rank/4", shapes=shapes).sent_nbytes
    assert layer["error"] is None, layer
    return net


def resumed_counts(rank, world):
    """What a step takes and sends is right after a run was resumed."""
    del world
    folder = everyone("" if rank else tempfile.mkdtemp(prefix="thinwire-board-"))[0]
    first, second = model(), model()
    handle = thinwire.attach(first, "int8")
    train(first, rank, 19)
    again = thinwire.attach(second, "int8", tensorboard=folder)
    again.load_state_dict(handle.state_dict())
    train(second, rank, 2)
    assert again.step == 21
    a_step = handle.sent_nbytes / 19
    assert again.sent_nbytes / again.stats()["steps"] == a_step, again.stats()["steps"]
    assert min(again.stats()["seconds"][kind] for kind in ("encode", "wire", "decode")) > 0
    if rank == 0:
        (line,) = scalars(folder, ["sent_MB_per_step"])["sent_MB_per_step"]
        assert line.step == 20
        assert abs(line.value * 1e6 - a_step) < 1, (line, a_step)
    return None


def bad_policies(rank, world):
    """A policy that leaves a tensor out is an error on every rank, at once or at the same step."""
    lacking = Policy("lacking", (Rule("int8/256", min_ndim=2),))
    net = model()
    raises(PolicyError, "end with a rule for everything", thinwire.attach, net, lacking)
    assert thinwire.integrations.attached(net) is None
    train(net, rank, 1)
    late = Policy("late", (Rule("int8/256", last_step=1),))
    net = model()
    thinwire.attach(net, late)
    train(net, rank, 2)
    raises(PolicyError, "end with a rule for everything", train, net, rank, 1)
    del world
    return None


def own_codecs(rank, world):
    """A codec of a user, with residuals: the bits of the same numbers by name, a resumed run, a bare hook."""
    by_name, given, hooked = bag(SHAPES), bag(SHAPES), bag(SHAPES)
    mine = own_codec.block(feedback="float32")
    thinwire.attach(by_name, "nf4/64+ef")
    handle = thinwire.attach(given, mine)
    hooked.register_comm_hook(*thinwire.hooks.get(mine, hooked.module))
    for net in (by_name, given, hooked):
        go(net, SHAPES, rank, 3)
        equal(net, by_name)
    state = saved(handle.state_dict())
    assert state["routes"]["w0"][0] == mine.spec in state["channels"]
    again = bag(SHAPES)
    again.module.load_state_dict(given.module.state_dict())
    thinwire.attach(again, mine).load_state_dict(state)
    for net in (by_name, again):
        go(net, SHAPES, rank, 2, first=3)
    equal(again, by_name)
    handle = thinwire.attach(given, own_codec.Steps(feedback="bfloat16"))
    go(given, SHAPES, rank, 3)
    assert handle.stats()["layers"]["w0"]["codec"] == "steps+ef:bf16"
    del world
    return given


def disagreements(rank, world):
    """Ranks with different codecs: an error on every rank, at once from attach, soon from bare hooks."""
    for pair in (("int8", "int4"), ("int8", "powersgd"), ("fp32", "int8")):
        group = dist.new_group(list(range(world)), timeout=timedelta(seconds=PATIENCE_S))
        net = model(process_group=group)
        raises(Disagreement, f"rank 0 called attach of {pair[0]}", thinwire.attach, net, pair[rank > 0])
        net.register_comm_hook(*thinwire.hooks.get(pair[rank > 0], net.module, group))
        began = time.perf_counter()
        try:
            train(net, rank, 2)
        except Exception as error:  # noqa: BLE001
            said = str(error)
        else:
            raise AssertionError(f"{pair}: no error")
        assert time.perf_counter() - began < 3 * PATIENCE_S, f"{pair}: {time.perf_counter() - began}"
        assert pair != ("int8", "int4") or "disagree" in said, said
        dist.barrier()
    return None


CHECKS = (
    sixteen_bits, scaled, one_infinity, double_buffer, shadows, noop, counts, low_rank_counts, resumed_counts,
    bad_policies, disagreements, own_codecs,
)  # fmt: skip
