"""Slots: the names under which a channel keeps residuals.

    slot = name [ "[" start "]" ] "/" stage        fc1.weight[1024]/sent/tail

`name` names the tensor. `start` is the first element of a piece of it that travels by itself. The stage says
where in a schedule the residual arises.
"""

SENT = "sent"  #: residual of what this rank sent: its full shards, all of one size
TAIL = "sent/tail"  #: residual of the shorter shard after them
REDUCED = "reduced"  #: residual of the sum that this rank owns
ERROR = "error"  #: residual of `low_rank`: of approximated matrices and of its other tensors
RESULT = "near/result"  #: residual of `hierarchical`: of the result, inside a node
FAR = "far"  #: before the stages of the all-reduce between nodes, in `hierarchical`
START = "q"  #: the Q with which `low_rank` starts the next step; no residual


def slot(name: str, stage: str) -> str:
    """
    >>> slot(piece("fc1.weight", 1024), TAIL)
    'fc1.weight[1024]/sent/tail'
    """
    return f"{name}/{stage}"


def near(rank: int) -> str:
    """Return the stage of what `hierarchical` sends to a rank of its own node."""
    return f"near/{rank}"


def piece(name: str, start: int) -> str:
    """Return the name of a piece of a tensor."""
    return f"{name}[{start}]"


def is_of(slot: str, name: str) -> bool:
    """Whether a slot belongs to a name: fc1/sent belongs to fc1, fc10/sent does not."""
    return slot == name or slot.startswith((f"{name}/", f"{name}["))


def is_at(slot: str, stage: str) -> bool:
    """Whether this is the slot of a stage; any string may be asked about, also one from a damaged file."""
    return slot.endswith(f"/{stage}")


def stage_of(slot: str, name: str) -> tuple[int, str]:
    """Return the start of the slot's piece, and the slot's stage; the slot must belong to the name.

    >>> stage_of("fc1.weight[1024]/sent/tail", "fc1.weight")
    (1024, 'sent/tail')
    """
    rest, start = slot.removeprefix(name), 0
    if rest.startswith("["):
        number, rest = rest[1:].split("]", 1)
        start = int(number)
    return start, rest.removeprefix("/")


def at_stage(slot: str, stage: str, other: str) -> str:
    """Return the slot of the same piece at another stage.

    >>> at_stage("fc1.weight[1024]/reduced", REDUCED, TAIL)
    'fc1.weight[1024]/sent/tail'
    """
    return slot.removesuffix(stage) + other


def name_of(slot: str) -> str:
    """Return the tensor's name; it must contain no bracket and no slash, like names of parameters.

    >>> name_of("fc1.weight[1024]/sent/tail")
    'fc1.weight'
    """
    return slot.partition("/")[0].partition("[")[0]
