"""Time of a training step on a GPU: run as usual, and replayed from a CUDA graph."""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from thinwire.bench.formats import Progress
from thinwire.simulate import SGD, Nodes, convert, recipes
from thinwire.simulate.cuda_graph import Backward, Update
from thinwire.simulate.layers import simulated
from thinwire.zoo import small

CLASSES, PIXELS = 10, 28
InTurns = Callable[[dict[str, Callable[[], Any]]], dict[str, float]]


@dataclass(frozen=True)
class Case:
    """A small network, its nodes and its precision."""

    what: str
    network: str
    nodes: int
    samples: int  #: per node
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
    """Time a step of every case, as usual and recorded; return no rows on a CPU."""
    rows = []
    for case in CASES if device.type == "cuda" else ():
        progress(f"{case.what}, recorded")
        calls = {name: _step(case, device, recorded=name == "recorded") for name in ("usual", "recorded")}
        for _ in range(2):  # as usual, then recording backward; the warm-up of `in_turns` records the update
            calls["recorded"]()
        seconds = in_turns(calls)
        row = {"what": case.what, "usual_s": seconds["usual"], "recorded_s": seconds["recorded"]}
        rows.append({**row, "times": seconds["usual"] / seconds["recorded"]})
    return rows


def _step(case: Case, device: torch.device, recorded: bool) -> Callable[[], Any]:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        net = small.get(case.network, (1, PIXELS, PIXELS), CLASSES)
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
        value: Tensor = entropy(model(x), y)
        return value

    nodes = Nodes(net, case.nodes, case.wire, case.schedule)
    backward: Callable[..., Any] = partial(nodes.backward, loss, together=case.nodes)
    update: Callable[[], Any] = optimizer.step
    if recorded:
        backward, update = Backward(nodes, loss, case.nodes, entropy), Update(optimizer).step
    batch = x.to(device), y.to(device)

    def step() -> Any:
        value = backward(*batch)
        update()
        return value

    return step
