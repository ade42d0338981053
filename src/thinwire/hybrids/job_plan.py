"""The job plan: how a model is spread over ranks, and by which codecs these talk; docs/hybrids.md.

A job plan names no parallel code. `apply` (and `thinwire launch --plan`) turns it into torch's parts:

| axis | ranks along it hold | torch's part |
|---|---|---|
| `replicate` | the same weights, and other samples | `DistributedDataParallel` |
| `shard` | a part of every weight, and other samples | `fully_shard` |
| `placed` | other modules, and the same samples | `thinwire.parallel.Placed` |
| `tensor` | columns or rows of the same layers, and the same samples | `parallelize_module` |
"""

import json
import math
import tomllib
from collections.abc import Mapping
from dataclasses import dataclass, field, fields, is_dataclass
from pathlib import Path
from typing import Annotated, Any, ClassVar, Literal, TypeAlias

from thinwire import codecs, policy
from thinwire.errors import InputError, ThinwireError, unknown
from thinwire.files import writing
from thinwire.hybrids import tables
from thinwire.hybrids.tables import Table

VERSION = 1
AXES = ("replicate", "shard", "placed", "tensor")
EXACT = "fp32"  #: a direction that is sent as torch sends it

Count: TypeAlias = Annotated[int, 1]
Rank: TypeAlias = Annotated[int, 0]
Style: TypeAlias = Literal["column", "row", "sequence", "gather"]
Layout: TypeAlias = Literal["whole", "columns", "sequence"]


def said(text: str, **more: Any) -> Any:
    """A field of a plan, with the text of its row in the docs and in the schema."""
    metadata: dict[str, Any] = {"help": text}
    metadata |= {name: more.pop(name) for name in ("needed_in_files", "hint") if name in more}
    return field(metadata=metadata, **more)


@dataclass(frozen=True)
class ReplicateAxis:
    """Data parallelism: every rank along the axis holds the same weights and trains on other samples."""

    codec: str = said("of gradients: a recipe, a codec, a policy's .toml file, or 'auto'")

    def __post_init__(self) -> None:
        _check_policy("codec", self.codec)


@dataclass(frozen=True)
class ShardAxis:
    """FSDP2: every rank along the axis holds a part of every weight and trains on other samples."""

    codec: str = said(
        "of gradients, as for `replicate`; with a `replicate` axis, among the ranks of a replica"
    )
    weights: str = said("of the weights that ranks gather before they compute", default=EXACT)
    modules: tuple[str, ...] = said("patterns of modules that are gathered one at a time", default=())

    def __post_init__(self) -> None:
        _check_policy("codec", self.codec)
        _check_policy("weights", self.weights)
        object.__setattr__(self, "modules", tuple(self.modules))


@dataclass(frozen=True)
class Split:
    """How a module is split over the ranks of the `tensor` axis."""

    SHORT: ClassVar[str] = "style"

    style: Style = said("'column', 'row', 'sequence' or 'gather'")
    input: Layout | None = said("what the module is given: 'whole', 'columns', 'sequence'", default=None)
    output: Layout | None = said("what it returns, in the same words", default=None)
    forward: str | None = said("of its activations, instead of the axis's codec", default=None)
    backward: str | None = said("of their gradients, instead of the axis's codec", default=None)

    def __post_init__(self) -> None:
        _check_word("style", self.style, Style)
        for name in ("input", "output"):
            if getattr(self, name) is not None:
                _check_word(name, getattr(self, name), Layout)
                if self.style in ("sequence", "gather"):
                    raise InputError(
                        f"{name} = '{getattr(self, name)}' is for the styles 'column' and 'row'; "
                        f"'{self.style}' has its own"
                    )
        _check_activations(self)


@dataclass(frozen=True)
class TensorAxis:
    """Tensor parallelism: every rank along the axis holds columns or rows of the same layers."""

    modules: Mapping[str, Any] = said("patterns of modules, and the style of each", hint=Table[Split])
    forward: str = said("of activations: a codec", default=EXACT)
    backward: str = said("of their gradients: a codec", default=EXACT)

    def __post_init__(self) -> None:
        splits = {name: _split(each) for name, each in self.modules.items()}
        object.__setattr__(self, "modules", Table(splits))
        _check_activations(self)
        if not self.modules:
            raise InputError('modules is empty; name the layers to split, as in "blocks.*.up" = "column"')


@dataclass(frozen=True)
class PlacedAxis:
    """Placement: the ranks along the axis compute different modules, for the same samples."""

    modules: Mapping[str, int] = said(
        "names or patterns, as `Placed` takes them, and the rank along the axis of each", hint=Table[Rank]
    )
    forward: str = said("of activations: a codec", default=EXACT)
    backward: str = said("of their gradients: a codec", default=EXACT)
    micro_batches: Count = said("parts of a batch that follow each other through the ranks", default=1)

    def __post_init__(self) -> None:
        object.__setattr__(self, "modules", Table(self.modules))
        _check_activations(self)
        if not self.modules:
            raise InputError('modules is empty; say where modules go, as in "blocks.0" = 0')


@dataclass(frozen=True)
class Predicted:
    """What a planner expects of this plan; nothing depends on it."""

    step_s: float = said("seconds of a step")
    planner: str = said("who said so", default="")


@dataclass(frozen=True)
class JobPlan:
    """How a model is spread over ranks: a mesh, what each of its axes does, and codecs.

    The mesh lists axes from the outermost: ranks along the last axis have neighbouring numbers. Its order
    decides which ranks talk, and nothing else.

    >>> plan = JobPlan(
    ...     mesh={"replicate": 2, "tensor": 2},
    ...     replicate=ReplicateAxis("int8"),
    ...     tensor=TensorAxis({"blocks.*.up": "column", "blocks.*.down": "row"}, "int8", "int8"),
    ... )
    >>> plan.ranks, plan.data_parts
    (4, 2)
    """

    mesh: Mapping[str, int] = said(
        "axes and the number of ranks along each, from the outermost", hint=Table[Count]
    )
    replicate: ReplicateAxis | None = said("for an axis `replicate`", default=None)
    shard: ShardAxis | None = said("for an axis `shard`", default=None)
    placed: PlacedAxis | None = said("for an axis `placed`", default=None)
    tensor: TensorAxis | None = said("for an axis `tensor`", default=None)
    predicted: Predicted | None = said("what a planner expects", default=None)
    title: str = said("one line, shown when the job starts", default="")
    comment: str = said("anything", default="")
    version: int = said(f"of this format: {VERSION}", default=VERSION, needed_in_files=True)

    def __post_init__(self) -> None:
        object.__setattr__(self, "mesh", Table(self.mesh))
        if self.version != VERSION:
            raise InputError(f"version is {self.version}; this thinwire reads version {VERSION}")
        self._check_mesh()
        self._check_axes()

    @property
    def ranks(self) -> int:
        """The number of ranks that the plan is for."""
        return math.prod(self.mesh.values())

    @property
    def data_parts(self) -> int:
        """The number of parts into which the samples of a batch are divided."""
        return self.size("replicate") * self.size("shard")

    def size(self, axis: str) -> int:
        """Return the number of ranks along an axis; 1 if the mesh does not have it."""
        return self.mesh.get(axis, 1)

    def shape(self) -> str:
        """Return the mesh in words.

        >>> JobPlan(mesh={"replicate": 4}, replicate=ReplicateAxis("int8")).shape()
        'replicate 4'
        """
        return " x ".join(f"{axis} {size}" for axis, size in self.mesh.items())

    def check_world(self, world: int) -> None:
        """Raise an `InputError` if the plan does not fit a number of ranks."""
        if world != self.ranks:
            product = " x ".join(map(str, self.mesh.values()))
            told = f"{product} = {self.ranks}" if len(self.mesh) > 1 else product
            raise InputError(
                f"the plan's mesh ({', '.join(self.mesh)}) has {told} ranks, and this job has {world}: start "
                f"{self.ranks}, or change [mesh]"
            )

    @classmethod
    def read(cls, path: str | Path) -> "JobPlan":
        """Read a plan from a TOML file; unknown and missing keys are errors."""
        path = Path(path)
        try:
            data = tomllib.loads(path.read_text(encoding="utf-8"))
        except (OSError, ValueError, RecursionError) as error:
            raise InputError(f"cannot read the plan {path}: {error}") from None
        return tables.read(cls, data, str(path))

    @classmethod
    def from_toml(cls, text: str, name: str = "plan") -> "JobPlan":
        """Read a plan from text; `name` stands for the file in errors."""
        try:
            data = tomllib.loads(text)
        except (ValueError, RecursionError) as error:
            raise InputError(f"cannot read the plan {name}: {error}") from None
        return tables.read(cls, data, name)

    def to_toml(self) -> str:
        """Return the text of a file that `read` reads as the same plan."""
        lines = [f"version = {self.version}"]
        lines += [f"{name} = {tables.spelled(getattr(self, name))}" for name in ("title", "comment")
                  if getattr(self, name)]  # fmt: skip
        lines += ["", "[mesh]", *(f"{axis} = {size}" for axis, size in self.mesh.items())]
        for name in (*AXES, "predicted"):
            if getattr(self, name) is not None:
                lines += ["", *_section(name, getattr(self, name))]
        return "\n".join(lines) + "\n"

    def write(self, path: str | Path) -> None:
        """Write the plan to a file."""
        with writing(Path(path)):
            Path(path).write_text(self.to_toml(), encoding="utf-8")

    def _check_mesh(self) -> None:
        if not self.mesh:
            raise InputError(f"mesh has no axis; there are: {', '.join(AXES)}")
        for axis, size in self.mesh.items():
            if axis not in AXES:
                raise InputError(f"mesh: {unknown('axis', axis, AXES)}")
            if isinstance(size, bool) or not isinstance(size, int) or size < 1:
                raise InputError(f"mesh: {axis} is {size!r}; it must be a number of ranks, 1 or more")

    def _check_axes(self) -> None:
        for axis in AXES:
            if axis in self.mesh and getattr(self, axis) is None:
                raise InputError(f"the mesh has an axis '{axis}', and the plan has no [{axis}]")
            if axis not in self.mesh and getattr(self, axis) is not None:
                raise InputError(f"the plan has [{axis}], and the mesh has no axis '{axis}'")
        if self.placed is not None:
            for name, rank in self.placed.modules.items():
                if not 0 <= rank < self.size("placed"):
                    raise InputError(
                        f"placed.modules: '{name}' is on rank {rank}, and the axis has {self.size('placed')} "
                        f"ranks: 0 to {self.size('placed') - 1}"
                    )
        _check_combination(self)
        _check_choices(self)


def schema() -> dict[str, Any]:
    """Return the JSON schema of a plan's file, as `job-plan.schema.json` holds it."""
    described = tables.schema(JobPlan)
    described["properties"]["version"]["const"] = VERSION
    described["properties"]["mesh"] = {
        "type": "object",
        "properties": {axis: {"type": "integer", "minimum": 1} for axis in AXES},
        "additionalProperties": False,
        "minProperties": 1,
        "description": described["properties"]["mesh"]["description"],
    }
    for axis in ("placed", "tensor"):
        described["properties"][axis]["properties"]["modules"]["minProperties"] = 1
    return {
        "$schema": "https://json-schema.org/draft/2020-12/schema",
        "title": "A job plan of thinwire",
        **described,
    }


def schema_text() -> str:
    """Return the text of `job-plan.schema.json`."""
    return json.dumps(schema(), indent=2) + "\n"


def _check_combination(plan: JobPlan) -> None:
    """Refuse axes that cannot work together."""
    axes = list(plan.mesh)
    if "placed" in axes:
        for other, why in (
            (
                "shard",
                "FSDP gathers a module's weights on all ranks, and only one rank computes a placed module",
            ),
            ("tensor", "all ranks of a split layer compute it, and only one rank computes a placed module"),
        ):
            if other in axes:
                raise InputError(
                    f"the mesh has both 'placed' and '{other}', which do not work together: {why}; use "
                    "'placed' with 'replicate'"
                )
    if "shard" in axes:
        after = axes[axes.index("shard") :]
        if "replicate" in after:
            raise InputError("FSDP needs 'replicate' before 'shard' in the mesh: change their order")
        if "tensor" in axes and "tensor" not in after:
            raise InputError("FSDP needs 'shard' before 'tensor' in the mesh: change their order")


def _check_choices(plan: JobPlan) -> None:
    """Refuse codecs that ranks choose by their own gradients, where ranks have copies of a weight."""
    for axis in ("replicate", "shard"):
        part = getattr(plan, axis)
        if part is None or plan.size("tensor") == 1:
            continue
        if part.codec == "auto" or policy.get(part.codec).ladder is not None:
            raise InputError(
                f"{axis}.codec = '{part.codec}' chooses codecs by gradients, of which ranks along 'tensor' "
                "have different parts: their copies of what is not split would drift apart; name a codec"
            )


def _section(name: str, part: Any) -> list[str]:
    lines, after = [f"[{name}]"], []
    for each in fields(part):
        value = getattr(part, each.name)
        if isinstance(value, Mapping):
            after += ["", f"[{name}.{each.name}]"]
            after += [
                f"{tables.key(pattern)} = {tables.spelled(_entry(one))}" for pattern, one in value.items()
            ]
        elif value is not None and value != each.default:
            lines.append(f"{each.name} = {tables.spelled(value)}")
    return lines + after


def _entry(value: Any) -> Any:
    """Return a value of a table as it is written: a dataclass of which only `SHORT` is set by that alone."""
    if not is_dataclass(value):
        return value
    given = {each.name: getattr(value, each.name) for each in fields(value)}
    given = {name: one for name, one in given.items() if one is not None}
    short: str = getattr(value, "SHORT", "")
    return given[short] if list(given) == [short] else given


def _split(given: "Split | Style | Mapping[str, Any]") -> Split:
    if isinstance(given, Split):
        return given
    entries: Mapping[str, Any] = given if isinstance(given, Mapping) else {Split.SHORT: given}
    return Split(**entries)


def _check_word(name: str, value: object, words: Any) -> None:
    known = words.__args__
    if value not in known:
        raise InputError(f"{name}: {unknown('word', value, known)}")


def _check_policy(name: str, value: object) -> None:
    """Check the codec of gradients or weights."""
    if value == "auto" and name == "codec":
        return
    try:
        policy.get(value)  # type: ignore[arg-type]
    except ThinwireError as error:
        raise InputError(f"{name} = {value!r}: {error}") from None


def _check_activations(part: Any) -> None:
    """Check the codecs of activations and of their gradients."""
    for name in ("forward", "backward"):
        value = getattr(part, name)
        if value is None or value == EXACT:
            continue
        try:
            codec = codecs.get(value)
            if codec.feedback:
                raise InputError(
                    f"what it lost of these samples would be added to other samples: use '{codec.name}'"
                )
        except ThinwireError as error:
            raise InputError(f"{name} = {value!r}: {error}") from None
