"""What NCCL ranks that share a GPU do with placed networks: branches, stages and codecs, as on one device.

    python placed_program.py CHECK ...         started by a lab on every rank

Every rank prints a line of JSON for every check: what went wrong ("" if nothing), and the time it took.
"""

import sys

import torch
import torch.distributed as dist
from nccl_program import digest
from ranks import join, run_all
from torch import nn

from thinwire.errors import Disagreement
from thinwire.parallel import Placed

DEVICE = torch.device("cuda", 0)
TIMEOUT_S = 120
WIDTH, ROWS = 128, 32


class Branches(nn.Module):
    """A stem that two branches read, a residual, and a head."""

    def __init__(self, drop=0.0):
        super().__init__()
        self.stem, self.head = nn.Linear(WIDTH, WIDTH), nn.Linear(2 * WIDTH, WIDTH)
        self.left, self.right = (
            nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.ReLU(inplace=True), nn.Dropout(drop)) for _ in range(2)
        )

    def forward(self, x):
        x = self.stem(x)
        return self.head(torch.cat([self.left(x), self.right(x) + x], dim=1))


def made(**options):
    torch.manual_seed(0)
    return Branches(**options).to(DEVICE)


def data():
    drawn = torch.Generator().manual_seed(1)
    return (torch.randn(ROWS, WIDTH, generator=drawn).to(DEVICE) for _ in range(2))


def stepped(model, count=1):
    x, y = data()
    optimizer = torch.optim.SGD(model.parameters(), 0.05)
    for _ in range(count):
        optimizer.zero_grad()
        loss = nn.functional.mse_loss(model(x), y)
        loss.backward()
        optimizer.step()
    return loss.detach()


def worst(placed, plain):
    wanted = dict(plain.named_parameters())
    return max(
        float((each.grad - wanted[name].grad).norm() / wanted[name].grad.norm())
        for name, each in placed.named_parameters()
    )


def exact(_, world):
    """Branches and micro-batches in float32: the losses and gradients of one device."""
    for parts in (1, 4):
        plain = made()
        placed = Placed(made(), {"*": 0, "right": world - 1}, micro_batches=parts)
        wanted, found = (stepped(each, 3) for each in (plain, placed))
        assert torch.allclose(found, wanted, rtol=1e-4)
        assert worst(placed, plain) < 1e-4
        assert all(each.is_cuda for each in placed.parameters())


def stages(_, world):
    """A chain in stages, with a rank that has both ends: messages of both directions in one order."""
    for placement in ({"0": 0, "1": 0, "2": 1, "3": 1}, {"0": 0, "1": 1, "2": 1, "3": 0}):

        def chain():
            torch.manual_seed(3)
            return nn.Sequential(*(nn.Linear(WIDTH, WIDTH) for _ in range(4))).to(DEVICE)

        plain, placed = chain(), Placed(chain(), placement, micro_batches=4, record=True)
        wanted, found = (stepped(each, 2) for each in (plain, placed))
        assert torch.allclose(found, wanted, rtol=1e-4)
        assert worst(placed, plain) < 1e-4
        assert all(each["dur"] >= 0 for each in placed.timeline())
    assert world == 2


def encoded(_, world):
    """With int8 gradients are near, runs repeat bit for bit, and all ranks hold the same output."""
    plain, found = made(), []
    stepped(plain)
    for _ in range(2):
        placed = Placed(made(), {"*": 0, "right": world - 1}, forward="int8", backward="int8")
        stepped(placed)
        assert worst(placed, plain) < 0.1
        assert placed.stats()["ratio"] > 1.2
        found.append(digest([each.grad for each in placed.parameters()]))
    assert found[0] == found[1]
    out = placed(next(iter(data()))).detach()
    everyone = [torch.empty_like(out) for _ in range(world)]
    dist.all_gather(everyone, out)
    assert all(torch.equal(each, out) for each in everyone)


def dropout(_, world):
    """Equal seeds draw the same again."""
    placed = Placed(made(drop=0.5), {"*": 0, "right": world - 1})
    x, losses = next(iter(data())), []
    for seed in (5, 5, 6):
        torch.manual_seed(seed)
        losses.append(placed(x).detach())
    assert torch.equal(losses[0], losses[1])
    assert not torch.equal(losses[0], losses[2])


def state(_, world):
    """The whole state is gathered on GPUs as it was."""
    plain, placed = made(), Placed(made(), {"*": 0, "right": world - 1})
    whole = placed.gathered_state_dict()
    assert digest(whole.values()) == digest(plain.state_dict().values())


def disagree(rank, _):
    """Ranks with other codecs hear of it."""
    said = ""
    try:
        Placed(made(), {"*": 0}, forward="int4" if rank else "int8")
    except Disagreement as error:
        said = str(error)
    assert "int4/128" in said, said


CHECKS = (exact, stages, encoded, dropout, state, disagree)

if __name__ == "__main__":
    run_all(CHECKS, sys.argv[1:], *join(TIMEOUT_S, device_id=DEVICE))
