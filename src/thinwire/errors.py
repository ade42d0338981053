"""The errors thinwire raises on purpose.

    ThinwireError
    ├── FormatError             (ValueError)   a format cannot exist, or does not support the operation
    │   └── UnknownFormatError                 no format has this name; lists near names
    ├── CodecError              (ValueError)   a codec cannot exist, or does not support the operation
    │   └── UnknownCodecError                  a spec does not parse; says where, and what would parse
    ├── WireError               (ValueError)   the bytes are no wire of this codec and length
    ├── ScheduleError           (ValueError)   a schedule is unknown, or cannot serve a codec or a world size
    ├── PolicyError             (ValueError)   a policy cannot be read, or no rule of it matches a tensor
    ├── CommError               (RuntimeError) communication between ranks failed; names the peer and the call
    │   └── Disagreement                       ranks made different calls; says what each rank called
    ├── LabError                (RuntimeError) emulated hosts cannot be made here; says what still works
    ├── LaunchError             (ValueError)   a command cannot be launched, or a job does not exist
    ├── DataError               (RuntimeError) a data set is unknown, absent, damaged or cannot be fetched
    ├── InputError              (TypeError)    a tensor has the wrong dtype, device or shape
    ├── NotFiniteError          (ArithmeticError) an outer gradient is not finite; all ranks raise it
    └── MissingDependencyError  (ImportError)  an optional package is absent; says which extra to install

Every message says what is wrong and what would work. `unknown` writes the message for an unknown name.
"""

import difflib
from collections.abc import Iterable


def unknown(kind: str, name: object, known: Iterable[str], listing: str = "", rest: str = "") -> str:
    """Return the message for an unknown name: the nearest valid name, then where all names are listed.

    `rest` is the text that followed the name.

    >>> unknown("codec", "itn8", ["int8", "fp16"], "`thinwire codecs` lists all")
    "unknown codec 'itn8'; did you mean 'int8'? (`thinwire codecs` lists all)"
    >>> unknown("data set", "x", ["mnist", "digits"])
    "unknown data set 'x'; there are: mnist, digits"
    """
    names = list(known)
    listing = listing or f"there are: {', '.join(names)}"
    near = names if len(names) == 1 else difflib.get_close_matches(str(name).lower(), names, n=1)
    hint = f"did you mean '{near[0]}{rest}'? ({listing})" if near else listing
    return f"unknown {kind} '{name}{rest}'; {hint}"


class ThinwireError(Exception):
    """Base class of all errors that thinwire raises on purpose."""


class FormatError(ThinwireError, ValueError):
    """The parameters describe no format, or the format does not support the operation."""


class UnknownFormatError(FormatError):
    """No format has this name."""


class CodecError(ThinwireError, ValueError):
    """The parameters describe no codec, or the codec does not support the operation."""


class UnknownCodecError(CodecError):
    """No codec has this spec."""


class WireError(ThinwireError, ValueError):
    """Bytes that are no wire of this codec and element count."""


class ScheduleError(ThinwireError, ValueError):
    """No schedule has this spec, or it cannot serve this codec or number of ranks."""


class PolicyError(ThinwireError, ValueError):
    """A policy cannot be read, or no rule of it matches a tensor."""


class CommError(ThinwireError, RuntimeError):
    """Communication between ranks failed: a rank is gone, is too late, or made another call.

    `peer` is the other rank, where it is known. `gone` says whether that rank closed the connection.
    """

    def __init__(self, *said: object, peer: int | None = None, gone: bool = False) -> None:
        super().__init__(*said)
        self.peer, self.gone = peer, gone


class Disagreement(CommError):  # noqa: N818
    """Ranks made different calls. All of them raise this error, and the group stays usable."""


def is_refusal(error: BaseException) -> bool:
    """Whether thinwire refused its arguments; False if it failed while it communicated."""
    return isinstance(error, ThinwireError) and not isinstance(error, CommError)


class LabError(ThinwireError, RuntimeError):
    """Emulated hosts cannot be made, or a program on them failed."""


class LaunchError(ThinwireError, ValueError):
    """A program or job to launch or watch does not exist, or an option is wrong."""


class DataError(ThinwireError, RuntimeError):
    """A data set is unknown, absent or damaged, or no source of it works."""


class InputError(ThinwireError, TypeError):
    """A tensor has the wrong dtype, device, shape or layout."""


class NotFiniteError(ThinwireError, ArithmeticError):
    """What ranks averaged is not finite. All of them raise this error, and nothing was changed."""


class MissingDependencyError(ThinwireError, ImportError):
    """This needs an optional package that is not installed."""
