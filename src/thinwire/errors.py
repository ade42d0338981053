"""The errors thinwire raises on purpose.

    ThinwireError
    ├── FormatError             (ValueError)   a format that cannot exist, or cannot do what was asked
    │   └── UnknownFormatError                 a name that no format has; near names are listed
    ├── CodecError              (ValueError)   a codec that cannot exist, or cannot do what was asked
    │   └── UnknownCodecError                  a spec that does not parse; says where and what would
    ├── WireError               (ValueError)   bytes that are no wire of this codec and length
    ├── ScheduleError           (ValueError)   a schedule that is unknown, or cannot serve a codec or a world
    ├── PolicyError             (ValueError)   a policy that cannot be read, or that leaves a tensor out
    ├── CommError               (RuntimeError) an exchange between ranks failed; says with whom and in what
    │   └── Disagreement                       ranks called different things; says who called what
    ├── LabError                (RuntimeError) emulated hosts cannot be made here; says what still works
    ├── LaunchError             (ValueError)   a command that cannot be launched, or a job that is not there
    ├── DataError               (RuntimeError) a data set is unknown, absent, damaged or cannot be fetched
    ├── InputError              (TypeError)    a tensor of the wrong dtype, device or shape
    └── MissingDependencyError  (ImportError)  an optional package is absent; says which extra to install

Every message says what is wrong and what would work; `unknown` words it for names.
"""

import difflib
from collections.abc import Iterable


def unknown(kind: str, name: object, known: Iterable[str], listing: str = "", rest: str = "") -> str:
    """What to say of a name that nothing has: the nearest there is, then where all of them are listed.

    rest: what was given behind the name.

    >>> unknown("codec", "itn8", ["int8", "fp16"], "`thinwire codecs` lists all")
    "unknown codec 'itn8'; did you mean 'int8'? (`thinwire codecs` lists all)"
    >>> unknown("data set", "x", ["mnist", "digits"])
    "unknown data set 'x'; there are: mnist, digits"
    """
    names = list(known)
    listing = listing or f"there are: {', '.join(names)}"
    near = names if len(names) == 1 else difflib.get_close_matches(str(name).lower(), names, n=1)
    said = f"did you mean '{near[0]}{rest}'? ({listing})" if near else listing
    return f"unknown {kind} '{name}{rest}'; {said}"


class ThinwireError(Exception):
    """Base of everything thinwire raises on purpose."""


class FormatError(ThinwireError, ValueError):
    """The parameters describe no format, or the format cannot do what was asked."""


class UnknownFormatError(FormatError):
    """No format has this name."""


class CodecError(ThinwireError, ValueError):
    """The parameters describe no codec, or the codec cannot do what was asked."""


class UnknownCodecError(CodecError):
    """No codec has this spec."""


class WireError(ThinwireError, ValueError):
    """Bytes that are no wire of this codec and element count."""


class ScheduleError(ThinwireError, ValueError):
    """No schedule has this spec, or it cannot serve this codec or number of ranks."""


class PolicyError(ThinwireError, ValueError):
    """A policy cannot be read, or no rule of it takes a tensor."""


class CommError(ThinwireError, RuntimeError):
    """An exchange between ranks failed: one is gone, too late, or called something else.

    `peer` is the rank that an exchange was with, where one is known; `gone` whether it closed the connection.
    """

    def __init__(self, *said: object, peer: int | None = None, gone: bool = False) -> None:
        super().__init__(*said)
        self.peer, self.gone = peer, gone


class Disagreement(CommError):  # noqa: N818
    """Ranks called different things. All of them know it, and can go on."""


def is_refusal(error: BaseException) -> bool:
    """Whether thinwire refused what it was given, rather than failed to send it."""
    return isinstance(error, ThinwireError) and not isinstance(error, CommError)


class LabError(ThinwireError, RuntimeError):
    """Emulated hosts cannot be made, or what ran on them failed."""


class LaunchError(ThinwireError, ValueError):
    """What should be launched or watched is not there, or an option is wrong."""


class DataError(ThinwireError, RuntimeError):
    """A data set is unknown, not here, damaged, or no source of it works."""


class InputError(ThinwireError, TypeError):
    """A tensor has the wrong dtype, device, shape or layout."""


class MissingDependencyError(ThinwireError, ImportError):
    """An optional package is needed for this and is not installed."""
