"""Training that rarely communicates: ranks average from time to time, or send a small part of each step.

docs/outer.md begins with the question "my ranks are in two cities".

- `DeMo`, `OneBitAdam`, `ZeroOneAdam`, `LoCo`: optimizers that communicate inside `step()`;
  docs/outer-optimizers.md.

Names are loaded when they are first used.
"""

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from thinwire.outer.demo import DeMo as DeMo
    from thinwire.outer.loco import LoCo as LoCo
    from thinwire.outer.one_bit_adam import OneBitAdam as OneBitAdam
    from thinwire.outer.zero_one_adam import ZeroOneAdam as ZeroOneAdam

_HOMES = {
    "DeMo": "thinwire.outer.demo",
    "LoCo": "thinwire.outer.loco",
    "OneBitAdam": "thinwire.outer.one_bit_adam",
    "ZeroOneAdam": "thinwire.outer.zero_one_adam",
}

__all__ = [
    "DeMo",
    "LoCo",
    "OneBitAdam",
    "ZeroOneAdam",
]

if not TYPE_CHECKING:

    def __getattr__(name: str) -> Any:
        if name in _HOMES:
            return getattr(importlib.import_module(_HOMES[name]), name)
        raise AttributeError(f"module 'thinwire.outer' has no attribute '{name}'")


def __dir__() -> list[str]:
    return sorted(__all__)
