"""torch.distributed.pipelining: stages send activations and gradients by a codec.

stage = pipe.build_stage(rank, device)           # or PipelineStage(...)
handle = thinwire.integrations.pipeline.attach(stage, "int8")
"""

import sys
from collections.abc import Sequence
from typing import Any

from thinwire.codecs import AnySpec
from thinwire.errors import InputError
from thinwire.integrations.tell import tell
from thinwire.parallel.pipeline_handle import PipelineHandle, fasten
from thinwire.parallel.pipeline_settings import SAME, AnyDirection, Settings

HOME = "torch.distributed.pipelining.stage"


def is_stage(thing: object) -> bool:
    """Whether this is a pipeline stage, or a list of them. Does not load torch's pipelining."""
    home = sys.modules.get(HOME)
    if home is None:
        return False
    if isinstance(thing, list | tuple):
        return bool(thing) and all(is_stage(each) for each in thing)
    return isinstance(thing, home._PipelineStageBase)


def attach(
    stage: Any,
    codec: AnySpec | None = "int8",
    *,
    forward: AnyDirection = SAME,
    backward: AnyDirection = SAME,
    delta: bool = False,
    first: AnySpec = "bf16",
    seed: int = 0,
) -> PipelineHandle:
    """Send a stage's activations and their gradients by a codec, from the next step on.

    Attach all stages of the pipeline, on all ranks, before the same step. If a rank has several stages, pass
    them as a list: they share a handle. Attaching again replaces what was attached.

    stage: a stage of torch.distributed.pipelining, or a list of them.
    codec: a spec (`int8`), a `Codec` or a `Format`; None or `fp32` sends as torch does.
    forward, backward: another codec for activations, or for their gradients.
    delta: send samples that return as the change of their activation; `handle.batch(name)` names the samples
        of the next step.
    first: with `delta`, the codec of samples that were not sent before.
    seed: of random rounding.
    """
    if not is_stage(stage):
        raise InputError(
            "attach takes a stage of torch.distributed.pipelining, or a list of stages, not "
            f"{type(stage).__name__}"
        )
    settings = Settings.of(codec, forward, backward, delta, first, seed)
    stages: Sequence[Any] = stage if isinstance(stage, list | tuple) else [stage]
    handle = fasten(stages, settings)
    if stages[0].group_rank == 0:
        tell(f"thinwire: pipeline of {stages[0].num_stages} stages: {settings.text}")
    return handle
