"""Futures of several calls as one, right on GPUs too.

torch's `collect_all` keeps no streams: whoever waits for it may read what a GPU has yet to write. Here the
last call to end waits, on its own stream, for what all others have put on theirs.
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
    """A future of what `finish` returns, which is called once all are done; `failed` words their errors."""
    whole: Future[Tensor] = Future(devices=_devices(device))
    left, door = [len(futures)], threading.Lock()

    def count(_: "Future[Any]") -> None:
        with door:
            left[0] -= 1
            if left[0]:
                return
        try:
            for future in futures:
                future.wait()  # raises what went wrong; on a GPU the current stream waits
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


def followed(future: "Future[Any]", then: Callable[[], None], tensor: Tensor) -> "Future[Tensor]":
    """The same future, done once `then` has run. Its value is a tensor, or no stream would be waited for."""

    def finish() -> Tensor:
        then()
        return tensor

    return gathered([future], finish, tensor.device)


def raise_when_waited_for(futures: "Sequence[Future[Any]]") -> None:
    """At the end of this backward pass wait for futures, and raise what went wrong as it is.

    DDP, which waits too, knows a failed future of Python only as a result that is no tensor.
    """

    def wait() -> None:
        for future in futures:
            future.wait()

    with contextlib.suppress(RuntimeError):  # there is no backward pass: ranks that `join` only answer others
        torch.autograd.Variable._execution_engine.queue_callback(wait)


def ready(buffer: Tensor) -> "Future[Tensor]":
    """A future that is done."""
    future: Future[Tensor] = Future(devices=_devices(buffer.device))
    future.set_result(buffer)
    return future


def pending(like: Tensor) -> "Future[Tensor]":
    """A future that somebody will complete."""
    return Future(devices=_devices(like.device))


def pass_on(promised: "Future[Tensor]", done: "Future[Tensor]") -> None:
    """Complete a future as another one was, from that one's callback."""
    try:
        promised.set_result(done.value())
    except Exception as error:  # noqa: BLE001
        promised.set_exception(error)  # type: ignore[arg-type]


def _devices(device: torch.device) -> list[int | str | torch.device]:
    return [device] if device.type == "cuda" else []
