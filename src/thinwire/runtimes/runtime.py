"""The runtime that runs a group's jobs: a torch.distributed group, or an MPI communicator."""

from collections.abc import Sequence
from typing import TYPE_CHECKING, Protocol, TypeAlias, Union

import torch
import torch.distributed as dist
from torch import Tensor

from thinwire.rounding import Stream
from thinwire.runtimes import process_group
from thinwire.runtimes.arguments import Endpoint
from thinwire.runtimes.job import Job
from thinwire.runtimes.plan import CallPlan
from thinwire.runtimes.work import MessageWork, Work

if TYPE_CHECKING:
    from mpi4py import MPI

Group: TypeAlias = Union[dist.ProcessGroup, "MPI.Intracomm"]


class Runtime(Endpoint, Protocol):
    """A rank of a group, and the jobs on it, in order."""

    message_counts: dict[tuple[int, int], int]  #: messages so far, by sender and receiver

    @property
    def on_streams(self) -> bool:
        """Whether calls are queued on CUDA streams, so that the host does not wait."""

    @property
    def load_nbytes(self) -> int:
        """Bytes of wire below which a bucket of gradients waits for the next one."""

    @property
    def small_tensor_device(self) -> torch.device:
        """The device for small tensors that ranks gather."""

    @property
    def ranks(self) -> list[int]:
        """Global ranks, in the group's order."""

    def replay(
        self, plan: CallPlan, vectors: Sequence[Tensor], result: object, rng: Stream | None = None
    ) -> Work | None:
        """Begin a call of a plan from a recording of earlier calls; None if there is none."""

    def run(self, job: Job) -> None: ...
    def submit(self, job: Job) -> Work: ...
    def run_apart(self, job: Job, number: int) -> None: ...
    def submit_apart(self, job: Job, number: int) -> MessageWork: ...


def runtime_of(group: Group | None, device: torch.device) -> Runtime:
    """Return the runtime of a group, for tensors on a device; None is torch.distributed's world."""
    if group is not None and type(group).__module__.partition(".")[0] == "mpi4py":
        from thinwire.runtimes import mpi

        return mpi.runtime_of(group, device)  # type: ignore[arg-type]
    return process_group.runtime_of(group, device)  # type: ignore[arg-type]
