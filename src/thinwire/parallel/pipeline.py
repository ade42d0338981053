"""A pipeline stage whose activations and gradients travel encoded."""

from typing import Any

import torch
from torch import nn
from torch.distributed import pipelining

from thinwire.codecs import AnySpec
from thinwire.parallel.pipeline_handle import PipelineHandle, fasten
from thinwire.parallel.pipeline_settings import SAME, AnyDirection, Settings


class PipelineStage(pipelining.PipelineStage):
    """torch's `PipelineStage`, with a codec for what it sends: for every schedule of torch.

    All stages of a pipeline need the same codecs. Before the first message they compare them, and the shapes.

    codec: a spec (`int8`), a `Codec` or a `Format`, for activations and for their gradients; None or `fp32`
        sends as torch does.
    forward, backward: another codec for activations, or for their gradients.
    delta: send samples that return as the change of their activation; `stage.handle.batch(name)` names the
        samples of the next step.
    first: with `delta`, the codec of samples that were not sent before.
    seed: of random rounding.

    All other arguments are those of torch's class. `stage.handle` counts bytes.
    """

    handle: PipelineHandle  #: counts, and the samples of the next step

    def __init__(  # noqa: PLR0913
        self,
        submodule: nn.Module,
        stage_index: int,
        num_stages: int,
        device: torch.device,
        *args: Any,
        codec: AnySpec | None = "int8",
        forward: AnyDirection = SAME,
        backward: AnyDirection = SAME,
        delta: bool = False,
        first: AnySpec = "bf16",
        seed: int = 0,
        **options: Any,
    ) -> None:
        settings = Settings.of(codec, forward, backward, delta, first, seed)
        super().__init__(submodule, stage_index, num_stages, device, *args, **options)
        self.handle = fasten([self], settings)
