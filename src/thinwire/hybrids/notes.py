"""Short texts that all ranks tell each other through the group's store, before training and now and then."""

import itertools

import torch.distributed as dist

from thinwire.errors import Disagreement

_numbers = itertools.count()


def gathered(text: str) -> list[str]:
    """Return the texts of all ranks, in their order; all ranks must call it."""
    number = next(_numbers)
    store = dist.distributed_c10d._get_default_store()
    rank, world = dist.get_rank(), dist.get_world_size()
    store.set(_key(number, rank), text)
    texts = [store.get(_key(number, each)).decode() for each in range(world)]
    if number:
        store.delete_key(_key(number - 1, rank))  # all ranks have read it: they wrote the next
    return texts


def agree(text: str, what: str) -> None:
    """Raise a `Disagreement` on all ranks if their texts differ; `what` says what they are."""
    texts = gathered(text)
    if len(set(texts)) > 1:
        other = next(rank for rank, each in enumerate(texts) if each != texts[0])
        raise Disagreement(f"{what}: rank 0 has {texts[0]}, rank {other} has {texts[other]}")


def _key(number: int, rank: int) -> str:
    return f"thinwire/hybrids/{number}/{rank}"
