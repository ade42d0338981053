"""A script that knows nothing about parallelism, run by a job plan.

The plan is applied when the script makes its optimizer: then the model is complete and on its device. Until
the end, four of torch's functions do a little more: `Optimizer.__init__`, `DataLoader.__iter__`,
`clip_grad_norm_` and `torch.save`.
"""

import functools
import gc
import os
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.utils.data import DataLoader

from thinwire.errors import InputError
from thinwire.hybrids import notes, weights
from thinwire.hybrids.batches import digest, samples_of
from thinwire.hybrids.hybrid import Hybrid, apply
from thinwire.hybrids.job_plan import JobPlan
from thinwire.hybrids.norms import clip_grad_norm_
from thinwire.integrations.metrics_report import brief

NOT_APPLIED = "the plan was not applied: the script made no optimizer in this process"


@dataclass(eq=False)
class Script:
    """What is known of the script that runs by a plan."""

    plan: JobPlan
    seed: int = 0
    hybrid: Hybrid | None = None
    calls: int = 0  #: of the model's forward pass
    steps: int = 0
    _names: tuple[tuple[str, int], ...] = ()

    def install(self) -> None:
        """Wrap torch's functions, in this process and from now on."""
        init, iterate, clip = torch.optim.Optimizer.__init__, DataLoader.__iter__, nn.utils.clip_grad_norm_
        script = self

        @functools.wraps(init)
        def __init__(self: torch.optim.Optimizer, params: Any, *args: Any, **options: Any) -> None:  # noqa: N807
            init(self, script.adopt(params), *args, **options)
            script.follow(self)

        @functools.wraps(iterate)
        def __iter__(self: Any) -> Any:  # noqa: N807
            if script.hybrid is not None:
                same_random_numbers()
            return Parts(script, iterate(self), self.batch_size)

        @functools.wraps(clip)
        def clipped(
            parameters: Any, max_norm: float, norm_type: float = 2.0, *args: Any, **options: Any
        ) -> Any:
            if script.hybrid is None:
                return clip(parameters, max_norm, norm_type, *args, **options)
            tensors = [parameters] if isinstance(parameters, Tensor) else list(parameters)
            return clip_grad_norm_(script.hybrid, tensors, max_norm, norm_type)

        torch.optim.Optimizer.__init__ = __init__  # type: ignore[method-assign]
        DataLoader.__iter__ = __iter__  # type: ignore[method-assign]
        nn.utils.clip_grad_norm_ = nn.utils.clip_grad.clip_grad_norm_ = clipped
        torch.save = saving(torch.save)
        self._refuse_scaler()

    def adopt(self, params: Any) -> Any:
        """Apply the plan to the model that owns an optimizer's parameters; return those it has afterwards."""
        given = [params] if isinstance(params, Tensor) else list(params)
        tensors = [each for entry in given for each in _tensors_of(entry)]
        if self.hybrid is None:
            model = outermost(tensors)
            _join(next(iter(model.parameters())).device)
            self.hybrid = apply(model, self.plan, seed=self.seed)
            self._watch(self.hybrid)
        return _renewed(given, self.hybrid.now(tensors))

    def follow(self, optimizer: torch.optim.Optimizer) -> None:
        """Look at every step of an optimizer, and save and load whole tensors."""
        hybrid = self.hybrid
        assert hybrid is not None
        optimizer.register_step_pre_hook(self._before_step)
        if hybrid.placed is not None:
            optimizer.register_state_dict_post_hook(_refuse_state)
            return
        optimizer.register_state_dict_post_hook(
            lambda mine, state: weights.whole_optimizer(mine, state, hybrid.layout_of)
        )
        optimizer.register_load_state_dict_pre_hook(
            lambda mine, state: weights.part_optimizer(mine, state, hybrid.layout_of)
        )

    def share(self, batch: Any, first: bool, size: int | None) -> Any:
        """Return this rank's part of a batch of a loader, or all of it where the model is evaluated.

        A last batch that is smaller, and that cannot be divided equally, is computed by every part. `size` is
        that of the loader's batches, if it has one.
        """
        hybrid = self.hybrid
        if hybrid is None:
            return batch
        if first:
            notes.agree(digest(batch), "ranks got different samples; the script must seed what draws them")
        if not hybrid.model.training or not torch.is_grad_enabled():
            return batch
        hybrid.divided = True
        samples = samples_of(batch)
        if size is not None and samples is not None and samples > size:
            raise InputError(
                f"a batch of {size} samples has {samples} rows: samples must lie along the first dimension, "
                "which is divided among ranks"
            )
        if not first and samples is not None and samples % hybrid.parts:
            return batch
        return hybrid.part_of(batch)

    def stats(self) -> list[Mapping[str, Any]]:
        """Return what is counted of each axis, for `thinwire watch`."""
        return [brief(handle) for handle in self.hybrid.handles.values()] if self.hybrid is not None else []

    def _watch(self, hybrid: Hybrid) -> None:
        def called(_model: nn.Module, _args: Any) -> None:
            self.calls += 1

        hybrid.model.register_forward_pre_hook(called)
        hybrid.save_whole()
        self._names = _names(hybrid.model)

    def _before_step(self, _optimizer: Any, _args: Any, _options: Any) -> None:
        hybrid = self.hybrid
        assert hybrid is not None
        kind = hybrid.kind
        if not self.calls:
            raise InputError(
                f"the script has not called its {kind}, to which the plan was applied, but perhaps a module "
                "inside: call the outermost module that has all parameters"
            )
        if hybrid.parts > 1 and not hybrid.divided:
            raise InputError(
                f"no DataLoader gave a batch since the optimizer was made, so all {hybrid.parts} parts of "
                "the data would train on the same samples: read batches from a torch.utils.data.DataLoader, "
                "in training mode, or divide each with thinwire.hybrids.part_of_batch(x, y)"
            )
        if _names(hybrid.model) != self._names:
            raise InputError(
                f"the script changed the parameters of its {kind} after it made the optimizer, which is when "
                "the plan was applied: make the optimizer last"
            )
        if not self.steps:
            hybrid.check_copies()
        self.steps += 1

    def _refuse_scaler(self) -> None:
        """Refuse gradient scaling where ranks hold other gradients: they would not skip the same steps."""
        unscale, script = torch.amp.GradScaler._unscale_grads_, self

        @functools.wraps(unscale)
        def refusing(self: Any, *args: Any, **options: Any) -> Any:
            if script.plan.ranks > script.plan.size("replicate"):
                raise InputError(
                    "GradScaler skips steps on ranks whose part of the gradients overflows, and not on "
                    "others: with axes other than 'replicate', use bfloat16, which needs no scaling"
                )
            return unscale(self, *args, **options)

        torch.amp.GradScaler._unscale_grads_ = refusing  # type: ignore[method-assign]


class Parts:
    """The iterator of a loader that gives this rank its part of each batch."""

    def __init__(self, script: Script, inner: Any, size: int | None) -> None:
        self._script, self._inner, self._size, self._first = script, inner, size, True

    def __iter__(self) -> "Parts":
        return self

    def __len__(self) -> int:
        return len(self._inner)

    def __next__(self) -> Any:
        batch = next(self._inner)
        if self._script.hybrid is None:
            return batch
        first, self._first = self._first, False
        return self._script.share(batch, first, self._size)

    def __getattr__(self, name: str) -> Any:
        return getattr(self.__dict__["_inner"], name)


def outermost(tensors: Iterable[Tensor]) -> nn.Module:
    """Return the module that holds all these parameters, and that no other such module holds."""
    wanted = {id(each) for each in tensors}
    if not wanted:
        raise InputError("the script made an optimizer without parameters")
    alive = [each for each in gc.get_objects() if issubclass(type(each), nn.Module)]
    owners = [each for each in alive if wanted <= {id(one) for one in each.parameters()}]
    inner = {id(one) for each in owners for one in each.modules() if one is not each}
    models = [each for each in owners if id(each) not in inner]
    if not models:
        raise InputError("the optimizer's parameters belong to no single module; put all of them into one")
    if len(models) > 1:
        kinds = " and ".join(type(each).__name__ for each in models)
        raise InputError(
            f"the optimizer's parameters belong to several modules ({kinds}), none inside another"
        )
    (model,) = models
    if hasattr(model, "_orig_mod"):
        raise InputError("torch.compile does not go with --plan: leave it out")
    return model


def same_random_numbers() -> None:
    """Let all ranks draw the same random numbers from here on: those of rank 0.

    Loaders shuffle with them. Ranks that compute different modules may have drawn different amounts.
    """
    state = torch.get_rng_state()
    mine = bytes(state.tolist()).hex() if dist.get_rank() == 0 else ""
    first = notes.gathered(mine)[0]
    torch.set_rng_state(torch.tensor(list(bytes.fromhex(first)), dtype=torch.uint8))


def saving(save: Callable[..., Any]) -> Callable[..., Any]:
    """Return `torch.save` for scripts that all ranks run: a file is complete, whoever wrote it last."""

    @functools.wraps(save)
    def saved(thing: Any, file: Any, *args: Any, **options: Any) -> Any:
        if not dist.is_initialized() or not isinstance(file, str | os.PathLike):
            return save(thing, file, *args, **options)
        path = Path(file)
        own = path.with_name(f".{path.name}.{dist.get_rank()}")
        save(thing, own, *args, **options)
        own.replace(path)
        notes.gathered("saved")  # whoever reads it next reads the new one
        return None

    return saved


def _join(device: torch.device) -> None:
    """Make the process group of this job."""
    if not dist.is_initialized():
        dist.init_process_group("nccl" if device.type == "cuda" else "gloo")


def _tensors_of(entry: Any) -> list[Tensor]:
    """Return the tensors of an entry for an optimizer: a tensor, a pair with a name, or a group."""
    if isinstance(entry, Mapping):
        inside = entry["params"]
        entry["params"] = inside = [inside] if isinstance(inside, Tensor) else list(inside)  # type: ignore[index]
        return [tensor for each in inside for tensor in _tensors_of(each)]
    return [entry[1]] if isinstance(entry, tuple) else [entry]


def _renewed(entries: Iterable[Any], now: Mapping[int, Tensor | None]) -> list[Any]:
    """Return the entries with the parameters of now, without those that other ranks have."""
    renewed: list[Any] = []
    for entry in entries:
        if isinstance(entry, Mapping):
            renewed.append({**entry, "params": _renewed(entry["params"], now)})
            continue
        parameter = now[id(entry[1] if isinstance(entry, tuple) else entry)]
        if parameter is not None:
            renewed.append((entry[0], parameter) if isinstance(entry, tuple) else parameter)
    return renewed or [{"params": []}]


def _refuse_state(_optimizer: torch.optim.Optimizer, _state: Any) -> None:
    raise InputError(
        "with an axis 'placed', every rank has the optimizer's state of its own modules only, and the script "
        "would save that as the whole: save the model alone"
    )


def _names(model: nn.Module) -> tuple[tuple[str, int], ...]:
    return tuple((name, id(each)) for name, each in model.named_parameters())
