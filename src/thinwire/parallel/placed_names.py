"""Which rank has which part: names of modules, parameters or operations, or patterns of them, and a rank.

A key matches a name if it is that name, begins it ("tower" begins "tower.fc1"), or is a pattern for either.
The key with the most letters outside of wildcards wins, so `{"*": 0, "blocks": 1, "blocks.7": 2}` reads as it
should.
"""

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from fnmatch import fnmatchcase

from thinwire.errors import InputError

WILD = re.compile(r"\[[^\]]*\]|[*?]")


@dataclass
class Names:
    """The keys of a placement."""

    ranks: dict[str, int]

    def rank_of(self, name: str) -> int | None:
        """Return the rank of a name; None if no key matches.

        >>> names = Names({"*": 0, "blocks.[0-5]": 1, "blocks.3": 2})
        >>> [names.rank_of(each) for each in ("head", "blocks.1.fc", "blocks.3.fc")]
        [0, 1, 2]
        """
        matching = [key for key in self.ranks if matches(key, name)]
        if not matching:
            return None
        best = max(weight(key) for key in matching)
        winners = [key for key in matching if weight(key) == best]
        if len({self.ranks[key] for key in winners}) > 1:
            both = " and ".join(f"'{key}' (rank {self.ranks[key]})" for key in winners)
            raise InputError(f"placement: {both} match '{name}' equally well; give that name a rank itself")
        return self.ranks[winners[0]]

    def unknown(self, known: Iterable[str]) -> list[str]:
        """Return the keys that match none of the names."""
        names = list(known)
        return [key for key in self.ranks if not any(matches(key, name) for name in names)]

    def add(self, name: str, rank: int, key: str) -> None:
        """Place a module or parameter by the name of its operation."""
        if self.ranks.setdefault(name, rank) != rank:
            raise InputError(
                f"placement: operation '{key}' on rank {rank} is '{name}', "
                f"which is on rank {self.ranks[name]}"
            )


def checked(placement: Mapping[str, int], world: int) -> Names:
    """Check a caller's placement."""
    if not isinstance(placement, Mapping) or not placement:
        raise InputError(f"placement must map names to ranks, such as {{'tower': 1}}, not {placement!r}")
    for key, rank in placement.items():
        if not isinstance(key, str):
            raise InputError(f"placement maps names to ranks, but {key!r} is no name")
        if type(rank) is not int or not 0 <= rank < world:
            raise InputError(
                f"placement: '{key}' is on rank {rank!r}, but this group has ranks 0 to {world - 1}"
            )
    return Names(dict(placement))


def matches(key: str, name: str) -> bool:
    """Whether a key is the name, or one that the name lies in, or a pattern for either.

    >>> matches("blocks.*.mlp", "blocks.3.mlp.fc1"), matches("block", "blocks.3")
    (True, False)
    """
    if not WILD.search(key):
        return key in ("", name) or name.startswith(f"{key}.")
    parts = name.split(".")
    return any(fnmatchcase(".".join(parts[:end]), key) for end in range(1, len(parts) + 1))


def weight(key: str) -> tuple[int, bool]:
    """Return what decides between matching keys: letters outside of wildcards, then having none."""
    literal = WILD.sub("", key)
    return len(literal), literal == key
