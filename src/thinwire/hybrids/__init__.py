"""Hybrids of parallelism, from a job plan: a mesh, where the modules of a network go, codecs for each axis.

docs/hybrids.md begins with the question "my model does not fit".

Names are loaded when they are first used, because torch's DTensor and FSDP take long to load.
"""

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from thinwire.hybrids.batches import part_of_batch as part_of_batch
    from thinwire.hybrids.hybrid import Hybrid as Hybrid
    from thinwire.hybrids.hybrid import apply as apply
    from thinwire.hybrids.job_plan import JobPlan as JobPlan
    from thinwire.hybrids.job_plan import PlacedAxis as PlacedAxis
    from thinwire.hybrids.job_plan import Predicted as Predicted
    from thinwire.hybrids.job_plan import ReplicateAxis as ReplicateAxis
    from thinwire.hybrids.job_plan import ShardAxis as ShardAxis
    from thinwire.hybrids.job_plan import Split as Split
    from thinwire.hybrids.job_plan import TensorAxis as TensorAxis
    from thinwire.hybrids.job_plan import schema as schema

_HOMES = {"Hybrid": "hybrid", "apply": "hybrid", "part_of_batch": "batches"}
__all__ = [
    "Hybrid",
    "JobPlan",
    "PlacedAxis",
    "Predicted",
    "ReplicateAxis",
    "ShardAxis",
    "Split",
    "TensorAxis",
    "apply",
    "part_of_batch",
    "schema",
]

if not TYPE_CHECKING:

    def __getattr__(name: str) -> Any:
        if name in __all__:
            home = f"thinwire.hybrids.{_HOMES.get(name, 'job_plan')}"
            return getattr(importlib.import_module(home), name)
        raise AttributeError(f"module 'thinwire.hybrids' has no attribute '{name}'")


def __dir__() -> list[str]:
    return sorted(__all__)
