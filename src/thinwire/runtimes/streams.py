"""Read and set the current CUDA stream quickly: torch's own functions take ten times as long."""

import torch

_known: dict[tuple[int, int, int], torch.cuda.Stream] = {}


def current(device: torch.device) -> torch.cuda.Stream:
    """Return the current stream of a device."""
    key = torch._C._cuda_getCurrentStream(device.index or 0)
    stream = _known.get(key)
    if stream is None:
        stream = torch.cuda.current_stream(device)
        if len(_known) > 64:  # other code made and dropped streams
            _known.clear()
        _known[key] = stream
    return stream


def enter(stream: torch.cuda.Stream) -> None:
    """Make a stream the current one of its device."""
    torch._C._cuda_setStream(
        stream_id=stream.stream_id, device_index=stream.device_index, device_type=stream.device_type
    )
