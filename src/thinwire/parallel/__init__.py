"""Parallelism inside a model, with encoded activations and gradients.

- `ColwiseParallel`, `RowwiseParallel`, `SequenceParallel`, `PrepareModule...`: torch's styles of tensor and
  sequence parallelism, with a codec for each direction; docs/parallel/tensor.md.
- `all_to_all`: rows for the experts of other ranks, and back; docs/parallel/expert.md.
- `Placed`: a network whose branches or stages are on different ranks; docs/parallel/placed.md.
- `SubBatches`: data-parallel convolutions, split fully connected layers; docs/parallel/sub-batches.md.
- `PipelineStage`: torch's stage of a pipeline, with a codec for what it sends; docs/parallel/pipeline.md.

Names are loaded when they are first used, because torch's DTensor and its pipelining take long to load.
"""

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from thinwire.parallel.expert import all_to_all as all_to_all
    from thinwire.parallel.pipeline import PipelineStage as PipelineStage
    from thinwire.parallel.placed import Placed as Placed
    from thinwire.parallel.styles import ColwiseParallel as ColwiseParallel
    from thinwire.parallel.styles import PrepareModuleInput as PrepareModuleInput
    from thinwire.parallel.styles import PrepareModuleInputOutput as PrepareModuleInputOutput
    from thinwire.parallel.styles import PrepareModuleOutput as PrepareModuleOutput
    from thinwire.parallel.styles import RowwiseParallel as RowwiseParallel
    from thinwire.parallel.styles import SequenceParallel as SequenceParallel
    from thinwire.parallel.sub_batches import SubBatches as SubBatches
    from thinwire.parallel.sub_batches_timeline import Timeline as Timeline

__all__ = [
    "ColwiseParallel",
    "PipelineStage",
    "Placed",
    "PrepareModuleInput",
    "PrepareModuleInputOutput",
    "PrepareModuleOutput",
    "RowwiseParallel",
    "SequenceParallel",
    "SubBatches",
    "Timeline",
    "all_to_all",
]

_HOMES = {
    "PipelineStage": "thinwire.parallel.pipeline",
    "Placed": "thinwire.parallel.placed",
    "SubBatches": "thinwire.parallel.sub_batches",
    "Timeline": "thinwire.parallel.sub_batches_timeline",
    "all_to_all": "thinwire.parallel.expert",
}

if not TYPE_CHECKING:

    def __getattr__(name: str) -> Any:
        if name in __all__:
            return getattr(importlib.import_module(_HOMES.get(name, "thinwire.parallel.styles")), name)
        raise AttributeError(f"module 'thinwire.parallel' has no attribute '{name}'")


def __dir__() -> list[str]:
    return sorted(__all__)
