"""thinwire: low-precision communication for distributed deep learning in PyTorch.

Names are loaded when they are first used, so that `thinwire --help` need not wait for torch.
"""

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from thinwire import codecs as codecs
    from thinwire import collectives as collectives
    from thinwire import data as data
    from thinwire import formats as formats
    from thinwire import hooks as hooks
    from thinwire import hybrids as hybrids
    from thinwire import integrations as integrations
    from thinwire import lab as lab
    from thinwire import outer as outer
    from thinwire import parallel as parallel
    from thinwire import policy as policy
    from thinwire import schedules as schedules
    from thinwire import simulate as simulate
    from thinwire import zoo as zoo
    from thinwire.channel import Channel as Channel
    from thinwire.collectives import all_gather as all_gather
    from thinwire.collectives import all_reduce as all_reduce
    from thinwire.collectives import all_to_all as all_to_all
    from thinwire.collectives import broadcast as broadcast
    from thinwire.collectives import explain as explain
    from thinwire.collectives import functional as functional
    from thinwire.collectives import irecv as irecv
    from thinwire.collectives import isend as isend
    from thinwire.collectives import recv as recv
    from thinwire.collectives import reduce_scatter as reduce_scatter
    from thinwire.collectives import send as send
    from thinwire.errors import (
        CodecError as CodecError,
    )
    from thinwire.errors import (
        CommError as CommError,
    )
    from thinwire.errors import (
        DataError as DataError,
    )
    from thinwire.errors import (
        Disagreement as Disagreement,
    )
    from thinwire.errors import (
        FormatError as FormatError,
    )
    from thinwire.errors import (
        InputError as InputError,
    )
    from thinwire.errors import (
        LabError as LabError,
    )
    from thinwire.errors import (
        MissingDependencyError as MissingDependencyError,
    )
    from thinwire.errors import (
        NotFiniteError as NotFiniteError,
    )
    from thinwire.errors import (
        PolicyError as PolicyError,
    )
    from thinwire.errors import (
        ScheduleError as ScheduleError,
    )
    from thinwire.errors import (
        ThinwireError as ThinwireError,
    )
    from thinwire.errors import (
        UnknownCodecError as UnknownCodecError,
    )
    from thinwire.errors import (
        UnknownFormatError as UnknownFormatError,
    )
    from thinwire.errors import (
        WireError as WireError,
    )
    from thinwire.integrations import attach as attach
    from thinwire.policy import Policy as Policy
    from thinwire.rounding import Rounding as Rounding
    from thinwire.rounding import Stream as Stream

__version__ = "0.1.0"

__all__ = [
    "Channel",
    "CodecError",
    "CommError",
    "DataError",
    "Disagreement",
    "FormatError",
    "InputError",
    "LabError",
    "MissingDependencyError",
    "NotFiniteError",
    "Policy",
    "PolicyError",
    "Rounding",
    "ScheduleError",
    "Stream",
    "ThinwireError",
    "UnknownCodecError",
    "UnknownFormatError",
    "WireError",
    "__version__",
    "all_gather",
    "all_reduce",
    "all_to_all",
    "attach",
    "broadcast",
    "codecs",
    "collectives",
    "data",
    "explain",
    "formats",
    "functional",
    "hooks",
    "hybrids",
    "integrations",
    "irecv",
    "isend",
    "lab",
    "outer",
    "parallel",
    "policy",
    "recv",
    "reduce_scatter",
    "schedules",
    "send",
    "simulate",
    "testing",
    "zoo",
]

_MODULES = (
    "codecs",
    "collectives",
    "data",
    "formats",
    "hooks",
    "hybrids",
    "integrations",
    "lab",
    "outer",
    "parallel",
    "policy",
    "schedules",
    "simulate",
    "testing",
    "zoo",
)
_HOMES = {
    "Channel": "thinwire.channel",
    "CodecError": "thinwire.errors",
    "CommError": "thinwire.errors",
    "DataError": "thinwire.errors",
    "Disagreement": "thinwire.errors",
    "FormatError": "thinwire.errors",
    "InputError": "thinwire.errors",
    "LabError": "thinwire.errors",
    "MissingDependencyError": "thinwire.errors",
    "NotFiniteError": "thinwire.errors",
    "Policy": "thinwire.policy",
    "PolicyError": "thinwire.errors",
    "Rounding": "thinwire.rounding",
    "ScheduleError": "thinwire.errors",
    "Stream": "thinwire.rounding",
    "ThinwireError": "thinwire.errors",
    "UnknownCodecError": "thinwire.errors",
    "UnknownFormatError": "thinwire.errors",
    "WireError": "thinwire.errors",
    "all_gather": "thinwire.collectives",
    "all_reduce": "thinwire.collectives",
    "all_to_all": "thinwire.collectives",
    "attach": "thinwire.integrations",
    "broadcast": "thinwire.collectives",
    "explain": "thinwire.collectives",
    "functional": "thinwire.collectives",
    "irecv": "thinwire.collectives",
    "isend": "thinwire.collectives",
    "recv": "thinwire.collectives",
    "reduce_scatter": "thinwire.collectives",
    "send": "thinwire.collectives",
}


if not TYPE_CHECKING:  # a checker sees the imports above and can tell a typo

    def __getattr__(name: str) -> Any:
        if name in _MODULES:
            return importlib.import_module(f"thinwire.{name}")
        if name in _HOMES:
            return getattr(importlib.import_module(_HOMES[name]), name)
        raise AttributeError(f"module 'thinwire' has no attribute '{name}'")


def __dir__() -> list[str]:
    return sorted(__all__)
