"""A fragment: parameters that are sent together, their global weights, and the outer step that is in flight.

    outer gradient = global weights - local weights                  float32, in one flat buffer
      | thinwire.integrations.handle.Handle.reduce                   policy, codecs, residuals, bytes
    mean over ranks                                                  the same bits on every rank
      | outer optimizer
    global weights                                                   the same bits on every rank
      | alpha
    local weights

The buffer is the only tensor of a call in flight. Inner steps change local weights, which do not share it.
"""

import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

import torch
import torch.distributed as dist
from torch import Tensor, nn

from thinwire import collectives
from thinwire.errors import NotFiniteError
from thinwire.integrations.futures import Future
from thinwire.integrations.handle import Handle
from thinwire.outer.settings import Settings
from thinwire.policy import TensorInfo
from thinwire.runtimes import process_group
from thinwire.runtimes.trace import trace
from thinwire.runtimes.work import Work

EXACT, SCHEDULE = "fp32", "two_shot"


class Place:
    """A parameter of the model: its properties, its local weights, and its global weights in float32."""

    def __init__(self, tensor: TensorInfo, local: Tensor) -> None:
        self.tensor, self.local = tensor, local
        self.weight = nn.Parameter(local.detach().float().clone(memory_format=torch.contiguous_format))


@dataclass
class FragmentBucket:
    """A fragment's outer gradients, in the form of a bucket of gradients of DDP."""

    flat: Tensor
    views: Sequence[Tensor]
    owners: Sequence[nn.Parameter]

    def buffer(self) -> Tensor:
        return self.flat

    def gradients(self) -> list[Tensor]:
        return list(self.views)

    def parameters(self) -> list[nn.Parameter]:
        return list(self.owners)

    def index(self) -> int:
        return 0

    def is_last(self) -> bool:
        return True


@dataclass
class Averages:
    """Buffers of the model that ranks average in float32, such as batch norm's."""

    locals: list[Tensor]
    sent: list[Tensor] = field(default_factory=list)  #: copies, replaced by their means
    last: list[Tensor] = field(default_factory=list)  #: the last finite means
    work: Work | None = None

    def __post_init__(self) -> None:
        self.last = [each.float().clone() for each in self.locals]

    def start(self, group: dist.ProcessGroup | None) -> int:
        """Start averaging; return the bytes that this rank sends."""
        if not self.locals:
            return 0
        self.sent = [each.float().clone() for each in self.locals]
        self.work = collectives.all_reduce(self.sent, EXACT, "avg", group, SCHEDULE, async_op=True)
        return buffers_nbytes(self.locals, group)

    def wait(self) -> None:
        if self.work is not None:
            self.work.wait()
        self.work = None


def buffers_nbytes(buffers: Sequence[Tensor], group: dist.ProcessGroup | None) -> int:
    """Bytes that a rank sends to average buffers."""
    rank, world = dist.get_rank(group), dist.get_world_size(group)
    numels = [each.numel() for each in buffers]
    return trace(numels, EXACT, world, SCHEDULE, rank=rank).sent_nbytes if world > 1 else 0


@dataclass
class Fragment:
    """One fragment on this rank."""

    places: list[Place]
    averages: Averages
    handle: Handle
    settings: Settings
    offset: int  #: its outer steps begin at this step of every round
    due: int = 0  #: the step at which the result of the outer step in flight is used; 0: none is in flight
    rounds: int = 0  #: outer steps whose result was used
    skipped: int = 0  #: outer steps whose mean was not finite
    waited_s: float = 0.0
    future: "Future[Tensor] | None" = None

    def __post_init__(self) -> None:
        self._allocate()
        self.follow(self.handle)

    def _allocate(self) -> None:
        """Make the buffer for outer gradients; a call that failed may still write into the one before."""
        numels = [place.local.numel() for place in self.places]
        self.buffer = torch.zeros(sum(numels), device=self.places[0].local.device)
        rows = self.buffer.split(numels)
        self.views = [row.view(place.weight.shape) for row, place in zip(rows, self.places, strict=True)]
        self.bucket = FragmentBucket(self.buffer, self.views, [place.weight for place in self.places])

    def follow(self, handle: Handle) -> None:
        """Use another handle: of another group, or of a saved run."""
        self.handle = handle
        handle.tensors = {id(place.weight): (place.weight, place.tensor) for place in self.places}

    @property
    def names(self) -> list[str]:
        return [place.tensor.name for place in self.places]

    def begins_at(self, step: int) -> bool:
        """Whether an outer step begins after this inner step."""
        return step % self.settings.every == self.offset

    def start(self, due: int) -> None:
        """Compute the outer gradients and start their all-reduce."""
        locals = [place.local for place in self.places]
        weights = [place.weight.detach() for place in self.places]
        # rounded as local weights are: a rank that did not train has an outer gradient of exactly zero
        rounded = [weight.to(local.dtype).float() for weight, local in zip(weights, locals, strict=True)]
        torch._foreach_copy_(self.views, rounded)
        torch._foreach_sub_(self.views, [local.float() for local in locals])
        self._decay()
        self.due = due
        nbytes = self.averages.start(self.handle.group)
        self.future = self.handle.reduce(self.bucket)
        self.handle.metrics.sent_nbytes += nbytes
        self.handle.metrics.fp32_nbytes += nbytes

    def _decay(self) -> None:
        """Multiply the residuals of earlier outer steps."""
        if self.settings.decay == 1.0:
            return
        residuals = [each for channel in self.handle.channels.values() for each in channel.residuals.values()]
        residuals += list(self.handle.pending.values())
        if residuals:
            torch._foreach_mul_(residuals, self.settings.decay)

    def wait(self) -> None:
        """Wait for the mean; on an error, forget the outer step and its residuals."""
        began = time.perf_counter()
        try:
            if self.future is not None:
                self.future.wait()
            self.averages.wait()
            self._check()
        except BaseException:
            self.drop()
            raise
        finally:
            self.waited_s += time.perf_counter() - began
            self.future = None

    def _check(self) -> None:
        """On a GPU, wait for the device: a call that failed there ends too, but with no mean."""
        runtime = process_group.runtime_of(self.handle.group, self.buffer.device)
        if runtime.on_streams:
            torch.cuda.current_stream(self.buffer.device).synchronize()
            runtime.check()

    def is_finite(self) -> bool:
        """Whether the mean is finite: the same answer on every rank, for all have its bits."""
        tensors = [self.buffer, *self.averages.sent]
        return bool(torch.stack([each.isfinite().all() for each in tensors]).all())

    def use(self, optimizer: torch.optim.Optimizer, alpha: float) -> None:
        """Let the outer optimizer change the global weights, and merge them into the local weights."""
        for place, view in zip(self.places, self.views, strict=True):
            place.weight.grad = view
        optimizer.step()
        for place in self.places:
            place.weight.grad = None
        self.averages.last = self.averages.sent or self.averages.last
        self.merge(alpha)
        self.due, self.rounds = 0, self.rounds + 1

    def merge(self, alpha: float) -> None:
        """local = alpha * local + (1 - alpha) * global, also of averaged buffers."""
        pairs = [(place.local, place.weight.detach()) for place in self.places]
        pairs += list(zip(self.averages.locals, self.averages.last, strict=True))
        for local, mean in pairs:
            local.copy_(mean if alpha == 0.0 else torch.lerp(mean, local.float(), alpha))

    def drop(self) -> None:
        """Forget the outer step in flight, and residuals: they count it as sent."""
        self._allocate()
        self.future, self.due = None, 0
        self.averages.work = None
        for channel in self.handle.channels.values():
            channel.forget()
        self.handle.pending.clear()


def split(places: Sequence[Place], count: int) -> Iterator[list[Place]]:
    """Split parameters into fragments of about equal elements, in the model's order; none is empty."""
    left, total = list(places), sum(place.local.numel() for place in places)
    for number in range(count, 0, -1):
        share, fragment = total / number, [left.pop(0)]
        while number > 1 and len(left) > number - 1 and _nearer(fragment, left[0], share):
            fragment.append(left.pop(0))
        fragment += left if number == 1 else []
        total -= sum(place.local.numel() for place in fragment)
        yield fragment


def _nearer(fragment: Sequence[Place], other: Place, share: float) -> bool:
    """Whether a fragment comes nearer to its share of elements with one more parameter."""
    numel = sum(place.local.numel() for place in fragment)
    return abs(numel + other.local.numel() - share) <= abs(numel - share)


def refused(fragment: Fragment) -> NotFiniteError:
    """Say that an outer gradient is not finite, and in which parameters."""
    wrong = [
        place.tensor.name
        for place, view in zip(fragment.places, fragment.views, strict=True)
        if not bool(view.isfinite().all())
    ]
    where = ", ".join(wrong[:4]) or "the model's buffers"
    return NotFiniteError(
        f"outer step {fragment.rounds + fragment.skipped + 1}: the mean outer gradient of {where} is not "
        "finite, because the weights of a rank are not; global weights are as before. Load a checkpoint, or "
        'use on_nan="skip", which continues from the global weights'
    )
