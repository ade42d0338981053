"""What the checks of optimizers that communicate share."""

import copy
import io

import torch
import torch.distributed as dist
from start_program import digest
from torch import nn

SHAPES = ((64, 96), (130,), (48, 64), (7, 5))


def random(*shape, seed=0):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def weights(shapes=SHAPES, dtype=torch.float32):
    return [nn.Parameter(random(*shape, seed=i).to(dtype)) for i, shape in enumerate(shapes)]


def gradient(rank, step, i, shape):
    """Of one rank; some of its parts are alike on all ranks."""
    own, common = random(*shape, seed=1000 * step + 10 * i + rank), random(*shape, seed=7 * step + i)
    return 0.1 * own + 0.3 * common


def give(params, rank, step):
    for i, p in enumerate(params):
        p.grad = gradient(rank, step, i, tuple(p.shape)).to(p.dtype)


def run(optimizer, params, rank, steps, first=0):
    for step in range(first, first + steps):
        give(params, rank, step)
        optimizer.step()


def alike(tensors, what=""):
    """All ranks hold these bits."""
    mine, everyone = digest(tensors), [None] * dist.get_world_size()
    dist.all_gather_object(everyone, mine)
    assert len(set(everyone)) == 1, f"{what}: ranks hold different bits"


def away(ours, theirs):
    """The largest relative distance between tensors."""
    pairs = [(a.detach().double(), b.detach().double()) for a, b in zip(ours, theirs, strict=True)]
    return max(float((a - b).norm() / (b.norm() + 1e-30)) for a, b in pairs)


def saved(state):
    """A state as a file gives it back."""
    file = io.BytesIO()
    torch.save(state, file)
    file.seek(0)
    return torch.load(file, weights_only=True)


def resumes(make, rank, before=3, after=4):
    """A run that is saved, loaded and continued has the bits of one that was not."""
    params = weights()
    optimizer = make(params)
    run(optimizer, params, rank, before)
    state = saved(optimizer.state_dict())
    others = [nn.Parameter(p.detach().clone()) for p in params]
    again = make(others)
    again.load_state_dict(state)
    kept = copy.deepcopy(state)
    run(optimizer, params, rank, after, before)
    run(again, others, rank, after, before)
    assert digest(params) == digest(others), away(others, params)
    assert same(state, kept), "a state was changed by steps after it was loaded"
    assert same(again.state_dict(), optimizer.state_dict())
    return params


def same(one, other):
    if isinstance(one, torch.Tensor):
        return torch.equal(one, other)
    if isinstance(one, dict):
        return one.keys() == other.keys() and all(same(one[key], other[key]) for key in one)
    if isinstance(one, list | tuple):
        return len(one) == len(other) and all(map(same, one, other))
    return one == other


def digits(rank, world):
    """This rank's samples of scikit-learn's digits, and those for testing."""
    from sklearn.datasets import load_digits

    x, y = load_digits(return_X_y=True)
    x, y = torch.tensor(x, dtype=torch.float32) / 16, torch.tensor(y)
    order = torch.randperm(len(x), generator=torch.Generator().manual_seed(0))
    train, test = order[:1400], order[1400:]
    own = train[rank::world]
    return (x[own], y[own]), (x[test], y[test])


def trains(make, rank, world, epochs=6):
    """The accuracy on the digits after some epochs, and the optimizer."""
    (x, y), (test_x, test_y) = digits(rank, world)
    torch.manual_seed(3)
    net = nn.Sequential(nn.Linear(64, 128), nn.ReLU(), nn.Linear(128, 10))
    optimizer = make(net.named_parameters())
    shuffle = torch.Generator().manual_seed(rank)
    for _ in range(epochs):
        for rows in torch.randperm(700, generator=shuffle)[:672].view(-1, 16):
            optimizer.zero_grad()
            nn.functional.cross_entropy(net(x[rows % len(x)]), y[rows % len(x)]).backward()
            optimizer.step()
    if hasattr(optimizer, "synchronize"):
        optimizer.synchronize()
    alike(net.parameters(), "digits")
    with torch.no_grad():
        return float((net(test_x).argmax(1) == test_y).float().mean()), optimizer
