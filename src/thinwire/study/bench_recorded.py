"""How long a step takes on a GPU as usual, and replayed from a CUDA graph."""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from thinwire.bench.formats import Progress
from thinwire.simulate import SGD, Nodes, convert, recipes
from thinwire.simulate.layers import simulated
from thinwire.simulate.recorded import Backward, Update
from thinwire.study import networks

CLASSES, PIXELS = 10, 28
InTurns = Callable[[dict[str, Callable[[], Any]]], dict[str, float]]


@dataclass(frozen=True)
class Case:
    """A small network, and what it computes with."""

    what: str
    network: str
    nodes: int
    samples: int  #: of one node
    wire: str = "fp32"
    schedule: str = "auto"
    recipe: str = "fp32"


CHAIN = "accumulate/sequential"
CASES = (
    Case("lenet5, float32", "lenet5", 1, 64),
    Case("lenet5, posits with a quire", "lenet5", 1, 64, recipe="positnn/F8B8G8O12L12+quire"),
    Case("cnn-small, 8 nodes, aps/e4m3 in a chain", "cnn-small", 8, 64, "aps/e4m3", CHAIN),
    Case("cnn-small, 256 nodes, aps/e4m3 in a chain", "cnn-small", 256, 8, "aps/e4m3", CHAIN),
)


def measure(device: torch.device, in_turns: InTurns, progress: Progress) -> list[dict[str, Any]]:
    """Seconds of a step of every case, both ways; nothing on a CPU."""
    rows = []
    for case in CASES if device.type == "cuda" else ():
        progress(f"{case.what}, recorded")
        calls = {name: _step(case, device, recorded=name == "recorded") for name in ("usual", "recorded")}
        for _ in range(2):  # as usual, then backward is recorded; the update is in the warm-up of `in_turns`
            calls["recorded"]()
        taken = in_turns(calls)
        row = {"what": case.what, "usual_s": taken["usual"], "recorded_s": taken["recorded"]}
        rows.append({**row, "times": taken["usual"] / taken["recorded"]})
    return rows


def _step(case: Case, device: torch.device, recorded: bool) -> Callable[[], Any]:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        net = networks.get(case.network, (1, PIXELS, PIXELS), CLASSES)
        count = case.nodes * case.samples
        x, y = torch.randn(count, 1, PIXELS, PIXELS), torch.randint(CLASSES, (count,))
    optimizer: torch.optim.Optimizer = torch.optim.SGD(net.parameters(), 1e-3, 0.9)
    entropy: nn.Module = nn.CrossEntropyLoss()
    if case.recipe != "fp32":
        recipe = recipes.get(case.recipe)
        convert(net, recipe, tell=None)
        entropy = simulated(nn.CrossEntropyLoss(), recipe.stages, name="loss")
        optimizer = SGD(net.parameters(), 1e-3, 0.9, keep=recipe.optimizer)
    net.to(device)

    def loss(model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
        found: Tensor = entropy(model(x), y)
        return found

    nodes = Nodes(net, case.nodes, case.wire, case.schedule)
    backward: Callable[..., Any] = partial(nodes.backward, loss, together=case.nodes)
    update: Callable[[], Any] = optimizer.step
    if recorded:
        backward, update = Backward(nodes, loss, case.nodes, entropy), Update(optimizer).step
    batch = x.to(device), y.to(device)

    def step() -> Any:
        found = backward(*batch)
        update()
        return found

    return step
