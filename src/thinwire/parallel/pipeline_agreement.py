"""Stages compare what they will send before they send it.

Every stage writes a note into the group's store: its settings, and the shapes that it sends and expects. It
does so when torch has found the shapes. Before the first message, every stage reads the notes of all others.
So all ranks raise the same error, and none waits for bytes that never come. Notes do not use the network that
carries activations: a stage without thinwire would not answer there.
"""

import json
import time
from collections.abc import Sequence
from datetime import timedelta
from typing import Any, TypeAlias

import torch
import torch.distributed as dist

from thinwire.errors import Disagreement
from thinwire.runtimes.group_runtime import timeout_of

PATIENCE_S = 300.0  #: the longest wait for a note; the group's time-out, if that is shorter
POLL_S = (0.0005, 0.02)  #: first and longest pause between two looks into the store
Shape: TypeAlias = tuple[int, str]  #: the other stage, and a tensor's shape and dtype in words
Note: TypeAlias = dict[str, Any]

NOTHING: Note = {"settings": "nothing attached", "sends": [], "expects": []}

ADVICE = "use thinwire for all stages of a pipeline, from the same step on"


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
        while self.store.check([self._key(self.stage.stage_index)]):  # of an earlier time, or pipeline
            self.number += 1
        self.open = True
        self._write(self.stage.stage_index, {"settings": settings, "sends": sends, "expects": expects})

    def settle(self) -> None:
        """Compare the notes of all stages; wait for those that are late."""
        if not self.open:
            return
        for stage in self._missing():
            if self._is_here(stage):
                self._write(stage, NOTHING)
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
        """Wait until all stages have written; when time is up, write that the others have nothing to say."""
        kind = torch.device(self.stage.device).type
        patience = min(timeout_of(self.group, kind), timedelta(seconds=PATIENCE_S)).total_seconds()
        end, pause = time.monotonic() + patience, POLL_S[0]
        while missing := self._missing():
            if time.monotonic() > end:
                for stage in missing:
                    self._write(stage, NOTHING)
            time.sleep(pause)
            pause = min(2 * pause, POLL_S[1])

    def _missing(self) -> list[int]:
        keys = [self._key(stage) for stage in range(self.stage.num_stages)]
        if self.store.check(keys):
            return []
        return [stage for stage, key in enumerate(keys) if not self.store.check([key])]

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
            hint = f"; {ADVICE}" if NOTHING["settings"] in by_settings else ""
            raise Disagreement(f"stages of a pipeline disagree: {'; '.join(said)}{hint}")
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
