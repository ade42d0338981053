"""Parallel training whose messages between ranks are encoded: pipeline stages.

`PipelineStage` is torch's stage of the same name, with a codec for what it sends. The rest of a script stays
as it is; docs/parallel/pipeline.md has examples. Names are loaded when they are first used, because torch's
pipelining takes long to load.
"""

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from thinwire.parallel.pipeline import PipelineStage as PipelineStage

__all__ = ["PipelineStage"]

_HOMES = {"PipelineStage": "thinwire.parallel.pipeline"}

if not TYPE_CHECKING:

    def __getattr__(name: str) -> Any:
        if name in _HOMES:
            return getattr(importlib.import_module(_HOMES[name]), name)
        raise AttributeError(f"module 'thinwire.parallel' has no attribute '{name}'")


def __dir__() -> list[str]:
    return sorted(__all__)
