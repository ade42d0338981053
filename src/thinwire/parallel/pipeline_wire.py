"""A stage of torch.distributed.pipelining that sends by thinwire: the methods of it that are replaced.

Only the instance changes: its class, its module and its buffers stay torch's, and `release` restores it.
"""

import functools
from collections.abc import Callable
from typing import Any

import torch.distributed as dist

from thinwire.errors import InputError
from thinwire.parallel.pipeline_agreement import Shape, described
from thinwire.parallel.pipeline_direction import Direction
from thinwire.parallel.pipeline_settings import BACKWARD, FORWARD, Settings
from thinwire.runtimes.group_runtime import checks_every_call

ATTRIBUTE = "_thinwire"
METHODS = (
    "clear_runtime_states",
    "_prepare_forward_infra",
    "_prepare_backward_infra",
    "get_fwd_send_ops",
    "get_fwd_recv_ops",
    "get_bwd_send_ops",
    "get_bwd_recv_ops",
    "_retrieve_recv_activations",
    "_retrieve_recv_grads",
)

Ops = list[dist.P2POp]


class StageWire:
    """The wires of one stage, in both directions."""

    def __init__(self, stage: Any, settings: Settings) -> None:
        lacks = [name for name in METHODS if not hasattr(stage, name)]
        if lacks:
            raise InputError(
                f"this {type(stage).__name__} has no {lacks[0]}; thinwire needs torch 2.11 or later"
            )
        self.stage, self.settings, self.step = stage, settings, 0
        self.forward = Direction(stage, FORWARD, settings)
        self.backward = Direction(stage, BACKWARD, settings)
        self._untold = {FORWARD, BACKWARD}  #: directions in which no other stage knows what this one sends
        self.attached = False

    @property
    def directions(self) -> tuple[Direction, Direction]:
        return self.forward, self.backward

    def fasten(self) -> None:
        """Replace the stage's methods; what was attached before is released."""
        for direction in self.directions:
            direction.warm()
        before = getattr(self.stage, ATTRIBUTE, None)
        if before is not None:
            before.release()
        for name in METHODS:
            own = getattr(self, f"_on_{name.lstrip('_')}")
            setattr(self.stage, name, functools.partial(own, getattr(self.stage, name)))
        setattr(self.stage, ATTRIBUTE, self)
        self.attached = True

    def release(self) -> None:
        """Let torch send as it does by itself, from the next step on."""
        if self.attached:
            for name in (*METHODS, ATTRIBUTE):
                delattr(self.stage, name)
        self.attached = False

    # The replaced methods, in the order of a step

    def _on_clear_runtime_states(self, plain: Callable[[], None]) -> None:
        plain()
        self.step += 1
        for direction in self.directions:
            direction.begin_step(self.step)
        if self.forward.kept is not None and checks_every_call():
            self._untold.add(FORWARD)  # all ranks must have named the same samples
        self._tell()

    def _on_prepare_forward_infra(self, plain: Callable[..., Any], *args: Any, **options: Any) -> Any:
        result = plain(*args, **options)
        self._untold.add(FORWARD)
        self._tell()
        return result

    def _on_prepare_backward_infra(self, plain: Callable[..., Any], *args: Any, **options: Any) -> Any:
        result = plain(*args, **options)
        self._untold.add(BACKWARD)
        self._tell()
        return result

    def _on_get_fwd_send_ops(self, plain: Callable[[int], Ops], chunk: int) -> Ops:
        return self.forward.send(plain(chunk), chunk)

    def _on_get_fwd_recv_ops(self, plain: Callable[[int], Ops], chunk: int) -> Ops:
        return self.forward.receive(plain(chunk), chunk)

    def _on_get_bwd_send_ops(self, plain: Callable[[int], Ops], chunk: int) -> Ops:
        return self.backward.send(plain(chunk), chunk)

    def _on_get_bwd_recv_ops(self, plain: Callable[[int], Ops], chunk: int) -> Ops:
        return self.backward.receive(plain(chunk), chunk)

    def _on_retrieve_recv_activations(self, plain: Callable[[int], Any], chunk: int) -> Any:
        self.forward.arrive(chunk)
        return plain(chunk)

    def _on_retrieve_recv_grads(self, plain: Callable[[int], Any], chunk: int) -> Any:
        self.backward.arrive(chunk)
        return plain(chunk)

    # What the other stages must know

    def _tell(self) -> None:
        """Write the notes of directions whose shapes torch has found since the last time."""
        stage = self.stage
        if FORWARD in self._untold and stage.args_recv_info:
            self._untold.remove(FORWARD)
            self.forward.post(outputs(stage), _expected(stage.args_recv_info[0]))
        if BACKWARD in self._untold and stage.grad_recv_info:
            self._untold.remove(BACKWARD)
            self.backward.post(input_grads(stage), _expected(stage.grad_recv_info[0]))


def _expected(infos: Any) -> list[Shape]:
    """Return what a stage receives for one micro-batch, from its buffers."""
    buffers = [(info, getattr(info, "buffer", None)) for info in infos]
    return [
        (info.source, described(buffer.shape, buffer.dtype)) for info, buffer in buffers if buffer is not None
    ]


def outputs(stage: Any) -> list[Shape]:
    """Return the tensors that a stage sends forward for one micro-batch, in torch's order."""
    metas = stage._stage_meta.outputs if hasattr(stage, "_stage_meta") else stage.get_outputs_meta()
    return [
        (to, described(metas[i].shape, metas[i].dtype))
        for i, targets in stage.act_send_info.items()
        for to in targets
        if to is not None
    ]


def input_grads(stage: Any) -> list[Shape]:
    """Return the gradients that a stage sends back for one micro-batch, in torch's order."""
    if stage.is_first:
        return []
    metas = stage._stage_meta.input_grads if hasattr(stage, "_stage_meta") else None
    if metas is None:  # they have the shapes of what arrives
        return _expected(stage.args_recv_info[0])
    infos = [info for info in stage.args_recv_info[0] if getattr(info, "buffer", None) is not None]
    return [
        (info.source, described(meta.shape, meta.dtype))
        for info, meta in zip(infos, metas, strict=True)
        if meta is not None
    ]
