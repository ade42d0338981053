"""Simulate low-precision arithmetic bit for bit, and training on many nodes, on one device.

>>> import torch
>>> from thinwire import simulate
>>> fp8 = simulate.Arithmetic(product="float8_e4m3fn", sum="e5m10", order="chunked/64")
>>> simulate.matmul(torch.ones(2, 100), torch.full((100, 2), 0.3), fp8)
tensor([[31.2500, 31.2500],
        [31.2500, 31.2500]])

| for | use |
|---|---|
| numbers | `Precision`, `Quantizer`, `Counters` |
| products | `Arithmetic`, `matmul` |
| networks | `convert` with a `Recipe` (`recipes`), `Stages`, `layers`, `functional` |
| updates | `SGD`, `RMSprop`, `Adam`, `LossScale` |
| precision that changes | `ladder` (MuPPET), `assignment` (Lee et al.) |
| many nodes | `Nodes`, `train`, `round_trip` |
| small networks on a GPU | `train(recorded=True)`: `thinwire.simulate.cuda_graph` |
"""

from thinwire.simulate import assignment, functional, ladder, layers, recipes
from thinwire.simulate.conversion import convert, describe
from thinwire.simulate.counters import Counters
from thinwire.simulate.gemm import Arithmetic, matmul
from thinwire.simulate.loss_scale import LossScale
from thinwire.simulate.nodes import Nodes
from thinwire.simulate.precision import Precision
from thinwire.simulate.pure_mode import round_trip
from thinwire.simulate.quantizer import Quantizer
from thinwire.simulate.recipes import Recipe, Rule
from thinwire.simulate.stages import Stages
from thinwire.simulate.training import Plan, Point, Trained, evaluate, train
from thinwire.simulate.update import SGD, Adam, RMSprop

__all__ = [
    "SGD",
    "Adam",
    "Arithmetic",
    "Counters",
    "LossScale",
    "Nodes",
    "Plan",
    "Point",
    "Precision",
    "Quantizer",
    "RMSprop",
    "Recipe",
    "Rule",
    "Stages",
    "Trained",
    "assignment",
    "convert",
    "describe",
    "evaluate",
    "functional",
    "ladder",
    "layers",
    "matmul",
    "recipes",
    "round_trip",
    "train",
]
