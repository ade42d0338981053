"""Stages compare what they will send before they send it.

Every stage writes a note into the group's store: its settings, and the shapes that it sends and expects. It
does so when torch has found the shapes. Before the first message, every stage reads the notes of all others.
So all ranks raise the same error, and none waits for bytes that never come. Notes do not use the network that
carries activations: a stage without thinwire would not answer there.
"""

import json
import time
from collections import Counter
from collections.abc import Sequence
from datetime import timedelta
from typing import Any, TypeAlias

import torch
import torch.distributed as dist

from thinwire.errors import CommError, Disagreement
from thinwire.runtimes.group_runtime import timeout_of

PATIENCE_S = 300.0  #: the longest wait for a note; the group's time-out, if that is shorter
POLL_S = (0.0005, 0.02)  #: first and longest pause between two looks into the store
ABSENT = "nothing attached"

Shape: TypeAlias = tuple[int, str]  #: the other stage, and a tensor's shape and dtype in words
Note: TypeAlias = dict[str, Any]

_numbers: Counter[tuple[str, int, str, int]] = Counter()  #: notes so far, by group, stages, direction, stage


def described(shape: Sequence[int], dtype: torch.dtype) -> str:
    """Return a tensor's shape and dtype in words.

    >>> described((2, 3), torch.bfloat16)
    '(2, 3) bfloat16'
    """
    return f"{tuple(shape)} {str(dtype).removeprefix('torch.')}"


class Agreement:
    """The notes of one stage for one direction."""

    def __init__(self, stage: Any, direction: str) -> None:
        self.stage, self.direction = stage, direction
        self.group: dist.ProcessGroup = stage.group or dist.distributed_c10d._get_default_group()
        self.store = self.group.get_group_store()
        self.number = 0
        self.open = False  #: whether a note was written and not yet compared

    def post(self, settings: str, sends: Sequence[Shape], expects: Sequence[Shape]) -> None:
        """Write this stage's note."""
        if self.stage.group_size == 1:
            return
        where = self.group.group_name, self.stage.num_stages, self.direction, self.stage.stage_index
        _numbers[where] += 1
        self.number, self.open = _numbers[where], True
        self._write(self.stage.stage_index, {"settings": settings, "sends": sends, "expects": expects})

    def settle(self) -> None:
        """Compare the notes of all stages; wait for those that are late."""
        if not self.open:
            return
        for stage in range(self.stage.num_stages):
            if self._is_here(stage) and not self.store.check([self._key(stage)]):
                self._write(stage, {"settings": ABSENT, "sends": [], "expects": []})
        self._wait()
        keys = [self._key(stage) for stage in range(self.stage.num_stages)]
        self._compare([json.loads(self.store.get(key)) for key in keys])
        self.open = False

    def _key(self, stage: int) -> str:
        return f"thinwire/pipeline/{self.stage.num_stages}/{self.direction}/{self.number}/{stage}"

    def _write(self, stage: int, note: Note) -> None:
        self.store.set(self._key(stage), json.dumps(note))

    def _is_here(self, stage: int) -> bool:
        """Whether a stage is on this rank, which has written the notes of all its stages."""
        return bool(self.stage.stage_index_to_group_rank[stage] == self.stage.group_rank)

    def _wait(self) -> None:
        left = [self._key(stage) for stage in range(self.stage.num_stages)]
        kind = torch.device(self.stage.device).type
        patience = min(timeout_of(self.group, kind), timedelta(seconds=PATIENCE_S)).total_seconds()
        end, pause = time.monotonic() + patience, POLL_S[0]
        while not self.store.check(left):
            if time.monotonic() > end:
                self._refuse_missing(patience)
            time.sleep(pause)
            pause = min(2 * pause, POLL_S[1])

    def _refuse_missing(self, patience: float) -> None:
        stages = range(self.stage.num_stages)
        missing = [stage for stage in stages if not self.store.check([self._key(stage)])]
        names = ", ".join(self._name(stage) for stage in missing)
        raise CommError(
            f"{self._name(self.stage.stage_index)} sends by thinwire, but there is no word from {names} "
            f"after {patience:g} s; use thinwire for all stages of a pipeline, from the same step on"
        )

    def _name(self, stage: int) -> str:
        rank = dist.get_global_rank(self.group, self.stage.stage_index_to_group_rank[stage])
        return f"stage {stage} on rank {rank}"

    def _compare(self, notes: Sequence[Note]) -> None:
        by_settings: dict[str, list[int]] = {}
        for stage, note in enumerate(notes):
            by_settings.setdefault(note["settings"], []).append(stage)
        if len(by_settings) > 1:
            said = (
                f"{', '.join(map(self._name, stages))}: {settings}"
                for settings, stages in by_settings.items()
            )
            raise Disagreement(f"stages of a pipeline disagree: {'; '.join(said)}")
        for stage, note in enumerate(notes):
            for other in {each for each, _ in note["sends"]}:
                sent = [what for where, what in note["sends"] if where == other]
                expected = [what for where, what in notes[other]["expects"] if where == stage]
                if sent != expected:
                    raise Disagreement(
                        f"stages of a pipeline disagree: {self._name(stage)} sends {_listed(sent)} "
                        f"{self.direction} to {self._name(other)}, which expects {_listed(expected)}"
                    )


def _listed(shapes: Sequence[str]) -> str:
    return " and ".join(shapes) or "nothing"
