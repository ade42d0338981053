"""What NCCL ranks that share a GPU do with sub-batches; see `nccl_program.py`.

    python sub_batch_program.py CHECK ...         started by a lab on every rank

Every rank prints a line of JSON for every check: what went wrong ("" if nothing), and the time it took.
"""

import copy
import hashlib
import sys

import torch
import torch.distributed as dist
from ranks import join, run_all
from torch import nn
from torch.nn.functional import cross_entropy
from torch.nn.parallel import DistributedDataParallel

import thinwire
from thinwire.errors import Disagreement
from thinwire.parallel import SubBatches

TIMEOUT_S = 120
DEVICE = torch.device("cuda", 0)
SAMPLES, CLASSES, NEAR = 48, 10, 1e-5


def nets(count, codec=None, dropout=0.0):
    """The network in sub-batches, and the same on one device."""
    torch.manual_seed(0)
    features = nn.Sequential(nn.Conv2d(3, 8, 3, padding=1), nn.Tanh(), nn.AvgPool2d(2), nn.Flatten())
    connected = nn.Sequential(
        nn.Linear(512, 130),
        nn.GELU(),
        nn.Dropout(dropout),
        nn.Linear(130, 64),
        nn.Tanh(),
        nn.Linear(64, CLASSES),
    )
    alone = nn.Sequential(features, connected).to(DEVICE)
    first, second = copy.deepcopy(alone)
    net = SubBatches(
        DistributedDataParallel(first), second, count, forward=codec, backward=codec, min_numel=0
    )
    return net, alone


def data(step=0):
    generator = torch.Generator().manual_seed(step)
    x = torch.randn(SAMPLES * dist.get_world_size(), 3, 16, 16, generator=generator)
    return x.to(DEVICE), torch.randint(CLASSES, (len(x),), generator=generator).to(DEVICE)


def mine(*tensors):
    return [each.chunk(dist.get_world_size())[dist.get_rank()] for each in tensors]


def gradients(net):
    return [each.grad for each in net.parameters()]


def slices(alone):
    """One device's gradients: those of this rank's slices."""
    expected = [each.grad for each in alone[0].parameters()]
    sliced = [each.grad.tensor_split(dist.get_world_size()) for each in alone[1].parameters()]
    return expected + [each[dist.get_rank()] for each in sliced]


def away(found, expected):
    pairs = [(a.detach().float(), b.detach().float()) for a, b in zip(found, expected, strict=True)]
    return max(float((a - b).norm() / (b.norm() + 1e-30)) for a, b in pairs)


def alike(tensors, what):
    found = hashlib.sha256()
    for x in tensors:
        found.update(x.detach().cpu().contiguous().view(-1).view(torch.uint8).numpy().tobytes())
    everyone = [None] * dist.get_world_size()
    dist.all_gather_object(everyone, found.hexdigest())
    assert len(set(everyone)) == 1, f"{what}: ranks hold different bits"


def one_device(rank, world):
    """Outputs and gradients of one device; with codecs, replicas of features stay equal."""
    del rank, world
    x, y = data()
    for count in (1, 2, 4, 5):
        net, alone = nets(count)
        outputs, wanted = net(*mine(x)), alone(x)
        assert away([outputs], mine(wanted)) < NEAR, count
        cross_entropy(outputs, *mine(y)).backward()
        cross_entropy(wanted, y).backward()
        assert away(gradients(net), slices(alone)) < NEAR, (count, away(gradients(net), slices(alone)))
    for spec, low, high in (("bf16", 1e-5, 0.02), ("int8", 1e-4, 0.05), ("qsgd8/512", 1e-4, 0.2)):
        net, _ = nets(2, spec)
        cross_entropy(net(*mine(x)), *mine(y)).backward()
        error = away(gradients(net), slices(alone))
        assert low < error < high, (spec, error)
        alike([each.grad for each in net.features.parameters()], spec)


def training(rank, world):
    """With an update for each sub-batch, dropout and encoded gradients, it learns, and ranks agree."""
    del rank, world
    net, _ = nets(4, "int8", dropout=0.1)
    thinwire.attach(net.features, "int8", seed=1)
    first = torch.optim.Adam(net.features.parameters(), 3e-3)
    second = torch.optim.Adam(net.classifier.parameters(), 3e-3)
    x, y = data()
    losses = []
    for _ in range(30):
        first.zero_grad()
        loss = net.update_each(*mine(x), labels=mine(y)[0], loss=cross_entropy, optimizer=second)
        loss.backward()
        first.step()
        losses.append(loss.detach())
    assert losses[-1] < 0.8 * losses[0], losses
    alike(list(net.whole().parameters()), "training")


def the_host_waits_for_nothing(rank, world):
    """A step that was made before has no synchronisation of the host with the GPU."""
    del rank, world
    (own_x,), (own_y,) = (mine(each) for each in data())
    for codec in (None, "int8"):
        net, _ = nets(3, codec, dropout=0.1)

        def one(net=net):
            cross_entropy(net(own_x), own_y).backward()

        for _ in range(4):
            one()
        torch.cuda.synchronize()
        torch.cuda.set_sync_debug_mode("error")
        try:
            one()
        finally:
            torch.cuda.set_sync_debug_mode("default")
        torch.cuda.synchronize()


def streams(rank, world):
    """On a stream of the user's, results are ready for the next kernel there."""
    del rank, world
    (own_x,), (own_y,) = (mine(each) for each in data())
    net, _ = nets(3, "int8")
    cross_entropy(net(own_x), own_y).backward()
    expected = [each.clone() for each in gradients(net)]
    torch.cuda.synchronize()
    with torch.cuda.stream(torch.cuda.Stream()):
        for _ in range(5):
            net.zero_grad()
            cross_entropy(net(own_x), own_y).backward()
    torch.cuda.synchronize()
    pairs = list(zip(gradients(net), expected, strict=True))
    unlike = [i for i, (own, other) in enumerate(pairs) if not torch.equal(own, other)]
    assert unlike == [], away(gradients(net), expected)


def timeline(rank, world):
    """Events are read after the step."""
    del world
    (own_x,), (own_y,) = (mine(each) for each in data())
    net, _ = nets(2)
    for _ in range(3):
        cross_entropy(net(own_x), own_y).backward()
    with net.record() as recorded:
        cross_entropy(net(own_x), own_y).backward()
    records = recorded.records()
    assert len([each for each in records if each.kind == "transfer"]) == 2 * 8
    assert all(0 <= each.start_s <= each.end_s < 60 for each in records)
    assert 0 <= recorded.hidden_share() <= 1
    assert recorded.chrome_trace(rank)[0]["pid"] == rank


def disagreements(rank, world):
    """Ranks that pass other numbers of sub-batches get an error, and the group stays usable."""
    del world
    (own_x,), _ = (mine(each) for each in data())
    net, alone = nets(2)
    net.count = 2 + rank
    caught = None
    try:
        net(own_x)
    except Disagreement as error:
        caught = str(error)
    assert caught is not None
    assert "3 sub-batches" in caught
    net.count = 2
    assert away([net(own_x)], mine(alone(data()[0]))) < NEAR


CHECKS = (one_device, training, the_host_waits_for_nothing, streams, timeline, disagreements)


if __name__ == "__main__":
    torch.backends.cuda.matmul.allow_tf32 = False
    torch.backends.cudnn.allow_tf32 = False
    torch.backends.cudnn.deterministic = True
    run_all(CHECKS, sys.argv[1:], *join(TIMEOUT_S))
