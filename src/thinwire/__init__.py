"""thinwire: low-precision communication for distributed deep learning in PyTorch.

Names are loaded when they are first used, so that `thinwire --help` need not wait for torch.
"""

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from thinwire import codecs as codecs
    from thinwire import formats as formats
    from thinwire import zoo as zoo
    from thinwire.channel import Channel as Channel
    from thinwire.errors import (
        CodecError as CodecError,
    )
    from thinwire.errors import (
        FormatError as FormatError,
    )
    from thinwire.errors import (
        InputError as InputError,
    )
    from thinwire.errors import (
        MissingDependencyError as MissingDependencyError,
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
    from thinwire.rounding import Rounding as Rounding
    from thinwire.rounding import Stream as Stream

__version__ = "0.1.0"

__all__ = [
    "Channel",
    "CodecError",
    "FormatError",
    "InputError",
    "MissingDependencyError",
    "Rounding",
    "Stream",
    "ThinwireError",
    "UnknownCodecError",
    "UnknownFormatError",
    "WireError",
    "__version__",
    "codecs",
    "formats",
    "zoo",
]

_MODULES = ("codecs", "formats", "zoo")
_HOMES = {
    "Channel": "thinwire.channel",
    "CodecError": "thinwire.errors",
    "FormatError": "thinwire.errors",
    "InputError": "thinwire.errors",
    "MissingDependencyError": "thinwire.errors",
    "Rounding": "thinwire.rounding",
    "Stream": "thinwire.rounding",
    "ThinwireError": "thinwire.errors",
    "UnknownCodecError": "thinwire.errors",
    "UnknownFormatError": "thinwire.errors",
    "WireError": "thinwire.errors",
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
