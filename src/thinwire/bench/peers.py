"""Alternatives to formats, timed on the same input: torch's casts, ml_dtypes, bitsandbytes, qtorch, and
thinwire's reference in eager torch.

A library that is not installed or does not support the device is listed as absent, with the reason.
"""

import logging
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor

from thinwire.bench import timing
from thinwire.formats import get
from thinwire.kernels import reference

TORCH_DTYPES = {
    "float16": torch.float16,
    "bfloat16": torch.bfloat16,
    "float8_e4m3fn": torch.float8_e4m3fn,
    "float8_e5m2": torch.float8_e5m2,
    "float8_e4m3fnuz": torch.float8_e4m3fnuz,
    "float8_e5m2fnuz": torch.float8_e5m2fnuz,
}
REFERENCE = ("float8_e4m3fn", "int8", "posit8_1", "dynamic_tree")

Case = tuple[str, str, timing.Call]  # format, operation, what to time


def measure(x: Tensor) -> tuple[list[dict[str, Any]], dict[str, str]]:
    """Return rows like those of formats, and for each library why its rows are missing or incomplete."""
    rows: list[dict[str, Any]] = []
    absent: dict[str, str] = {}
    for library, cases in PEERS.items():
        try:
            for format, operation, call in cases(x):
                width = reference.code_dtype(get(format).bits).itemsize
                nbytes = 8 if operation.startswith("round") else 4 + width
                measured = timing.against_copy(call, x, nbytes)
                rows.append({"library": library, "format": format, "operation": operation, **measured})
        except (ImportError, NotImplementedError, RuntimeError, OSError) as error:
            # a peer may fail; the reason is listed
            absent[library] = next(iter(str(error).splitlines()), type(error).__name__)
    return sorted(rows, key=lambda row: (row["format"], row["operation"])), absent


def torch_casts(x: Tensor) -> list[Case]:
    cases: list[Case] = []
    for name, dtype in TORCH_DTYPES.items():
        low, values = x.to(dtype), torch.empty_like(x)
        cases.append((name, "to_codes", partial(low.copy_, x)))
        cases.append((name, "from_codes", partial(values.copy_, low)))
    return cases


def eager_reference(x: Tensor) -> list[Case]:
    """Run on a sixteenth of the input, sixteen times: the reference is slow and needs memory."""
    part = x[: x.numel() // 16]
    cases: list[Case] = []
    for name in REFERENCE:
        params = get(name)._prepared(0)
        codes = reference.to_codes(params, part, 0)
        cases.append((name, "to_codes", _sixteen(partial(reference.to_codes, params, part, 0))))
        cases.append((name, "from_codes", _sixteen(partial(reference.from_codes, params, codes))))
    return cases


def _sixteen(call: timing.Call) -> timing.Call:
    def sixteen_times() -> None:
        for _ in range(16):
            call()

    return sixteen_times


def ml_dtypes_casts(x: Tensor) -> list[Case]:
    import ml_dtypes

    _need_cpu(x)
    source = x.numpy()
    cases: list[Case] = []
    for name in ("float8_e4m3fn", "float8_e5m2", "float8_e3m4", "float8_e4m3b11fnuz", "bfloat16"):
        dtype = getattr(ml_dtypes, name)
        low = source.astype(dtype)
        cases.append((name, "to_codes", partial(source.astype, dtype)))
        cases.append((name, "from_codes", partial(low.astype, "float32")))
    return cases


def bitsandbytes_maps(x: Tensor) -> list[Case]:
    """Its blockwise quantisation with blocks of 4096. The times include finding the absolute maxima."""
    logging.getLogger("bitsandbytes").setLevel(logging.ERROR)
    import bitsandbytes.functional as bnb

    table = bnb.create_dynamic_map().to(x.device)
    codes, state = bnb.quantize_blockwise(x, code=table, blocksize=4096)
    return [
        ("bnb_dynamic", "to_codes", lambda: bnb.quantize_blockwise(x, code=table, blocksize=4096)),
        ("bnb_dynamic", "from_codes", lambda: bnb.dequantize_blockwise(codes, state)),
    ]


def qtorch_rounding(x: Tensor) -> list[Case]:
    """It rounds to values only; it has no codes."""
    from qtorch.quant import fixed_point_quantize, float_quantize

    _need_cpu(x)
    return [
        ("e4m3", "round", lambda: float_quantize(x, 4, 3, rounding="nearest")),
        ("e5m2", "round", lambda: float_quantize(x, 5, 2, rounding="nearest")),
        ("fixed2.6", "round", lambda: fixed_point_quantize(x, 8, 6, rounding="nearest")),
        ("e4m3", "round stochastic", lambda: float_quantize(x, 4, 3, rounding="stochastic")),
    ]


def _need_cpu(x: Tensor) -> None:
    if x.device.type != "cpu":
        raise NotImplementedError("measured on the CPU only")


PEERS: dict[str, Callable[[Tensor], list[Case]]] = {
    "torch cast": torch_casts,
    "torch eager": eager_reference,
    "ml_dtypes": ml_dtypes_casts,
    "bitsandbytes": bitsandbytes_maps,
    "qtorch": qtorch_rounding,
}
