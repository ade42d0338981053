"""Data that names codecs: it keeps specs, and a pickle of it has the codecs that only this process knows."""

from collections.abc import Callable
from typing import Any

from thinwire import codecs


class Portable:
    """A frozen dataclass some of whose fields are codecs; whatever was given, specs are kept."""

    _codecs: tuple[str, ...] = ()  #: the names of those fields, each a codec or a tuple of them

    def _spell(self) -> None:
        for name in self._codecs:
            self.__dict__[name] = _each(codecs.spell, self.__dict__[name])

    def __getstate__(self) -> dict[str, Any]:
        held = self.__dict__
        return {**held, **{name: _each(codecs.carry, held[name]) for name in self._codecs}}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        self._spell()


def _each(change: Callable[[Any], Any], value: Any) -> Any:
    return tuple(map(change, value)) if isinstance(value, tuple | list) else change(value)
