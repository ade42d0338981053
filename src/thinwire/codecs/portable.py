"""Dataclasses that name codecs: they store specs; pickles carry the codecs that only this process knows."""

from collections.abc import Callable
from typing import Any

from thinwire import codecs


class Portable:
    """A frozen dataclass with fields for codecs. They accept any codec and store its spec."""

    _codecs: tuple[str, ...] = ()  #: the names of those fields; each holds a codec or a tuple of codecs

    def _spell(self) -> None:
        for name in self._codecs:
            self.__dict__[name] = _each(codecs.spell, self.__dict__[name])

    def __getstate__(self) -> dict[str, Any]:
        state = self.__dict__
        return {**state, **{name: _each(codecs.carry, state[name]) for name in self._codecs}}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        self._spell()


def _each(change: Callable[[Any], Any], value: Any) -> Any:
    return tuple(map(change, value)) if isinstance(value, tuple | list) else change(value)
