"""Training that rarely communicates: ranks average from time to time, or send a small part of each step.

docs/outer.md begins with the question "my ranks are in two cities".

- `DeMo`: optimizers that communicate inside `step()`; docs/outer-optimizers.md.

Names are loaded when they are first used.
"""

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from thinwire.outer.demo import DeMo as DeMo

_HOMES = {
    "DeMo": "thinwire.outer.demo",
}

__all__ = [
    "DeMo",
]

if not TYPE_CHECKING:

    def __getattr__(name: str) -> Any:
        if name in _HOMES:
            return getattr(importlib.import_module(_HOMES[name]), name)
        raise AttributeError(f"module 'thinwire.outer' has no attribute '{name}'")


def __dir__() -> list[str]:
    return sorted(__all__)
