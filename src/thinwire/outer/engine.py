"""The outer loop: inner steps as before, and every `every` steps an outer step among all ranks.

optimizer.step()          the user's loop, as it is
  | hook                  counts steps; no communication in most of them
fragments that begin      outer gradients are computed and their all-reduce is started
fragments that are due    their means change the global weights, and these the local weights
"""

import weakref
from collections.abc import Mapping
from types import TracebackType
from typing import Any, Self

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.optim import Optimizer

from thinwire.errors import InputError
from thinwire.outer import checkpoint, joining, report
from thinwire.outer.fragment import Fragment, Place, refused
from thinwire.outer.model import averaged_buffers, check_group, check_optimizer, local_part, places
from thinwire.outer.settings import RAISE, Settings

_attached: "weakref.WeakKeyDictionary[nn.Module, weakref.ref[Outer]]" = weakref.WeakKeyDictionary()


class Outer:
    """The outer loop of one model: made by `DiLoCo`, `LocalSGD` or `SparseLoCo`.

    Making it is the one line: it hooks into `optimizer.step()`. All ranks then have the weights of the
    group's first rank.
    """

    def __init__(
        self,
        model: nn.Module,
        optimizer: Optimizer,
        settings: Settings,
        group: dist.ProcessGroup | None = None,
    ) -> None:
        known = _attached.get(model)
        if known is not None and known() is not None:
            raise InputError("this model has an outer loop already; detach it first: outer.detach()")
        self.model, self.inner, self.settings, self.group = model, optimizer, settings, group
        self.places: list[Place] = places(model, settings)
        check_group(model, group, self.device)
        check_optimizer(model, optimizer)
        self.optimizer = settings.make_optimizer([place.weight for place in self.places])
        self.text = settings.text(self.optimizer)  #: all settings in words, before any learning rate changes
        self.step = 0  #: inner steps
        self.shared_residuals = False  #: whether all ranks hold the mean of their residuals
        self.fragments: list[Fragment] = joining.fragments(self, averaged_buffers(model, settings))
        joining.enter(self, None)
        self._hook = optimizer.register_step_post_hook(self._after_step)
        _attached[model] = weakref.ref(self)

    def __repr__(self) -> str:
        return f"<thinwire.{type(self).__name__}: {self.step} steps, {self.rounds} outer steps>"

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Synchronize and detach; after an error, only detach."""
        if kind is None:
            self.sync()
        self.detach()

    @property
    def rounds(self) -> int:
        """Outer steps of all fragments."""
        return sum(fragment.rounds for fragment in self.fragments)

    @property
    def device(self) -> torch.device:
        """Where the weights are."""
        return self.places[0].local.device

    def _after_step(self, *_: object) -> None:
        """Run after every step of the inner optimizer."""
        self.step += 1
        for fragment in self.fragments:
            if fragment.due and fragment.due <= self.step:
                self._end(fragment, self.settings.alpha)
        for fragment in self.fragments:
            if fragment.begins_at(self.step):
                self._begin(fragment, self.step + self.settings.delay)
                if not self.settings.delay:
                    self._end(fragment, self.settings.alpha)

    @torch.no_grad()
    def _begin(self, fragment: Fragment, due: int) -> None:
        self.shared_residuals = False
        try:
            fragment.start(due)
        except BaseException:
            fragment.drop()
            raise

    @torch.no_grad()
    def _end(self, fragment: Fragment, alpha: float) -> None:
        """Wait for an outer step in flight, and use its result."""
        fragment.wait()
        if fragment.is_finite():
            fragment.use(self.optimizer, alpha)
            return
        error = refused(fragment)
        fragment.skipped += 1
        fragment.drop()
        if self.settings.on_nan == RAISE:
            raise error
        fragment.merge(0.0)
        self._forget_what_is_not_finite(fragment)

    def _forget_what_is_not_finite(self, fragment: Fragment) -> None:
        """Drop this rank's inner optimizer state of parameters for which it is not finite."""
        mine = {place.local.data_ptr() for place in fragment.places}
        for parameter, state in list(self.inner.state.items()):
            numbers = [
                each for each in state.values() if isinstance(each, Tensor) and each.is_floating_point()
            ]
            if local_part(parameter).data_ptr() in mine and not all(
                bool(each.isfinite().all()) for each in numbers
            ):
                del self.inner.state[parameter]

    def sync(self) -> None:
        """Make an outer step of the whole model now, on all ranks: afterwards all have the same weights.

        Outer steps in flight are used first. Call it before evaluation and at the end of training.
        """
        self.finish()
        for fragment in self.fragments:
            self._begin(fragment, self.step)
        for fragment in self.fragments:
            self._end(fragment, 0.0)

    def finish(self) -> None:
        """Use the results of outer steps in flight before they are due: on all ranks, at the same step."""
        for fragment in sorted(self.fragments, key=lambda each: each.due):
            if fragment.due:
                self._end(fragment, self.settings.alpha)

    def detach(self) -> None:
        """Stop communicating, from the next step on; local weights stay as they are."""
        self._hook.remove()
        _attached.pop(self.model, None)

    def global_weights(self) -> dict[str, Tensor]:
        """Return a copy of the global weights in float32, by name: the same bits on all ranks."""
        return {place.tensor.name: place.weight.detach().clone() for place in self.places}

    # Ranks that come and go

    def hand_over(self) -> None:
        """Synchronize, and share residuals: on all ranks, before some leave.

        Afterwards each rank has the mean of all residuals, so that those who stay have all of it.
        """
        self.sync()
        joining.share_residuals(self)

    def regroup(self, group: dist.ProcessGroup | None = None) -> None:
        """Continue in a new group: those who stay call this, those who join make a new outer loop.

        A rank that joins, or that missed an outer step, receives the global weights, the outer optimizer's
        state and the number of steps. Others keep their local weights. An outer step in flight is dropped;
        its work is part of the next one. Residuals move along, but not those of a rank that left without
        `hand_over`.
        """
        check_group(self.model, group, self.device)
        before = self.group, [fragment.handle for fragment in self.fragments]
        self.group = group
        try:
            joining.enter(self, before[1])
        except BaseException:
            self.group = before[0]
            for fragment, handle in zip(self.fragments, before[1], strict=True):
                fragment.follow(handle)
            raise

    # Statistics

    def stats(self) -> dict[str, Any]:
        """Return this rank's counts as plain numbers (see `thinwire.outer.report.describe`)."""
        return report.describe(self)

    def summary(self, *, everywhere: bool = False) -> None:
        """Print `stats` as a table: on the group's first rank, or on every rank."""
        if everywhere or self.fragments[0].handle.rank == 0:
            report.print_summary(self.stats())

    @property
    def sent_nbytes(self) -> int:
        """Bytes that this rank has sent in outer steps."""
        return sum(fragment.handle.metrics.sent_nbytes for fragment in self.fragments)

    # Checkpoints

    def state_dict(self) -> dict[str, Any]:
        """Return plain tensors, numbers and strings: each rank saves its own, beside model and optimizer.

        It waits for outer steps in flight and saves their means, but does not use them.
        """
        return checkpoint.save(self)

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue a run, bit for bit; load the model and the inner optimizer first.

        A state that does not fit is refused and changes nothing.
        """
        checkpoint.load(self, state)
