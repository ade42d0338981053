"""Slots: the names under which a channel keeps residuals.

    slot = name [ "[" start "]" ] "/" stage        fc1.weight[1024]/sent/tail

`name` is the tensor's, `start` the first element of a piece of it that is sent by itself, and the stage
says where in a schedule the residual is left.
"""

SENT = "sent"  #: of what this rank sent: its shards of one size
TAIL = "sent/tail"  #: of the shard after them, which is shorter
REDUCED = "reduced"  #: of the sum that this rank owns
ERROR = "error"  #: of a matrix that `low_rank` approximates, and of what it sends beside matrices
START = "q"  #: where `low_rank` begins in the next step; no residual


def slot(name: str, stage: str) -> str:
    """
    >>> slot(piece("fc1.weight", 1024), TAIL)
    'fc1.weight[1024]/sent/tail'
    """
    return f"{name}/{stage}"


def piece(name: str, start: int) -> str:
    """The name of a piece of a tensor."""
    return f"{name}[{start}]"


def is_of(slot: str, name: str) -> bool:
    """Whether a slot is of a name, and not of one that begins alike: fc1/sent is of fc1, fc10/sent is not."""
    return slot == name or slot.startswith((f"{name}/", f"{name}["))


def stage_of(slot: str, name: str) -> tuple[int, str]:
    """Of a slot of a name, where its piece begins, and its stage.

    >>> stage_of("fc1.weight[1024]/sent/tail", "fc1.weight")
    (1024, 'sent/tail')
    """
    rest, start = slot.removeprefix(name), 0
    if rest.startswith("["):
        number, rest = rest[1:].split("]", 1)
        start = int(number)
    return start, rest.removeprefix("/")


def name_of(slot: str) -> str:
    """The tensor of a slot, if its name has neither bracket nor slash, as parameters' names have not.

    >>> name_of("fc1.weight[1024]/sent/tail")
    'fc1.weight'
    """
    return slot.partition("/")[0].partition("[")[0]
