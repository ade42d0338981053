# ruff: noqa: T201
"""An AlexNet-like network: convolutions data parallel, fully connected layers split (Dettmers 2016).

torchrun --nproc-per-node 2 examples/sub_batches.py
torchrun --nproc-per-node 4 examples/sub_batches.py --count 4 --bits 32 8 --update-each --trace trace.json
thinwire lab run --hosts 4 --link 1gbit -- python examples/sub_batches.py --trace trace.json

Every rank has all convolutions and a part of the batch, and a slice of each fully connected layer. The layers
see the batch in sub-batches. While one is computed, the activations and errors of others travel: with 8 bits,
a quarter of the bytes. With --update-each the layers are updated after every sub-batch.

The script trains on one device first (every rank by itself), and then in sub-batches with each number of
bits. With 32 bits it ends with the same weights, up to rounding. CIFAR-10 must be fetched once:
`thinwire data fetch cifar10`. `--data digits` needs no download.
"""

import argparse
import hashlib
import json
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.functional import cross_entropy
from torch.nn.parallel import DistributedDataParallel

import thinwire
from thinwire import data
from thinwire.parallel import SubBatches

CODECS = {32: None, 16: "bf16", 8: "int8", 4: "int4"}
SEED, TESTS, RECORDED = 1, 1000, 3
COMPARED, ROUNDING = 5, 1e-4  #: later, training enlarges any difference; relative, of sums in another order


def network(shape, classes, width):
    """The convolutions and the fully connected layers, with equal weights on all ranks."""
    torch.manual_seed(SEED)
    features = nn.Sequential(
        nn.Conv2d(shape[0], 32, 5, padding=2), nn.ReLU(), nn.MaxPool2d(2),
        nn.Conv2d(32, 64, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2),
        nn.Conv2d(64, 64, 3, padding=1), nn.ReLU(), nn.Flatten(),
    )  # fmt: skip
    inputs = 64 * (shape[1] // 4) * (shape[2] // 4)
    connected = nn.Sequential(
        nn.Linear(inputs, width), nn.ReLU(), nn.Linear(width, width), nn.ReLU(), nn.Linear(width, classes)
    )
    for each in (*features, *connected):
        if isinstance(each, nn.Conv2d | nn.Linear):
            nn.init.kaiming_normal_(each.weight, nonlinearity="relu")
            nn.init.zeros_(each.bias)
    return features, connected


def batches(examples, options):
    """The same batches for all, a few to compare weights after, and the rest; every rank takes its part."""
    order = torch.Generator().manual_seed(SEED)
    drawn = [torch.randint(len(examples), (options.batch,), generator=order) for _ in range(options.steps)]
    return drawn[:COMPARED], drawn[COMPARED:]


def optimizers(features, connected, lr):
    return [torch.optim.SGD(each.parameters(), lr, momentum=0.9) for each in (features, connected)]


def train_alone(net, trained, examples, drawn, options):
    """One device. With an update for each sub-batch, one sub-batch after another."""
    (features, connected), (first, second), world = net, trained, dist.get_world_size()
    for x, y in map(examples.batch, drawn):
        first.zero_grad()
        if options.update_each:
            loss = one_by_one(features(x), y, connected, second, world, options.count)
        else:
            second.zero_grad()
            loss = cross_entropy(connected(features(x)), y)
            loss.backward()
            second.step()
        first.step()
    return loss.item()


def one_by_one(found, y, connected, optimizer, world, count):
    """Sub-batch k is the k-th part of every rank's samples."""
    parts, labels = (each.detach().unflatten(0, (world, count, -1)) for each in (found, y))
    parts.requires_grad_()
    losses = []
    for k in range(count):
        optimizer.zero_grad()
        losses.append(cross_entropy(connected(parts[:, k].flatten(0, 1)), labels[:, k].flatten()))
        losses[-1].backward()
        optimizer.step()
    found.backward(parts.grad.view_as(found) / count)
    return sum(losses) / count


def train_split(net, trained, examples, drawn, options):
    """All ranks: a training loop as that of DDP."""
    first, second = trained
    for x, y in map(examples.batch, drawn):
        x, y = (each.chunk(net.world)[net.rank] for each in (x, y))
        first.zero_grad()
        if options.update_each:
            loss = net.update_each(x, labels=y, loss=cross_entropy, optimizer=second)
            loss.backward()
        else:
            second.zero_grad()
            loss = cross_entropy(net(x), y)
            loss.backward()
            second.step()
        first.step()
    mean = loss.detach().view(1)
    dist.all_reduce(mean)
    return mean.item() / net.world


def accuracy(net, examples):
    """On the first images of the test set."""
    with torch.no_grad():
        x, y = examples.batch(torch.arange(min(TESTS, len(examples))))
        return (net(x).argmax(1) == y).double().mean().item()


def weights(net):
    return torch.cat([each.detach().flatten() for each in net.parameters()])


def arguments():
    parser = argparse.ArgumentParser()
    parser.add_argument("--count", type=int, default=2, help="sub-batches of a batch")
    parser.add_argument("--bits", type=int, nargs="+", choices=CODECS, default=[32, 8])
    parser.add_argument("--update-each", action="store_true", help="update after every sub-batch")
    parser.add_argument("--data", default="cifar10", help="an image set of thinwire.data, such as digits")
    parser.add_argument("--steps", type=int, default=40)
    parser.add_argument("--batch", type=int, default=96, help="samples of a step on all ranks together")
    parser.add_argument("--width", type=int, default=512)
    parser.add_argument("--lr", type=float, default=0.01)
    parser.add_argument("--trace", type=Path, help="a file: NAME-32.json is rank 0's timeline with 32 bits")
    return parser.parse_args()


def tell(net, timeline, bits, trace):
    """Print this rank's bytes and what was hidden; write its timeline."""
    ratio, hidden = net.stats()["ratio"], timeline.hidden_share()
    print(f"{bits} bits: ratio {ratio:.2f}, {hidden:.0%} of transfers hidden", flush=True)
    if trace:
        path = trace.with_stem(f"{trace.stem}-{bits}")
        path.write_text(json.dumps(timeline.chrome_trace(net.rank)))


def main():
    options = arguments()
    dist.init_process_group("gloo")
    torch.set_num_threads(1)
    rank = dist.get_rank()
    examples, unseen = data.examples(options.data)
    shape = examples.shape, examples.classes, options.width

    few, others = batches(examples, options)

    alone = nn.Sequential(*network(*shape))
    trained = optimizers(*alone, options.lr)
    train_alone(alone, trained, examples, few, options)
    early = weights(alone)
    loss = train_alone(alone, trained, examples, others, options)
    if rank == 0:
        print(f"one device: loss {loss:.4f}, accuracy {accuracy(alone, unseen):.4f}", flush=True)
    for bits in options.bits:
        features, connected = network(*shape)
        replica = DistributedDataParallel(features)
        if CODECS[bits]:
            thinwire.attach(replica, CODECS[bits])  # gradients of convolutions
        how = {"forward": CODECS[bits], "backward": CODECS[bits]}
        net = SubBatches(replica, connected, options.count, **how, min_numel=1000)
        trained = optimizers(net.features, net.classifier, options.lr)
        train_split(net, trained, examples, few, options)
        away = ((weights(net.whole()) - early).norm() / early.norm()).item()
        train_split(net, trained, examples, others[:-RECORDED], options)
        with net.record() as timeline:
            loss = train_split(net, trained, examples, others[-RECORDED:], options)
        whole = net.whole()
        digest = hashlib.sha256(weights(whole).numpy().tobytes()).hexdigest()[:16]
        print(f"rank {rank} {bits} bits weights {digest}\n", end="", flush=True)
        if rank == 0:
            equal = "; equal within rounding" if away < ROUNDING else ""
            print(f"{bits} bits: loss {loss:.4f}, accuracy {accuracy(whole, unseen):.4f}")
            print(f"{bits} bits: after {len(few)} steps weights differ by {away:.1e}{equal}")
            tell(net, timeline, bits, options.trace)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
