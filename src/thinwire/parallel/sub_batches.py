"""Convolutions data parallel, fully connected layers model parallel, in sub-batches (Dettmers 2016).

Every rank has a replica of the convolutions and its own samples, and a slice of the columns of every fully
connected layer. In pass k the fully connected layers see sub-batch k: the k-th part of every rank's samples.
The paper broadcasts one rank's samples in each pass. Gathering a part of every rank's samples gives as many,
uses all links at once, and allows any number of passes.
"""

from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from thinwire.collectives import calls
from thinwire.errors import InputError
from thinwire.outside import outside_of_graphs
from thinwire.parallel import sub_batches_layers as layers
from thinwire.parallel.sub_batches_passes import Codecs, Done, Loss, Passes, Together
from thinwire.parallel.sub_batches_timeline import COMPUTE, Timeline
from thinwire.parallel.sub_batches_wires import EXACT, Wire, usable
from thinwire.parallel.wires import SMALL, AnyWire, wires
from thinwire.runtimes.group_runtime import checks_every_call
from thinwire.runtimes.job import Call
from thinwire.runtimes.process_group import runtime_of

Signature = tuple[Any, ...]


class SubBatches(nn.Module):
    """A network whose first part is data parallel and whose fully connected part is split over ranks.

    `net(x)` returns the outputs of this rank's samples. As with DDP, gradients are those of the mean of all
    ranks' losses, so a training loop is that of DDP.

    features: the data-parallel part, in DistributedDataParallel; returns [samples, inputs]. `thinwire.attach`
        encodes its gradients.
    classifier: an `nn.Sequential` of `nn.Linear` and elementwise modules. Every rank keeps its slice of rank
        0's weights.
    count: sub-batches of a batch; by default as many as ranks, as in the paper. It can be set at any time, on
        all ranks.
    group: the ranks, those of `features`.
    forward, backward: the codecs of activations and of their errors; None sends them unchanged.
    output: the codec of the last layer's outputs and their errors.
    min_numel: tensors with fewer elements, counted over all ranks, are sent unchanged.
    seed: of dropout, and of codecs that round at random.
    """

    def __init__(  # noqa: PLR0913
        self,
        features: nn.Module,
        classifier: nn.Sequential,
        count: int | None = None,
        *,
        group: dist.ProcessGroup | None = None,
        forward: AnyWire = "int8",
        backward: AnyWire = "int8",
        output: AnyWire = None,
        min_numel: int = SMALL,
        seed: int = 0,
    ) -> None:
        super().__init__()
        wires(None, None, min_numel)
        self._wire = Wire(group, min_numel)
        self._codecs = Codecs(
            usable(forward, "forward"), usable(backward, "backward"), usable(output, "output")
        )
        self.seed, self.step = seed, 0
        self.count = self._wire.world if count is None else count
        self.features = features
        self.classifier, self._blocks = layers.split(classifier, self.rank, self.world)
        self._met: set[Signature] = set()  #: kinds of batches that ranks have compared
        self._compare("attach", (), self._settings())
        _check_features(features, self._wire.group)
        self._take_first(classifier)

    @property
    def rank(self) -> int:
        """This rank in the group."""
        return self._wire.rank

    @property
    def world(self) -> int:
        """The number of ranks."""
        return self._wire.world

    @property
    def count(self) -> int:
        """Sub-batches of a batch."""
        return self._count

    @count.setter
    def count(self, count: int) -> None:
        if isinstance(count, bool) or not isinstance(count, int) or count < 1:
            raise InputError(f"count must be a number of sub-batches, at least 1, not {count!r}")
        self._count = count

    def forward(self, *inputs: Any) -> Tensor:
        """Return the outputs of this rank's samples."""
        with self._span("features"):
            features = self.features(*inputs)
        return self._outputs(features)

    @outside_of_graphs
    def _outputs(self, features: Tensor) -> Tensor:
        passes = self._passes(features)
        weights = [each for block in self._blocks for each in block.parameters]
        if torch.is_grad_enabled() and (weights or passes.wants_errors):
            return Together.apply(passes, features, *weights)
        return passes.all_forward(features, keep=False)

    @outside_of_graphs
    def update_each(
        self, *inputs: Any, labels: Tensor, loss: Loss, optimizer: torch.optim.Optimizer
    ) -> Tensor:
        """Update the fully connected layers after each sub-batch; return this rank's mean loss.

        `loss(outputs, labels)` returns the mean over samples. `optimizer` has the parameters of `classifier`
        alone. Call `backward` on the result to get the gradients of features: those of the mean over
        sub-batches, each with the weights of its time.
        """
        _check_optimizer(optimizer, self.classifier)
        with self._span("features"):
            features = self.features(*inputs)
        if len(labels) != len(features):
            raise InputError(f"{len(labels)} labels do not fit {len(features)} samples")
        passes = self._passes(features, each=True)
        if len(features) % self.count:
            raise InputError(
                f"{len(features)} samples do not make {self.count} equal sub-batches, which an update for "
                f"each of them needs; set count to a divisor of {len(features)}, or leave out the last batch"
            )

        def update(gradients: dict[int, Tensor]) -> None:
            for each in self.classifier.parameters():
                each.grad = gradients.get(id(each))
            optimizer.step()
            optimizer.zero_grad()

        mean, errors = passes.one_by_one(features.detach(), labels, loss, update)
        return mean if errors is None else Done.apply(features, mean, errors)

    def whole(self) -> nn.Sequential:
        """Return the network on one device, without communication: features, then all columns.

        All ranks must call it. To save a checkpoint that any number of ranks can load, save its `state_dict`.
        """
        weights = [self._gathered(block) for block in self._blocks]
        features = (
            self.features.module if isinstance(self.features, DistributedDataParallel) else self.features
        )
        return nn.Sequential(features, layers.joined(self.classifier, weights))

    def clip_grad_norm_(self, max_norm: float) -> Tensor:
        """Scale gradients so that their norm, on all ranks together, is at most `max_norm`; return the norm.

        torch's function would scale every rank's slices, and the features, by another factor.
        """
        sliced = [each.grad for each in self.classifier.parameters() if each.grad is not None]
        shared = [each.grad for each in self.features.parameters() if each.grad is not None]
        squares = torch.stack([each.float().square().sum() for each in sliced]).sum().view(1)
        calls.all_reduce(squares, "fp32", "sum", self._wire.group, name="norm")
        for each in shared:
            squares = squares + each.float().square().sum()
        norm = squares.sqrt().squeeze()
        factor = (max_norm / (norm + 1e-6)).clamp(max=1.0)
        for each in (*sliced, *shared):
            each.mul_(factor)
        return norm

    @contextmanager
    def record(self) -> Iterator[Timeline]:
        """Record what overlaps on this rank, in all steps inside."""
        device = next(self.classifier.parameters()).device
        before, self._wire.timeline = self._wire.timeline, Timeline(device)
        try:
            yield self._wire.timeline
        finally:
            self._wire.timeline = before

    def stats(self) -> dict[str, Any]:
        """Return this rank's counts: bytes sent, what they would be unchanged, and their ratio."""
        sent, plain = self._wire.sent_nbytes, self._wire.plain_nbytes
        ratio = plain / sent if sent else 1.0
        return {"steps": self.step, "sent_nbytes": sent, "plain_nbytes": plain, "ratio": ratio}

    def get_extra_state(self) -> dict[str, int]:
        """Return what a checkpoint needs beside the weights of this rank."""
        return {"step": self.step, "rank": self.rank, "world": self.world}

    def set_extra_state(self, state: dict[str, int]) -> None:
        """Refuse the slices of another rank, or of another number of ranks."""
        saved = state["rank"], state["world"]
        if saved != (self.rank, self.world):
            raise InputError(
                f"these are the slices of rank {saved[0]} of {saved[1]}, and this is rank {self.rank} of "
                f"{self.world}; every rank loads what it saved. For another number of ranks, save whole()"
            )
        self.step = state["step"]

    def extra_repr(self) -> str:
        """Say how the fully connected part travels."""
        return f"{self.count} sub-batches, rank {self.rank} of {self.world}, {self._how()}"

    # What ranks agree on

    def _how(self) -> str:
        named = (("forward", self._codecs.forward), ("backward", self._codecs.backward))
        told = [f"{name} {codec or 'unchanged'}" for name, codec in (*named, ("output", self._codecs.output))]
        return ", ".join(told)

    def _settings(self) -> str:
        sizes = [self._blocks[0].linear.in_features, *(block.width for block in self._blocks)]
        widths = "-".join(map(str, sizes))
        return f"{self._how()}, min_numel {self._wire.min_numel}, seed {self.seed}, layers {widths}"

    def _compare(self, op: str, numels: tuple[int, ...], detail: str, dtype: str = "") -> None:
        if self.world > 1:
            device = next(self.classifier.parameters()).device
            call = Call(op, "SubBatches", numels, dtype, "", detail)
            runtime_of(self._wire.group, device).compare(call)

    def _passes(self, features: Tensor, *, each: bool = False) -> Passes:
        """Check a batch, and return its passes; they count as a step if they train."""
        signature = (*features.shape, features.dtype, self.count, each)
        if signature not in self._met or checks_every_call():
            dtype = str(features.dtype).removeprefix("torch.")
            how = f"{self.count} sub-batches{', an update for each' if each else ''}"
            self._compare("features", tuple(features.shape), how, dtype)
            self._check(features)
            self._met.add(signature)
        trains = torch.is_grad_enabled()
        self.step += trains
        draws = [layers.Draw(self.seed, self.step, k + 1) for k in range(self.count)]
        wants_errors = trains and features.requires_grad
        return Passes(self._blocks, self._wire, self._codecs, draws, wants_errors)

    def _check(self, features: Tensor) -> None:
        inputs = self._blocks[0].linear.in_features
        if features.dim() != 2 or features.shape[1] != inputs:
            raise InputError(
                f"features must be [samples, {inputs}], not {list(features.shape)}; let nn.Flatten() be "
                "their last module"
            )
        if features.dtype not in EXACT:
            raise InputError(f"features must be float32, bfloat16 or float16, not {features.dtype}")
        if len(features) < self.count:
            raise InputError(
                f"{len(features)} samples of a rank do not make {self.count} sub-batches; set count to "
                f"at most {len(features)}"
            )

    def _take_first(self, classifier: nn.Sequential) -> None:
        """Replace slices of this rank's weights by slices of the first rank's."""
        if self.world == 1:
            return
        first = dist.get_global_rank(self._wire.group, 0)
        linears = [each for each in classifier if isinstance(each, nn.Linear)]
        with torch.no_grad():
            for block, linear in zip(self._blocks, linears, strict=True):
                for name, mine in block.linear.named_parameters():
                    whole = linear.get_parameter(name).detach().clone()
                    calls.broadcast(whole, first, EXACT[whole.dtype], self._wire.group)
                    mine.copy_(whole.split(block.sizes)[self.rank])

    def _gathered(self, block: layers.Block) -> dict[str, Tensor]:
        state = {}
        for name, mine in block.linear.named_parameters():
            whole = mine.new_empty((block.width, *mine.shape[1:])).detach()
            parts = list(whole.split(block.sizes))
            calls.all_gather(parts, mine.detach(), EXACT[mine.dtype], self._wire.group)
            state[name] = whole
        return state

    def _span(self, what: str) -> Any:
        timeline = self._wire.timeline
        return nullcontext() if timeline is None else timeline.span(COMPUTE, what, 0)


def _check_features(features: nn.Module, group: dist.ProcessGroup) -> None:
    """Refuse features whose gradients nobody averages, or over other ranks."""
    ranks = dist.get_process_group_ranks(group)
    averaged: set[int] = set()
    for module in features.modules():
        if isinstance(module, DistributedDataParallel):
            others = dist.get_process_group_ranks(module.process_group)
            if others != ranks:
                raise InputError(
                    f"features are averaged over ranks {others}, but the group has ranks {ranks}"
                )
            averaged |= {id(each) for each in module.parameters()}
    alone = [
        name for name, each in features.named_parameters() if each.requires_grad and id(each) not in averaged
    ]
    if alone and len(ranks) > 1:
        raise InputError(
            f"nothing averages the gradient of {alone[0]} over ranks; wrap the features: "
            "DistributedDataParallel(features)"
        )


def _check_optimizer(optimizer: torch.optim.Optimizer, classifier: nn.Module) -> None:
    own = {id(each) for each in classifier.parameters()}
    given = {id(each) for group in optimizer.param_groups for each in group["params"]}
    if not given or not given <= own:
        raise InputError(
            "the optimizer of update_each must have parameters of net.classifier alone; give those of "
            "net.features to another one"
        )
