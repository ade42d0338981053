"""The program of every worker of `thinwire launch`: it runs the script and attaches to its models.

    python -m thinwire.integrations.launch_worker JOB [ARGUMENT ...]

`DistributedDataParallel` stays the same class: only two of its methods are wrapped, so `isinstance`,
subclasses and `from torch.nn.parallel import DistributedDataParallel as DDP` work as always. Each model is
passed to `thinwire.attach` once it is made. A model that `fully_shard` was applied to is passed to it at its
first forward pass: only then it is known which module is the outermost. If the script registers its own hook,
or calls `thinwire.attach` itself, that is used, and a line says so. Another line says so at once if the
script does what cannot be compressed here: it starts its own processes, or uses FSDP1.
"""

import atexit
import functools
import os
import runpy
import sys
import weakref
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from multiprocessing.process import BaseProcess
from pathlib import Path
from types import TracebackType
from typing import Any, ClassVar

import torch
import torch.distributed as dist
import torch.multiprocessing
from torch import nn
from torch.distributed.fsdp import FullyShardedDataParallel
from torch.nn.parallel import DistributedDataParallel

from thinwire.errors import InputError
from thinwire.integrations import fsdp, fsdp_seam
from thinwire.integrations.ddp import HookState, attach
from thinwire.integrations.handle import Handle
from thinwire.integrations.job_status import Writer
from thinwire.integrations.launcher import Job
from thinwire.integrations.metrics_report import brief
from thinwire.integrations.metrics_table import headline
from thinwire.integrations.sharded import ShardedHandle
from thinwire.policy import Policy

NOT_MADE = "the script made no DistributedDataParallel or fully_shard model in this process"
ALONE = "there is one process only, which sends nothing; start more with --nproc-per-node"
OWN_HOOK = "DDP registered a hook of its own, for mixed precision or for an optimizer in the backward pass"
OTHERS = "the script uses a hook of its own"
SPAWNED = "the script starts processes itself (torch.multiprocessing), which thinwire launch does not reach"
FSDP1 = "the script uses FullyShardedDataParallel, and thinwire compresses models of fully_shard (FSDP2)"
#: Tells torch to use torchrun's store. Processes that a script starts itself have no such store, and would
#: wait for it forever.
AGENT_STORE = "TORCHELASTIC_USE_AGENT_STORE"
HIDDEN = (__file__, runpy.__file__, "<frozen runpy>")


class ShardedCounts:
    """The counts of a sharded model. They outlive it; its handle would keep it alive."""

    tells_wait: ClassVar[bool] = ShardedHandle.tells_wait

    def __init__(self, handle: ShardedHandle) -> None:
        self.metrics, self.auto, self._policy = handle.metrics, handle.auto, handle.policy
        self.handle = weakref.ref(handle)

    @property
    def policy(self) -> Policy:
        """The model's policy, which `auto` may change; the last one known of a model that is gone."""
        handle = self.handle()
        if handle is not None:
            self._policy = handle.policy
        return self._policy


@dataclass(eq=False)
class Hook:
    """The hook that a model runs: thinwire's, until the script registers another or attaches again."""

    state: Any
    function: Callable[[Any, Any], Any]
    ours: Handle | None = None
    is_scripts: bool = False
    last: Mapping[str, Any] | None = None  #: statistics of a deleted model

    def handle(self) -> Handle | ShardedHandle | None:
        """Return the attached handle; None if the hook is not thinwire's, or if the model is gone."""
        if isinstance(self.state, ShardedCounts):
            return self.state.handle()
        handle = self.state.handle if isinstance(self.state, HookState) else self.state
        return handle if isinstance(handle, Handle) else None

    def stats(self) -> Mapping[str, Any] | None:
        handle = self.state if isinstance(self.state, ShardedCounts) else self.handle()
        return brief(handle) if handle is not None else self.last

    def retire(self) -> None:
        """Keep the statistics of a deleted model, and release its residuals."""
        self.last, self.state, self.ours = self.stats(), None, None


@dataclass
class Models:
    """The models that a script makes, and the hook of each."""

    job: Job
    say: Callable[[str], None]
    hooks: list[Hook] = field(default_factory=list)
    refused: list[str] = field(default_factory=list)  #: why a model was not attached
    _by_model: "weakref.WeakKeyDictionary[DistributedDataParallel, Hook]" = field(
        default_factory=weakref.WeakKeyDictionary
    )
    _attaching: bool = False
    _register: Callable[..., None] = DistributedDataParallel.register_comm_hook

    def install(self) -> None:
        """Intercept every model that is made and every hook that is registered from now on."""
        init, register, models = DistributedDataParallel.__init__, self._register, self

        @functools.wraps(init)
        def __init__(self: DistributedDataParallel, *args: Any, **options: Any) -> None:  # noqa: N807
            init(self, *args, **options)
            models.take(self)

        @functools.wraps(register)
        def register_comm_hook(self: DistributedDataParallel, state: Any, hook: Any) -> None:
            models.register(self, state, hook)

        DistributedDataParallel.__init__ = __init__  # type: ignore[method-assign]
        DistributedDataParallel.register_comm_hook = register_comm_hook  # type: ignore[method-assign]
        self._look_beyond()

    def _look_beyond(self) -> None:
        """Notice processes that the script starts, and models that it shards, from now on."""
        spawning = sys.modules["torch.multiprocessing.spawn"]  # a function has the same name
        start = spawning.start_processes

        @functools.wraps(start)
        def start_processes(fn: Any, args: Any = (), nprocs: int = 1, *more: Any, **options: Any) -> Any:
            self.see_spawn(nprocs)
            return start(fn, args, nprocs, *more, **options)

        for module in (torch.multiprocessing, spawning):
            module.start_processes = start_processes  # type: ignore[attr-defined]
        _hide_store_from_children()
        self._notice(FullyShardedDataParallel, FSDP1)
        fsdp_seam.at_first_forward(self.take_sharded)

    def _notice(self, kind: type, why: str) -> None:
        """Print `why` when the first object of a class is made."""
        init, models = kind.__init__, self  # type: ignore[misc]

        @functools.wraps(init)
        def __init__(self: Any, *args: Any, **options: Any) -> None:  # noqa: N807
            if why not in models.refused:
                models.refused.append(why)
                models.say(f"thinwire: {why}: what it sends is not compressed")
            init(self, *args, **options)

        kind.__init__ = __init__  # type: ignore[misc]

    def see_spawn(self, nprocs: int) -> None:
        """Say that processes started by the script train without thinwire, and what to do instead."""
        os.environ.pop(AGENT_STORE, None)
        self.refused.append(SPAWNED)
        self.say(
            f"thinwire: {SPAWNED}: what these send is not compressed.\n"
            f"  Let the launcher start them: thinwire launch --nproc-per-node {nprocs}, and the script calls "
            f"its function itself, with the rank int(os.environ['RANK']).\n"
            f"  Or run it by python, with thinwire.attach(model, '{self.job.codec}') after "
            f"DistributedDataParallel(...)."
        )

    def take(self, model: DistributedDataParallel) -> None:
        """Attach to a model that was just made."""
        if dist.get_world_size(model.process_group) == 1:
            self.refused.append(ALONE)
        elif model._comm_hooks:
            self.refused.append(OWN_HOOK)
        else:
            seed = self.job.seed + len(self.hooks)  # models may share names; their random numbers differ
            self._attaching = True
            try:
                handle = attach(model, self.job.codec, seed=seed, shadow=self.job.shadow)
            finally:
                self._attaching = False
            self._by_model[model].ours = handle

    def take_sharded(self, model: nn.Module) -> None:
        """Attach to a sharded model at its first forward pass; not if the script attached to it."""
        handle = fsdp.attached(model)
        if handle is not None:
            self.say(
                f"thinwire: the script calls thinwire.attach itself: --codec {self.job.codec} is not used"
            )
        else:
            seed = self.job.seed + len(self.hooks)
            try:
                handle = fsdp.attach(model, self.job.codec, weights=self.job.weights, seed=seed)
            except InputError as error:  # what the script made cannot be compressed: it trains without
                self.refused.append(str(error))
                self.say(f"thinwire: a sharded model is not compressed: {error}")
                return
        self.hooks.append(Hook(ShardedCounts(handle), _never))

    def register(self, model: DistributedDataParallel, state: Any, function: Any) -> None:
        """Register a hook: thinwire's, one of the script in its place, or one of a model without thinwire."""
        hook = self._by_model.get(model)
        if self._attaching:
            hook = Hook(state, function)
            self._register(model, (self, hook), pass_on)
            self._by_model[model] = hook
            self.hooks.append(hook)
            weakref.finalize(model, hook.retire).atexit = False
        elif hook is None or hook.is_scripts:
            self._register(model, state, function)
        else:
            model._check_comm_hook(function)
            hook.state, hook.function = state, function
            self.yield_to(hook, f"registers {getattr(function, '__qualname__', 'a hook')} itself")

    def yield_to(self, hook: Hook, what: str) -> None:
        """Use the script's own hook instead of thinwire's."""
        hook.is_scripts = True
        self.say(f"thinwire: the script {what}: that is used, and --codec {self.job.codec} is not")

    def stats(self) -> list[Mapping[str, Any]]:
        """Return the statistics of every model that uses thinwire."""
        stats = [hook.stats() for hook in list(self.hooks)]
        return [model_stats for model_stats in stats if model_stats is not None]

    def summary(self) -> str:
        """Return one line for the end of the run."""
        stats = self.stats()
        if not stats:
            others = [OTHERS for hook in self.hooks if hook.is_scripts]
            return f"thinwire: nothing was attached: {(others + self.refused + [NOT_MADE])[0]}"
        marked = [each["since"] for each in stats if each["since"] is not None]
        return headline(
            {
                "label": ", ".join(dict.fromkeys(each["label"] for each in stats)),
                "steps": max(each["steps"] for each in stats),
                "since": {"steps": max(each["steps"] for each in marked), **_bytes(marked)}
                if marked
                else None,
                **_bytes(stats),
            }
        )


def _never(_state: Any, _bucket: Any) -> Any:
    """A sharded model has no hook for buckets."""
    raise AssertionError


def _hide_store_from_children() -> None:
    """Hide the launcher's store from processes that the script starts, which make their own groups.

    Workers of data loaders start the same way, and are not affected.
    """
    begin = BaseProcess.start

    @functools.wraps(begin)
    def start(process: BaseProcess) -> None:
        value = os.environ.pop(AGENT_STORE, None)
        try:
            begin(process)
        finally:
            if value is not None:
                os.environ[AGENT_STORE] = value

    BaseProcess.start = start  # type: ignore[method-assign, assignment]


def _bytes(counted: list[Mapping[str, Any]]) -> dict[str, int]:
    """Add up the bytes of several models."""
    return {key: sum(each[key] for each in counted) for key in ("sent_nbytes", "fp32_nbytes")}


def pass_on(
    state: tuple[Models, Hook],
    bucket: dist.GradBucket,  # type: ignore[name-defined]
) -> torch.futures.Future[torch.Tensor]:
    """The hook that DDP knows: it calls the model's current hook."""
    models, hook = state
    if not hook.is_scripts and hook.handle() is not hook.ours:
        models.yield_to(hook, "calls thinwire.attach itself")
    return hook.function(hook.state, bucket)


def run(job: Job) -> None:
    """Run the script as Python itself would."""
    place = Path.cwd() if job.module else Path(job.script).resolve().parent
    if not sys.flags.safe_path:
        sys.path[0] = str(place)
    sys.argv = [job.script, *job.arguments]
    if job.module:
        runpy.run_module(job.script, run_name="__main__", alter_sys=True)
    else:
        runpy.run_path(str(Path(job.script).absolute()), run_name="__main__")


def main(words: list[str]) -> None:
    """Run the script with thinwire; rank 0 says what was sent, however the script ends."""
    job = Job.from_words(words)
    is_first = os.environ.get("RANK", "0") == "0"
    sys.excepthook = without_our_frames(sys.excepthook)
    models = Models(job, say if is_first else lambda _line: None)
    models.install()
    writer = Writer(Path(job.status), models.stats) if is_first and job.status else None
    if writer:
        writer.start()
    succeeded = False
    try:
        run(job)
        succeeded = True
    except SystemExit as end:
        succeeded = end.code in (None, 0)
        raise
    finally:
        if succeeded:
            models.say(models.summary())
        elif models.stats():
            atexit.register(models.say, models.summary())  # after the traceback
        if writer:
            writer.stop()


def without_our_frames(show: Callable[..., Any], hidden: Sequence[str] = HIDDEN) -> Callable[..., Any]:
    """Return a hook whose tracebacks begin at the script; without any frame if the script never began."""

    def hook(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
        first = trace
        while first and first.tb_frame.f_code.co_filename in hidden:
            first = first.tb_next
        if first or isinstance(error, SyntaxError | ImportError):
            error.__traceback__ = first
        show(kind, error, error.__traceback__)

    return hook


def say(line: str) -> None:
    sys.stderr.write(f"{line}\n")
    sys.stderr.flush()


if __name__ == "__main__":
    main(sys.argv[1:])
