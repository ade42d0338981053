"""Training that rarely communicates: ranks average from time to time, or send a part of a step.

- `DiLoCo`, `LocalSGD`, `SparseLoCo`: one line after the optimizer is made; every `every` steps, ranks send
  how far they came. docs/outer.md begins with the question "my ranks are in two cities".
- `DeMo`, `OneBitAdam`, `ZeroOneAdam`, `LoCo`: optimizers that communicate inside `step()`;
  docs/outer-optimizers.md.
- `reshard`: saved states of outer loops, for another number of ranks.

Names are loaded when they are first used.
"""

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from thinwire.outer.checkpoint import reshard as reshard
    from thinwire.outer.demo import DeMo as DeMo
    from thinwire.outer.engine import Outer as Outer
    from thinwire.outer.loco import LoCo as LoCo
    from thinwire.outer.methods import DiLoCo as DiLoCo
    from thinwire.outer.methods import LocalSGD as LocalSGD
    from thinwire.outer.methods import SparseLoCo as SparseLoCo
    from thinwire.outer.one_bit_adam import OneBitAdam as OneBitAdam
    from thinwire.outer.zero_one_adam import ZeroOneAdam as ZeroOneAdam

_HOMES = {
    "DeMo": "thinwire.outer.demo",
    "DiLoCo": "thinwire.outer.methods",
    "LoCo": "thinwire.outer.loco",
    "LocalSGD": "thinwire.outer.methods",
    "OneBitAdam": "thinwire.outer.one_bit_adam",
    "Outer": "thinwire.outer.engine",
    "SparseLoCo": "thinwire.outer.methods",
    "ZeroOneAdam": "thinwire.outer.zero_one_adam",
    "reshard": "thinwire.outer.checkpoint",
}

__all__ = list(_HOMES)

if not TYPE_CHECKING:

    def __getattr__(name: str) -> Any:
        if name in _HOMES:
            return getattr(importlib.import_module(_HOMES[name]), name)
        raise AttributeError(f"module 'thinwire.outer' has no attribute '{name}'")


def __dir__() -> list[str]:
    return sorted(__all__)
