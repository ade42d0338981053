"""What ranks do with `SubBatches`, compared with one device in plain torch.

    python sub_batch_program.py WORLD [faults]

Every rank reports every check: what went wrong ("" if nothing), and a digest of what all ranks must hold.
"""

import copy
import math
import os
import signal
import sys
import time
import traceback
from contextlib import nullcontext

import torch
import torch.distributed as dist
from start_program import digest, join, raises, report, start
from torch import nn
from torch.nn.functional import cross_entropy
from torch.nn.parallel import DistributedDataParallel

import thinwire
from thinwire.errors import CodecError, CommError, Disagreement, InputError
from thinwire.parallel import SubBatches
from thinwire.parallel.sub_batches_layers import mask
from thinwire.rounding import Stream

TIMEOUT_S, FAULT_S, SLACK_S = 60, 7, 6  #: the last: a busy machine
SAMPLES, CLASSES = 6, 10  #: samples of a rank
NEAR = 2e-6  #: of sums that are added in another order, in float32
EXACT = {"forward": None, "backward": None}
SMALL = {"min_numel": 0}


def features():
    return nn.Sequential(nn.Conv2d(1, 3, 3, padding=1), nn.Tanh(), nn.AvgPool2d(2), nn.Flatten())


def classifier(dropout=0.0, smooth=False):
    return nn.Sequential(
        nn.Dropout(dropout), nn.Linear(48, 30), nn.GELU() if smooth else nn.ReLU(inplace=True),
        nn.Dropout(dropout), nn.Linear(30, 18, bias=False), nn.Tanh(),
        nn.Linear(18, CLASSES),
    )  # fmt: skip


def nets(count, how=EXACT, dropout=0.0, smooth=False, **options):
    """The network in sub-batches, and the same on one device."""
    torch.manual_seed(0)
    alone = nn.Sequential(features(), classifier(dropout, smooth))
    first, second = copy.deepcopy(alone)
    if dist.get_rank():  # rank 0's weights count, those of others do not
        for each in second.parameters():
            each.data.zero_()
    return SubBatches(DistributedDataParallel(first), second, count, **{**SMALL, **how, **options}), alone


def data(world, step=0, samples=SAMPLES):
    """All ranks' samples and labels; rank r has the r-th part."""
    generator = torch.Generator().manual_seed(step)
    x = torch.randn(world * samples, 1, 8, 8, generator=generator)
    return x, torch.randint(CLASSES, (len(x),), generator=generator)


def mine(rank, world, *tensors):
    return [each.chunk(world)[rank] for each in tensors]


def away(found, expected):
    pairs = [(a.detach(), b.detach()) for a, b in zip(found, expected, strict=True)]
    return max(float((a - b).norm() / (b.norm() + 1e-12)) for a, b in pairs)


def together(tensors):
    return [torch.cat([each.detach().flatten() for each in tensors])]


def slices(net, alone):
    """This rank's parts of all gradients, and the parts of one device's that they should equal."""
    found = [each.grad for each in net.parameters()]
    expected = [each.grad for each in alone[0].parameters()]
    for each in alone[1].parameters():
        expected.append(each.grad.tensor_split(dist.get_world_size())[dist.get_rank()])
    return found, expected


def gradients(rank, world):
    """Those of one device with the whole batch, for every number of sub-batches, also uneven ones."""
    x, y = data(world)
    own_x, own_y = mine(rank, world, x, y)
    for count in (1, 2, 3, 4, SAMPLES, None):
        net, alone = nets(count)
        outputs = net(own_x)
        wanted = alone(x)
        assert away([outputs], mine(rank, world, wanted)) < NEAR, count
        loss = cross_entropy(outputs, own_y)
        loss.backward()
        cross_entropy(wanted, y).backward()
        assert away(*slices(net, alone)) < NEAR, (count, away(*slices(net, alone)))
        assert net.count == (count or world)
        wanted = cross_entropy(wanted.detach(), y)
        mean = loss.detach().clone().view(1)
        dist.all_reduce(mean)
        assert abs(mean.item() / world - wanted.item()) < 1e-5


def training(rank, world):
    """Momentum SGD and Adam end with the weights of one device; replicas are equal after every step."""
    held = []
    for make in (
        lambda p: torch.optim.SGD(p, 0.1, momentum=0.9),
        lambda p: torch.optim.Adam(p, 1e-2, eps=1e-3),
    ):
        net, alone = nets(2)
        ours, theirs = make(net.parameters()), make(alone.parameters())
        for step in range(4):
            net.count = 1 + step % 3
            x, y = data(world, step)
            own_x, own_y = mine(rank, world, x, y)
            ours.zero_grad()
            cross_entropy(net(own_x), own_y).backward()
            ours.step()
            theirs.zero_grad()
            cross_entropy(alone(x), y).backward()
            theirs.step()
            held += [each.detach().clone() for each in net.features.parameters()]
        whole = net.whole()
        assert away(whole.parameters(), alone.parameters()) < 20 * NEAR
        held += list(whole.parameters())
    return held


def updates(rank, world):
    """With an update for each sub-batch: one device that takes the sub-batches one after another."""
    held = []
    for count in (1, 2, 3):
        net, alone = nets(count, dropout=0.3)
        net.train()
        ours = torch.optim.SGD(net.features.parameters(), 0.1)
        ours_connected = torch.optim.Adam(net.classifier.parameters(), 1e-2, eps=1e-3)
        theirs = torch.optim.SGD(alone[0].parameters(), 0.1)
        theirs_connected = torch.optim.Adam(alone[1].parameters(), 1e-2, eps=1e-3)
        for step in range(3):
            x, y = data(world, step)
            own_x, own_y = mine(rank, world, x, y)
            ours.zero_grad()
            loss = net.update_each(own_x, labels=own_y, loss=cross_entropy, optimizer=ours_connected)
            loss.backward()
            ours.step()
            theirs.zero_grad()
            wanted = one_by_one(alone, x, y, world, count, step + 1, theirs_connected)
            theirs.step()
            mean = loss.detach().clone().view(1)
            dist.all_reduce(mean)
            assert abs(mean.item() / world - wanted) < 1e-5
            held += [each.detach().clone() for each in net.features.parameters()]
        whole = net.whole()
        assert away(whole.parameters(), alone.parameters()) < 20 * NEAR, count
        held += list(whole.parameters())
    return held


def one_by_one(alone, x, y, world, count, step, optimizer):
    """The same on one device: K updates of the layers, the gradient of features from all sub-batches."""
    found = alone[0](x)
    parts = found.detach().view(world, count, -1, found.shape[1])
    labels = y.view(world, count, -1)
    errors, losses = torch.empty_like(parts), []
    for k in range(count):
        given = parts[:, k].flatten(0, 1).requires_grad_()
        loss = cross_entropy(dropped(alone[1], given, step, k + 1), labels[:, k].flatten())
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        errors[:, k] = given.grad.view(world, -1, found.shape[1])
        losses.append(loss.item())
    found.backward(errors.view_as(found) / count)
    return sum(losses) / count


def dropped(classifier, x, step, k):
    """The layers with the masks that all ranks draw."""
    linears = 0
    for module in classifier:
        if isinstance(module, nn.Dropout):
            where = "1 after 1" if linears else "0 before 1"
            stream = Stream(0, step=step, tensor=f"dropout {where}, sub-batch {k}")
            x = x * mask(stream, len(x), x.shape[1], module.p, x)
        else:
            x = module(x)
            linears += isinstance(module, nn.Linear)
    return x


def dropout(rank, world):
    """Masks are those of the whole layer, for any number of ranks; in evaluation there are none."""
    net, alone = nets(2, dropout=0.4)
    x, y = data(world)
    own_x, own_y = mine(rank, world, x, y)
    cross_entropy(net(own_x), own_y).backward()
    found = alone[0](x)
    rows = found.view(world, 2, -1, found.shape[1])
    losses = []
    for k in range(2):
        outputs = dropped(alone[1], rows[:, k].flatten(0, 1), 1, k + 1)
        losses.append(cross_entropy(outputs, y.view(world, 2, -1)[:, k].flatten()))
    (sum(losses) / 2).backward()
    assert away(*slices(net, alone)) < NEAR
    net.eval(), alone.eval()
    with torch.no_grad():
        outputs = net(own_x[:5])  # not divisible by 2
    assert not outputs.requires_grad
    assert away([outputs], [alone(own_x[:5])]) < NEAR


def codecs(rank, world):
    """Errors are those of the codec, bytes are fewer, replicas stay equal; NaN arrives."""
    held = []
    x, y = data(world)
    own_x, own_y = mine(rank, world, x, y)
    for spec, low, high, ratio in (
        ("bf16", 1e-5, 2e-2, 1.6), ("int8", 1e-4, 5e-2, 2.0), ("int4/32", 1e-3, 0.5, 2.5),
        ("qsgd8/512", 1e-4, 0.2, 2.0),
    ):  # fmt: skip
        net, alone = nets(2, {"forward": spec, "backward": spec}, smooth=True)
        cross_entropy(net(own_x), own_y).backward()
        cross_entropy(alone(x), y).backward()
        error = away(*map(together, slices(net, alone)))
        assert low < error < high or world == 1, (spec, error)
        assert world == 1 or net.stats()["ratio"] > ratio, (spec, net.stats())
        held += [each.grad for each in net.features.parameters()]
    net, _ = nets(2, {"forward": "int8", "backward": "int8"})
    spoilt = own_x.clone()
    spoilt[0] = math.nan if rank == 0 else spoilt[0]
    outputs = net(spoilt)
    assert outputs[0].isnan().all() or rank > 0
    cross_entropy(outputs, own_y).backward()
    assert all(each.grad.isnan().any() for each in net.classifier.parameters())
    return held


def repeated(rank, world):
    """Codecs that round at random repeat their numbers after a restart, and differ between steps."""
    own_x, own_y = mine(rank, world, *data(world))
    how = {"forward": "qsgd4/64", "backward": "qsgd4/64"}

    def step(net):
        net.zero_grad()
        cross_entropy(net(own_x), own_y).backward()
        return [each.grad.clone() for each in net.parameters()]

    net, _ = nets(2, how, dropout=0.2)
    first, saved = step(net), copy.deepcopy(net.state_dict())
    second = step(net)
    other, _ = nets(2, how, dropout=0.2, seed=0)
    other.load_state_dict(saved)
    again = step(other)
    assert all(map(torch.equal, second, again))
    assert not all(map(torch.equal, first, second)) or world == 1
    before = copy.deepcopy(other.state_dict())
    saved["_extra_state"]["world"] = world + 1
    for name in saved:
        if name != "_extra_state":
            saved[name] = saved[name] + 1
    raises(InputError, ["slices of rank", f"of {world + 1}"], other.load_state_dict, saved)
    after = other.state_dict()
    assert all(torch.equal(after[name], before[name]) for name in after if name != "_extra_state")
    return second[:2]


def with_attach(rank, world):
    """The gradients of features, encoded by `thinwire.attach`; frozen features; half precision; clipping."""
    own_x, own_y = mine(rank, world, *data(world))
    net, _ = nets(2)
    thinwire.attach(net.features, "int8")
    cross_entropy(net(own_x), own_y).backward()
    held = [each.grad for each in net.features.parameters()]
    x, y = data(world)
    net, alone = nets(3)
    cross_entropy(net(own_x), own_y).backward()
    cross_entropy(alone(x), y).backward()
    norm = net.clip_grad_norm_(0.1)
    wanted = nn.utils.clip_grad_norm_(alone.parameters(), 0.1)
    assert abs(norm - wanted) < 1e-5 * wanted
    assert away(*slices(net, alone)) < 1e-5
    torch.manual_seed(0)
    frozen = SubBatches(features().requires_grad_(False), classifier(), 2, **SMALL, **EXACT)
    cross_entropy(frozen(own_x), own_y).backward()
    assert all(each.grad is not None for each in frozen.classifier.parameters())
    net, alone = nets(2)
    with torch.autocast("cpu", torch.bfloat16):
        outputs = net(own_x)
        cross_entropy(outputs, own_y).backward()
        cross_entropy(alone(x), y).backward()
    assert outputs.dtype == torch.bfloat16
    assert away(*slices(net, alone)) < 0.05
    return held


def accumulated(rank, world):
    """Gradients of two batches add up; those of features are reduced once. Evaluation comes between."""
    net, alone = nets(2)
    for step in (1, 2):
        x, y = data(world, step)
        own_x, own_y = mine(rank, world, x, y)
        with net.features.no_sync() if step == 1 else nullcontext():
            cross_entropy(net(own_x), own_y).backward()
        with torch.no_grad():
            net(own_x)
        cross_entropy(alone(x), y).backward()
    assert away(*slices(net, alone)) < 2 * NEAR
    return [each.grad for each in net.features.parameters()]


def timeline(rank, world):
    own_x, own_y = mine(rank, world, *data(world))
    net, _ = nets(2)
    with net.record() as timeline:
        cross_entropy(net(own_x), own_y).backward()
    net(own_x)  # not recorded
    records = timeline.records()
    by_kind = {
        kind: [each for each in records if each.kind == kind] for kind in ("compute", "transfer", "wait")
    }
    assert len(by_kind["transfer"]) == 2 * 8, [each.what for each in by_kind["transfer"]]
    assert len(by_kind["wait"]) == len(by_kind["transfer"])
    assert {each.what for each in by_kind["compute"]} >= {"features", "forward 1", "backward 6", "weights 4"}
    assert all(0 <= each.start_s <= each.end_s for each in records)
    assert 0 <= timeline.hidden_share() <= 1
    begins = {(each.kind, each.what, each.sub_batch): each.start_s for each in records}
    # what travels is under way before other sub-batches are computed, and is waited for afterwards
    assert begins["transfer", "gather features", 2] < begins["compute", "forward 1", 1]
    assert (
        begins["transfer", "gather 1", 1] < begins["compute", "forward 1", 2] < begins["wait", "gather 1", 1]
    )
    there = begins["transfer", "errors of 4", 1]
    assert there < begins["compute", "backward 6", 2] < begins["wait", "errors of 4", 1]
    assert begins["transfer", "errors of 4", 2] < begins["compute", "weights 6", 0]
    assert begins["compute", "weights 6", 0] < begins["wait", "errors of 4", 1]
    events = timeline.chrome_trace(rank)
    assert {each["pid"] for each in events} == {rank}
    assert all(each["ph"] == "X" for each in events)


def timeline_of_updates(rank, world):
    own_x, own_y = mine(rank, world, *data(world))
    net, _ = nets(2)
    optimizer = torch.optim.SGD(net.classifier.parameters(), 0.1)
    with net.record() as timeline:
        net.update_each(own_x, labels=own_y, loss=cross_entropy, optimizer=optimizer).backward()
    begins = {(each.kind, each.what, each.sub_batch): each.start_s for each in timeline.records()}
    last_wait = begins["wait", "errors of features", 1]
    assert begins["transfer", "gather features", 2] < begins["compute", "forward 1", 1]
    assert begins["compute", "update", 1] < begins["wait", "gather features", 2]
    assert begins["transfer", "errors of features", 1] < begins["compute", "forward 1", 2] < last_wait
    assert begins["transfer", "errors of 4", 1] < begins["compute", "weights 6", 1]


def refusals(rank, world):
    """What is wrong is said on every rank, and the group works afterwards."""
    own_x, own_y = mine(rank, world, *data(world))
    net, _ = nets(2)
    net.count = SAMPLES + 1
    raises(InputError, [f"{SAMPLES} samples", f"{SAMPLES + 1} sub-batches"], net, own_x)
    net.count = 4
    optimizer = torch.optim.SGD(net.classifier.parameters(), 0.1)
    how = {"labels": own_y, "loss": cross_entropy, "optimizer": optimizer}
    raises(InputError, [f"{SAMPLES} samples", "4 equal"], net.update_each, own_x, **how)
    raises(CodecError, "+ef", nets, 2, {"forward": "int8+ef"})
    raises(CodecError, "agree on", nets, 2, {"backward": "aps/e5m2"})
    if world > 1:
        raises(InputError, "DistributedDataParallel", SubBatches, features(), classifier(), 2)
        raises(Disagreement, ["int8", "int4"], nets, 2, {"forward": "int8" if rank else "int4"})
        net, _ = nets(2)
        net.count = 2 + (rank == 1)
        raises(Disagreement, ["2 sub-batches", "3 sub-batches"], net, own_x)
        net.count = 2
        raises(Disagreement, ["5, 48", "6, 48"], net, own_x[: 5 + (rank == 0)])
    net, _ = nets(1)
    with torch.no_grad():
        for net.count in (1, 2):
            net(own_x)
        net.count = 1 if rank == 1 else 2
        if world > 1:
            os.environ["THINWIRE_DEBUG"] = "1"
            raises(Disagreement, ["1 sub-batches", "2 sub-batches"], net, own_x)
            os.environ.pop("THINWIRE_DEBUG")
    x, _ = data(world)
    net, alone = nets(2)
    assert away([net(own_x)], mine(rank, world, alone(x))) < NEAR
    outputs = net(own_x)
    outputs.sum().backward(retain_graph=True)
    raises(InputError, "backward once", outputs.sum().backward)


CHECKS = (
    gradients, training, updates, dropout, codecs, repeated, with_attach, accumulated, timeline,
    timeline_of_updates, refusals,
)  # fmt: skip


def killed(rank, world):
    """A rank dies while errors travel: the others are told."""
    net, _ = nets(2)
    own_x, own_y = mine(rank, world, *data(world))
    cross_entropy(net(own_x), own_y).backward()
    loss = cross_entropy(net(own_x), own_y)
    if rank == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    began = time.monotonic()
    raises(CommError, "rank 1", loss.backward)
    assert time.monotonic() - began < FAULT_S + 3 + SLACK_S


def forgotten(rank, world):
    """A rank returns to a known number of sub-batches, and the others do not."""
    net, _ = nets(1)
    own_x, own_y = mine(rank, world, *data(world))
    for net.count in (1, 2):
        cross_entropy(net(own_x), own_y).backward()
    net.count = 1 if rank == 1 else 2
    began = time.monotonic()
    with torch.no_grad():
        raises(CommError, "all_gather of", net, own_x)
    assert time.monotonic() - began < FAULT_S + 3 + SLACK_S


def main(rank, world, place):
    join(rank, world, place, TIMEOUT_S)
    for check in CHECKS:
        run(check, rank, world)
        dist.barrier()
    dist.destroy_process_group()


def fault(rank, world, place, check):
    join(rank, world, place, FAULT_S)
    run(check, rank, world)
    os._exit(0)  # the group is broken


def run(check, rank, world):
    wrong, held, began = "", (), time.monotonic()
    try:
        held = check(rank, world)
    except Exception:  # noqa: BLE001
        wrong = traceback.format_exc()[-2500:]
    seconds = round(time.monotonic() - began, 1)
    report(check=check.__name__, rank=rank, wrong=wrong, digest=digest(held or ()), seconds=seconds)


if __name__ == "__main__":
    world, *faults = sys.argv[1:]
    if faults:
        for check in (killed, forgotten):
            report(check=check.__name__, statuses=start("fork", int(world), fault, check))
        sys.exit(0)
    report(checks=[each.__name__ for each in CHECKS])
    sys.exit(max(start("fork", int(world), main)))
