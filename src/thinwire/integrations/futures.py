"""One future for several calls, correct on GPUs too.

torch's `collect_all` ignores streams: its waiter may read memory that a GPU has yet to write. Here the last
call to complete waits, on its own stream, for the work of all others.
"""

import contextlib
import threading
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

Future = torch.futures.Future


def gathered(
    futures: "Sequence[Future[Any]]",
    finish: Callable[[], Tensor],
    device: torch.device,
    failed: Callable[[Exception], Exception] = lambda error: error,
) -> "Future[Tensor]":
    """Return a future of `finish()`, which runs once all are done; `failed` rewords their errors."""
    whole: Future[Tensor] = Future(devices=_devices(device))
    left, lock = [len(futures)], threading.Lock()

    def count(_: "Future[Any]") -> None:
        with lock:
            left[0] -= 1
            if left[0]:
                return
        try:
            for future in futures:
                future.wait()  # raises the call's error; on a GPU the current stream waits
        except Exception as error:  # noqa: BLE001
            whole.set_exception(failed(error))  # type: ignore[arg-type]
            return
        try:
            whole.set_result(finish())
        except Exception as error:  # noqa: BLE001
            whole.set_exception(error)  # type: ignore[arg-type]

    for future in futures:
        future.add_done_callback(count)
    return whole


def raise_when_waited_for(futures: "Sequence[Future[Any]]") -> None:
    """Wait for futures at the end of this backward pass, and raise their errors unchanged.

    DDP waits too, but reports a failed Python future only as a result that is not a tensor.
    """

    def wait() -> None:
        for future in futures:
            future.wait()

    with contextlib.suppress(RuntimeError):  # no backward pass: a rank in `join` only answers other ranks
        torch.autograd.Variable._execution_engine.queue_callback(wait)


def ready(buffer: Tensor) -> "Future[Tensor]":
    """Return a completed future; on a GPU, of work on the current stream."""
    future: Future[Tensor] = Future(devices=_devices(buffer.device))
    future.set_result(buffer)
    return future


def done(buffer: Tensor) -> "Future[Tensor]":
    """Return a completed future without streams: users of the buffer wait for it by other means."""
    future: Future[Tensor] = Future()
    future.set_result(buffer)
    return future


def pending(like: Tensor) -> "Future[Tensor]":
    """Return a future to complete later."""
    return Future(devices=_devices(like.device))


def pass_on(promised: "Future[Tensor]", buffer: Tensor, whole: "Future[Tensor]") -> None:
    """Complete a bucket's future with the outcome of its call; runs in the call's callback."""
    try:
        whole.value()
        promised.set_result(buffer)
    except Exception as error:  # noqa: BLE001
        promised.set_exception(error)  # type: ignore[arg-type]


def _devices(device: torch.device) -> list[int | str | torch.device]:
    return [device] if device.type == "cuda" else []
