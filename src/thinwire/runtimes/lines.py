"""The line that runs the jobs of a group: of torch.distributed's, or of an MPI communicator."""

from collections.abc import Sequence
from typing import TYPE_CHECKING, Protocol, TypeAlias, Union

import torch
import torch.distributed as dist
from torch import Tensor

from thinwire.rounding import Stream
from thinwire.runtimes import process_group
from thinwire.runtimes.arguments import Place
from thinwire.runtimes.job import Job, Plan
from thinwire.runtimes.work import Letter, Work

if TYPE_CHECKING:
    from mpi4py import MPI

Group: TypeAlias = Union[dist.ProcessGroup, "MPI.Intracomm"]


class Line(Place, Protocol):
    """A rank of a group, and the order of jobs on it."""

    letters: dict[tuple[int, int], int]  #: messages between two ranks so far

    @property
    def talks_on(self) -> torch.device:
        """Where small tensors must be that ranks exchange."""

    @property
    def ranks(self) -> list[int]:
        """Global ranks, in the group's order."""

    def replay(
        self, plan: Plan, vectors: Sequence[Tensor], result: object, rng: Stream | None = None
    ) -> Work | None:
        """Begin a call of a plan in a way that was kept from earlier ones; None: there is no such way."""

    def run(self, job: Job) -> None: ...
    def submit(self, job: Job) -> Work: ...
    def run_apart(self, job: Job, number: int) -> None: ...
    def submit_apart(self, job: Job, number: int) -> Letter: ...


def line(group: Group | None, device: torch.device) -> Line:
    """The line of a group, for tensors on a device; None is torch.distributed's world."""
    if group is not None and type(group).__module__.partition(".")[0] == "mpi4py":
        from thinwire.runtimes import mpi

        return mpi.line(group, device)  # type: ignore[arg-type]
    return process_group.line(group, device)  # type: ignore[arg-type]
