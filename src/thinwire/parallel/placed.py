"""A network whose parts run on different ranks, as branches at the same time or as stages of a pipeline."""

import inspect
from collections.abc import Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from thinwire.codecs import AnySpec
from thinwire.errors import CommError
from thinwire.outside import outside_of_graphs
from thinwire.parallel.placed_agreement import agree, connect, device_of
from thinwire.parallel.placed_engine import Engine
from thinwire.parallel.placed_graph import traced
from thinwire.parallel.placed_names import checked
from thinwire.parallel.placed_run import Run


class Placed(nn.Module):
    """A network whose parts run on different ranks of a group.

    All ranks of the group call it with the same inputs, and all get its outputs. Every rank keeps only its
    own parameters and buffers, and frees all others, also in `module` itself.

    module: the whole network, the same on all ranks; torch.fx must be able to trace what its parts are
        called from.
    placement: the rank in the group of modules, by name; by the beginning of names, or a pattern such as
        "blocks.[0-5]", for several. The key with the most letters wins. Operations of torch.fx may be named
        too, such as "add_1".
    forward, backward: codecs for what ranks send each other, and for gradients; None sends as it is.
    micro_batches: parts in which inputs are cut along dimension 0, so that ranks work at the same time.
    example: inputs, a tuple or a dictionary, for which to plan now instead of at the first call.
    record: note what happens when, for `timeline`.
    """

    def __init__(
        self,
        module: nn.Module,
        placement: Mapping[str, int],
        *,
        group: dist.ProcessGroup | None = None,
        forward: AnySpec | None = None,
        backward: AnySpec | None = None,
        micro_batches: int = 1,
        example: Sequence[Any] | Mapping[str, Any] | None = None,
        record: bool = False,
    ) -> None:
        super().__init__()
        here = dist.group.WORLD if group is None and dist.is_initialized() else group
        if not isinstance(here, dist.ProcessGroup):
            raise CommError("Placed needs a process group; call torch.distributed.init_process_group first")
        device = device_of(here, (*module.parameters(), *module.buffers()))

        def make() -> Engine:
            parts = traced(module, checked(placement, here.size()))
            return Engine.of(module, parts, here, forward, backward, micro_batches)

        engine = agree(here, make, device)
        connect(here, device)
        engine.record.on = record
        for part in ("_modules", "_parameters", "_buffers", "_non_persistent_buffers_set"):
            self.__dict__[part] = module.__dict__[part]  # shared, so that both let go of what others have
        self.training = module.training
        self.__dict__["_engine"] = engine
        self.__dict__["_signature"] = inspect.signature(module.forward)
        engine.own(module)
        self._register_load_state_dict_pre_hook(engine.hook(), with_module=True)
        if example is not None:
            args, options = ((), example) if isinstance(example, Mapping) else (tuple(example), {})
            engine.plan(self._bound(args, options), self.training)

    _engine: Engine
    _signature: inspect.Signature

    @outside_of_graphs
    def forward(self, *args: Any, **options: Any) -> Any:
        """Run the network: on all ranks of the group, with the same inputs."""
        engine, inputs = self._engine, self._bound(args, options)
        run = Run(engine, engine.plan(inputs, self.training), inputs)
        return run.result(_Through.apply(run, engine.anchor, *run.tensors))

    def stats(self) -> dict[str, Any]:
        """Return what this rank has sent: messages and bytes, forward and backward."""
        return self._engine.stats()

    def operations(self) -> dict[str, tuple[int, ...] | None]:
        """Return the ranks that compute each operation; None for those that are placed at the first call."""
        return self._engine.operations(self.training)

    def timeline(self, *, clear: bool = True) -> list[dict[str, Any]]:
        """Return when this rank computed, sent and waited, with `record=True`, in Chrome's trace format.

        Join the lists of all ranks, and save them as `{"traceEvents": [...]}` for Perfetto.
        """
        return self._engine.timeline(clear)

    def gathered_state_dict(self, rank: int | None = None) -> dict[str, Tensor]:
        """Return the whole network's state: on all ranks of the group, or on one; elsewhere an empty one."""
        return self._engine.gathered(self, rank)

    def _bound(self, args: tuple[Any, ...], options: Mapping[str, Any]) -> dict[str, Any]:
        bound = self._signature.bind(*args, **options)
        bound.apply_defaults()
        return dict(bound.arguments)

    def _apply(self, fn: Any, recurse: bool = True) -> "Placed":
        super()._apply(fn, recurse)
        self._engine.convert(fn)
        return self


class _Through(torch.autograd.Function):
    """A whole walk as one operation of autograd: its backward is the walk back."""

    @staticmethod
    def forward(ctx: Any, run: Run, anchor: Tensor, *tensors: Tensor) -> tuple[Tensor, ...]:
        del anchor, tensors
        ctx.run = run
        outputs = run.forward()
        ctx.mark_non_differentiable(*(x for x, grad in zip(outputs, run.flows, strict=True) if not grad))
        ctx.set_materialize_grads(False)
        return tuple(outputs)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *gradients: Tensor | None) -> tuple[Tensor | None, ...]:
        return None, None, *ctx.run.backward(gradients)
