"""The errors thinwire raises on purpose.

    ThinwireError
    ├── FormatError        (ValueError)  a format that cannot exist, or cannot do what was asked
    │   └── UnknownFormat                a name that no format has; near names are listed
    ├── InputError         (TypeError)   a tensor of the wrong dtype, device or shape
    └── MissingDependency  (ImportError) an optional package is absent; says which extra to install

Every message says what is wrong and what would work.
"""


class ThinwireError(Exception):
    """Base of everything thinwire raises on purpose."""


class FormatError(ThinwireError, ValueError):
    """The parameters describe no format, or the format cannot do what was asked."""


class UnknownFormat(FormatError):
    """No format has this name."""


class InputError(ThinwireError, TypeError):
    """A tensor has the wrong dtype, device, shape or layout."""


class MissingDependency(ThinwireError, ImportError):
    """An optional package is needed for this and is not installed."""
