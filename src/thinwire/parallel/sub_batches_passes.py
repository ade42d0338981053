"""The order in which sub-batches pass through fully connected layers, so that transfers hide.

Together: all sub-batches pass a layer before any passes the next one. While a sub-batch is computed, the
activations of those before it are on their way to the next layer, and the features or activations of those
after it arrive. Errors take the same way back.

One by one, if the layers are updated after every sub-batch: a sub-batch passes all layers forward and
backward before the next one begins. While it is computed, the next one's features arrive and the previous
one's errors leave.

Either way, the errors of a layer's input leave before the gradients of its weights are computed. Together,
those are one product over all sub-batches, so that more sub-batches do not mean more work.
"""

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.nn.functional import linear

from thinwire.errors import InputError
from thinwire.parallel.sub_batches_layers import Block, Draw, even
from thinwire.parallel.sub_batches_timeline import COMPUTE
from thinwire.parallel.sub_batches_wires import Message, Transfer, Wire

Loss = Callable[[Tensor, Tensor], Tensor]


@dataclass(frozen=True)
class Kept:
    """What a block keeps of a sub-batch, for its gradients."""

    given: Tensor  #: the input of the block
    read: Tensor  #: the input of its linear layer, with a graph from `given`
    linear: Tensor  #: the output of its linear layer
    sent: Tensor  #: the output of the block, with a graph from `linear`


@dataclass(frozen=True)
class Codecs:
    """What is sent how; None: unchanged."""

    forward: str | None
    backward: str | None
    output: str | None


@dataclass
class Passes:
    """The passes of one step: K sub-batches through all blocks."""

    blocks: Sequence[Block]
    wire: Wire
    codecs: Codecs
    draws: Sequence[Draw]  #: of every sub-batch
    wants_errors: bool  #: whether features are trained
    kept: list[list[Kept]] = field(default_factory=list)  #: by block and sub-batch
    gradients: dict[int, Tensor] = field(default_factory=dict)  #: by the parameter's id
    errors: list[tuple[Tensor, Tensor]] = field(default_factory=list)  #: a layer's inputs and output errors

    # In both orders: one sub-batch through one block

    def begin(self, features: Tensor, k: int) -> Transfer:
        """Send the features of a sub-batch to all ranks."""
        counts = [features.shape[0]] * self.wire.world
        return self.wire.gather(
            features, counts, 0, Message("gather features", self.codecs.forward, self.draws[k])
        )

    def forward(self, i: int, k: int, coming: Transfer, keep: list[Kept] | None) -> Transfer:
        """Compute a block for a sub-batch, and send what it computed."""
        block, draw, x = self.blocks[i], self.draws[k], coming.wait()
        with self._span(f"forward {block.name}", k), torch.set_grad_enabled(keep is not None):
            if keep is not None and (i > 0 or self.wants_errors):
                x.requires_grad_()
            read = block.enter(x, draw)
            z = linear(read.detach(), block.linear.weight.detach(), _detached(block.linear.bias))
            y = block.leave(z.requires_grad_() if keep is not None else z, draw)
        if keep is not None:
            keep.append(Kept(x, read, z, y))
        if i + 1 < len(self.blocks):
            message = Message(f"gather {block.name}", self.codecs.forward, draw)
            return self.wire.gather(y.detach(), block.sizes, 1, message)
        return self.wire.rows_home(y.detach(), block.sizes, Message("outputs", self.codecs.output, draw))

    def turn(self, errors: Tensor, k: int) -> Transfer:
        """Send the errors of a sub-batch's outputs to the slices of the last layer."""
        message = Message("errors of outputs", self.codecs.output, self.draws[k])
        return self.wire.columns_home(errors, self.blocks[-1].sizes, message)

    def backward(self, i: int, k: int, coming: Transfer, kept: Kept) -> Transfer | None:
        """Compute the errors of a block's input and send them."""
        block, errors = self.blocks[i], coming.wait()
        with self._span(f"backward {block.name}", k):
            if kept.sent is not kept.linear:
                (errors,) = torch.autograd.grad(kept.sent, kept.linear, errors)
            self.errors.append((kept.read.detach(), errors))
            if not kept.given.requires_grad:
                return None
            back = (errors @ block.linear.weight.detach().to(errors.dtype)).to(kept.read.dtype)
            if kept.read is not kept.given:
                (back,) = torch.autograd.grad(kept.read, kept.given, back)
        what = f"errors of {self.blocks[i - 1].name}" if i else "errors of features"
        sizes = self.blocks[i - 1].sizes if i else even(back.shape[0], self.wire.world)
        return self.wire.add_up(
            back, sizes, 1 if i else 0, Message(what, self.codecs.backward, self.draws[k])
        )

    def weights(self, i: int, k: int) -> None:
        """Compute the gradients of a block's weights from the sub-batches that passed it back."""
        block, pairs = self.blocks[i], self.errors
        with self._span(f"weights {block.name}", k):
            x, errors = (each[0] if len(each) == 1 else torch.cat(each) for each in zip(*pairs, strict=True))
            self.gradients |= block.gradients(x, errors / self.wire.world)
        pairs.clear()

    def _span(self, what: str, k: int) -> AbstractContextManager[None]:
        timeline = self.wire.timeline
        return nullcontext() if timeline is None else timeline.span(COMPUTE, what, k + 1)

    # Together

    def all_forward(self, features: Tensor, *, keep: bool) -> Tensor:
        """Return the outputs of this rank's samples."""
        count = len(self.draws)
        parts = features.split(even(len(features), count))
        coming = [self.begin(part, k) for k, part in enumerate(parts)]
        for i in range(len(self.blocks)):
            row: list[Kept] = []
            for k in range(count):
                coming[k] = self.forward(i, k, coming[k], row if keep else None)
            self.kept.append(row)
        return torch.cat([each.wait() for each in coming])

    def all_backward(self, errors: Tensor) -> Tensor | None:
        """Return the errors of this rank's features; None if they are not wanted."""
        count = len(self.draws)
        parts = errors.split(even(len(errors), count))
        coming: list[Transfer | None] = [self.turn(part, k) for k, part in enumerate(parts)]
        for i in reversed(range(len(self.blocks))):
            row = self.kept.pop()
            for k in range(count):
                here = coming[k]
                assert here is not None
                coming[k] = self.backward(i, k, here, row.pop(0))
            self.weights(i, -1)
        left = [each.wait() for each in coming if each is not None]
        return torch.cat(left) if left else None

    # One by one

    def one_by_one(
        self, features: Tensor, labels: Tensor, loss: Loss, update: Callable[[dict[int, Tensor]], None]
    ) -> tuple[Tensor, Tensor | None]:
        """Return the mean loss of this rank's samples, and the errors of its features."""
        count = len(self.draws)
        parts, wanted = features.chunk(count), labels.chunk(count)
        losses, leaving = [], []
        arriving: Transfer | None = self.begin(parts[0], 0)
        for k in range(count):
            assert arriving is not None
            arriving.wait()
            here, arriving = arriving, self.begin(parts[k + 1], k + 1) if k + 1 < count else None
            kept: list[Kept] = []
            for i in range(len(self.blocks)):
                here = self.forward(i, k, here, kept)
            outputs = here.wait().requires_grad_()
            with self._span("loss", k), torch.enable_grad():
                value = loss(outputs, wanted[k])
                (errors,) = torch.autograd.grad(value, outputs)
            losses.append(value.detach())
            coming: Transfer | None = self.turn(errors, k)
            for i in reversed(range(len(self.blocks))):
                assert coming is not None
                coming = self.backward(i, k, coming, kept.pop())
                self.weights(i, k)
            leaving.append(coming)
            with self._span("update", k):
                update(self.gradients)
            self.gradients.clear()
        left = [each.wait() for each in leaving if each is not None]
        return torch.stack(losses).mean(), torch.cat(left).div_(count) if left else None


def _detached(x: Tensor | None) -> Tensor | None:
    return None if x is None else x.detach()


class Together(torch.autograd.Function):
    """The passes of all sub-batches, as one operation on this rank's features and weights."""

    @staticmethod
    def forward(ctx: Any, passes: Passes, features: Tensor, *weights: Tensor) -> Tensor:
        """Return the outputs of this rank's samples."""
        ctx.passes, ctx.weights = passes, [id(each) for each in weights]
        return passes.all_forward(features.detach(), keep=True)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, errors: Tensor) -> tuple[Tensor | None, ...]:
        """Return the errors of features, and the gradients of weights."""
        passes, ctx.passes = ctx.passes, None
        if passes is None:
            raise InputError("sub-batches were already taken back: call backward once for each forward pass")
        back = passes.all_backward(errors)
        return None, back, *(passes.gradients.get(each) for each in ctx.weights)


class Done(torch.autograd.Function):
    """A loss whose gradient was computed before."""

    @staticmethod
    def forward(ctx: Any, features: Tensor, loss: Tensor, errors: Tensor) -> Tensor:
        """Return the loss."""
        del features
        ctx.save_for_backward(errors)
        return loss.clone()

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, factor: Tensor) -> tuple[Tensor | None, ...]:
        """Return the errors of features."""
        (errors,) = ctx.saved_tensors
        return errors * factor.to(errors.dtype), None, None
