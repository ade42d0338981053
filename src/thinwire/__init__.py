"""thinwire: low-precision communication for distributed deep learning in PyTorch.

Names are loaded when they are first used, so that `thinwire --help` need not wait for torch.
"""

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from thinwire import formats as formats
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
        UnknownFormatError as UnknownFormatError,
    )
    from thinwire.rounding import Rounding as Rounding
    from thinwire.rounding import Stream as Stream

__version__ = "0.1.0"

__all__ = [
    "FormatError",
    "InputError",
    "MissingDependencyError",
    "Rounding",
    "Stream",
    "ThinwireError",
    "UnknownFormatError",
    "__version__",
    "formats",
]

_HOMES = {
    "FormatError": "thinwire.errors",
    "InputError": "thinwire.errors",
    "MissingDependencyError": "thinwire.errors",
    "Rounding": "thinwire.rounding",
    "Stream": "thinwire.rounding",
    "ThinwireError": "thinwire.errors",
    "UnknownFormatError": "thinwire.errors",
}


if not TYPE_CHECKING:  # a checker sees the imports above and can tell a typo

    def __getattr__(name: str) -> Any:
        if name == "formats":
            return importlib.import_module("thinwire.formats")
        if name in _HOMES:
            return getattr(importlib.import_module(_HOMES[name]), name)
        raise AttributeError(f"module 'thinwire' has no attribute '{name}'")


def __dir__() -> list[str]:
    return sorted(__all__)
