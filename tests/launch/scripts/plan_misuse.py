"""What a script may do wrong under a plan for two replicas; it prints what it was told."""

import json
import os

import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

told = {}


def note(name, function):
    try:
        function()
    except Exception as error:  # noqa: BLE001
        told[name] = f"{type(error).__name__}: {error}"
    else:
        told[name] = ""


def step(model, optimizer, x):
    optimizer.zero_grad()
    model(x).sum().backward()
    optimizer.step()


def batches(numel, size, shift=0):
    return DataLoader(TensorDataset(torch.arange(float(numel)).view(numel, 1) + shift), size)


def uneven():
    for (x,) in batches(7, 4):
        sizes.append(len(x))


first, second = nn.Linear(1, 1), nn.Linear(1, 1)
note("apart", lambda: torch.optim.SGD([*first.parameters(), *second.parameters()], 0.1))
model = nn.Sequential(nn.Linear(1, 3), nn.Linear(3, 1))
optimizer = torch.optim.SGD(
    [{"params": model[0].parameters(), "lr": 0.2}, {"params": model[1].parameters()}], 0.1
)
sizes = []
note("inside", lambda: step(model[0], optimizer, torch.ones(2, 1)))
note("no loader", lambda: step(model, optimizer, torch.ones(2, 1)))
note("odd batch", lambda: next(iter(batches(9, 3))))
note("other samples", lambda: next(iter(batches(8, 4, shift=int(os.environ["RANK"])))))
turned = DataLoader(
    TensorDataset(torch.ones(8, 6)), 4, collate_fn=lambda rows: torch.stack([x for (x,) in rows], 1)
)
note("turned", lambda: next(iter(turned)))
note("last batch", uneven)
model.eval()
note("evaluated", uneven)
model.train()
note("good", lambda: step(model, optimizer, next(iter(batches(4, 4)))[0]))
note("two models", lambda: torch.optim.SGD(second.parameters(), 0.1))
note("second optimizer", lambda: torch.optim.SGD(model[1].parameters(), 0.1))
model.late = nn.Linear(1, 1)
note("changed", optimizer.step)
rank = os.environ["RANK"]
weights = [each.tolist() for each in model[0].parameters()]
report = json.dumps({"rank": rank, "told": told, "sizes": sizes, "weights": weights})
os.write(1, f"{report}\n".encode())  # at once, so that lines of two ranks do not mix
