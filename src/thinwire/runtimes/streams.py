"""The current CUDA stream, read and changed in few steps: torch's own functions take ten times as long."""

import torch

_known: dict[tuple[int, int, int], torch.cuda.Stream] = {}


def current(device: torch.device) -> torch.cuda.Stream:
    """The current stream of a device."""
    key = torch._C._cuda_getCurrentStream(device.index or 0)
    stream = _known.get(key)
    if stream is None:
        stream = torch.cuda.current_stream(device)
        if len(_known) > 64:  # streams that others made and dropped
            _known.clear()
        _known[key] = stream
    return stream


def enter(stream: torch.cuda.Stream) -> None:
    """Make it the current one of its device."""
    torch._C._cuda_setStream(
        stream_id=stream.stream_id, device_index=stream.device_index, device_type=stream.device_type
    )
