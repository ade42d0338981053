# ruff: noqa: T201
"""A main with argparse, train() and validate(), like PyTorch's examples/imagenet, on small digits.

thinwire launch --codec int8 --nproc-per-node 2 digits_main.py --epochs 2
"""

import argparse
import hashlib

import torch
import torch.distributed as dist
from sklearn.datasets import load_digits
from torch import nn
from torch.utils.data import DataLoader, TensorDataset
from torch.utils.data.distributed import DistributedSampler

parser = argparse.ArgumentParser(description="PyTorch digits training")
parser.add_argument("--epochs", default=2, type=int, metavar="N")
parser.add_argument("-b", "--batch-size", default=32, type=int, metavar="N", help="on each process")
parser.add_argument("--lr", "--learning-rate", default=0.05, type=float, metavar="LR", dest="lr")
parser.add_argument("--momentum", default=0.9, type=float, metavar="M")
parser.add_argument("-p", "--print-freq", default=10, type=int, metavar="N")
parser.add_argument("--dist-backend", default="gloo", type=str)
parser.add_argument("--seed", default=0, type=int, help="seed for initializing training.")


class AverageMeter:
    def __init__(self):
        self.sum = self.count = 0.0

    def update(self, value, n=1):
        self.sum += value * n
        self.count += n

    @property
    def avg(self):
        return self.sum / max(1, self.count)


def make_model():
    return nn.Sequential(
        nn.Conv2d(1, 16, 3, padding=1), nn.BatchNorm2d(16), nn.ReLU(),
        nn.Conv2d(16, 32, 3, stride=2, padding=1), nn.BatchNorm2d(32), nn.ReLU(),
        nn.Flatten(), nn.Linear(512, 64), nn.ReLU(), nn.Linear(64, 10),
    )  # fmt: skip


def datasets():
    digits = load_digits()
    images = torch.tensor(digits.images, dtype=torch.float32)[:, None] / 16
    labels = torch.tensor(digits.target)
    return TensorDataset(images[:1500], labels[:1500]), TensorDataset(images[1500:], labels[1500:])


def main():
    args = parser.parse_args()
    torch.manual_seed(args.seed)
    dist.init_process_group(backend=args.dist_backend)
    model = torch.nn.parallel.DistributedDataParallel(make_model())
    criterion = nn.CrossEntropyLoss()
    optimizer = torch.optim.SGD(model.parameters(), args.lr, momentum=args.momentum)
    train_dataset, val_dataset = datasets()
    train_sampler = DistributedSampler(train_dataset)
    train_loader = DataLoader(train_dataset, args.batch_size, sampler=train_sampler)
    val_loader = DataLoader(val_dataset, 256)
    for epoch in range(args.epochs):
        train_sampler.set_epoch(epoch)
        train(train_loader, model, criterion, optimizer, epoch, args)
        acc1 = validate(val_loader, model)
        if dist.get_rank() == 0:
            print(f" * Acc@1 {acc1:.1f}", flush=True)
    bits = b"".join(parameter.detach().numpy().tobytes() for parameter in model.parameters())
    print(f"rank {dist.get_rank()} weights {hashlib.sha256(bits).hexdigest()[:16]}", flush=True)
    dist.destroy_process_group()


def train(train_loader, model, criterion, optimizer, epoch, args):
    losses = AverageMeter()
    model.train()
    for i, (images, target) in enumerate(train_loader):
        output = model(images)
        loss = criterion(output, target)
        losses.update(loss.item(), images.size(0))
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        if i % args.print_freq == 0 and dist.get_rank() == 0:
            print(f"Epoch: [{epoch}][{i}/{len(train_loader)}] loss {loss.item():.4f}", flush=True)


@torch.no_grad()
def validate(val_loader, model):
    correct = AverageMeter()
    model.eval()
    for images, target in val_loader:
        correct.update((model(images).argmax(1) == target).float().mean().item(), images.size(0))
    return 100 * correct.avg


if __name__ == "__main__":
    main()
