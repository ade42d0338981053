# ruff: noqa: E501
"""The file of a job plan: what is read, what is refused and how, and its schema."""

import itertools
import json
import re
import tomllib
from dataclasses import fields
from pathlib import Path

import pytest
from torch import nn

import thinwire
from thinwire import hybrids
from thinwire.errors import InputError, LaunchError
from thinwire.hybrids import (
    JobPlan,
    PlacedAxis,
    Predicted,
    ReplicateAxis,
    ShardAxis,
    Split,
    TensorAxis,
    batches,
    job_plan,
    names,
)
from thinwire.integrations import launcher

SCHEMA = Path(job_plan.__file__).with_name("job-plan.schema.json")
DOCS = Path(thinwire.__file__).parents[2] / "docs" / "hybrids.md"

GOOD = """
version = 1
title = "GPT on two nodes"

[mesh]
replicate = 2
tensor = 2

[replicate]
codec = "int8"

[tensor]
forward = "int8"

[tensor.modules]
"blocks.*.up" = "column"
"blocks.*.down" = { style = "row", output = "sequence", forward = "fp32" }

[predicted]
step_s = 1
"""

#: What is wrong with a plan: a change of GOOD, and words of the error.
WRONG = [
    ("version = 1", "", "plan: the key 'version' is missing; it is a whole number"),
    ("version = 1", "version = 2", "plan: version is 2; this thinwire reads version 1"),
    ("version = 1", "version = true", "plan: version is True; it must be a whole number"),
    ("version = 1", "version = 1\ntilte = 'x'", "plan: unknown key 'tilte'; did you mean 'title'?"),
    ('title = "GPT on two nodes"', "title = 7", "plan: title is 7; it must be text"),
    ("replicate = 2", "replicat = 2", "unknown axis 'replicat'; did you mean 'replicate'?"),
    ("replicate = 2", "replicate = 0", "plan, [mesh]: replicate is 0; it must be a whole number of 1 or more"),
    ("replicate = 2", "replicate = 2.0", "plan, [mesh]: replicate is 2.0"),
    ("replicate = 2\n", "", "the plan has [replicate], and the mesh has no axis 'replicate'"),
    ("tensor = 2", "tensor = 2\nshard = 2", "the mesh has an axis 'shard', and the plan has no [shard]"),
    ("[mesh]\nreplicate = 2\ntensor = 2", "[mesh]", "mesh has no axis"),
    ('codec = "int8"', "", "plan, [replicate]: the key 'codec' is missing; it is text"),
    ('codec = "int8"', 'codec = "itn8"', "plan, [replicate]: codec = 'itn8': unknown recipe or codec 'itn8'; did"),
    ('codec = "int8"', "codec = 8", "plan, [replicate]: codec is 8; it must be text"),
    ('codec = "int8"', 'codec = "int8"\nseed = 1', "plan, [replicate]: unknown key 'seed'"),
    ('forward = "int8"', 'forward = "int4+ef"', "plan, [tensor]: forward = 'int4+ef': what it lost"),
    ('forward = "int8"', 'forward = "itn8"', "plan, [tensor]: forward = 'itn8': unknown codec"),
    ('"column"', '"colunm"', "plan, [tensor.modules.\"blocks.*.up\"]: style is 'colunm'; it must be one of 'column'"),
    ('"column"', "1", "style is 1; it must be one of"),
    ('"column"', '{ styel = "column" }', "unknown key 'styel'; did you mean 'style'?"),
    ('"column"', '{ style = "gather", input = "whole" }', "input = 'whole' is for the styles 'column' and 'row'"),
    ('"column"', '{ input = "whole" }', "the key 'style' is missing"),
    ("step_s = 1", 'step_s = "1"', "plan, [predicted]: step_s is '1'; it must be a number"),
    ("version = 1", "version = ", "cannot read the plan plan: Invalid value"),
]  # fmt: skip


def test_a_plan_is_what_its_file_says():
    plan = JobPlan.from_toml(GOOD)
    assert plan == JobPlan(
        {"replicate": 2, "tensor": 2},
        replicate=ReplicateAxis("int8"),
        tensor=TensorAxis(
            {"blocks.*.up": "column", "blocks.*.down": Split("row", output="sequence", forward="fp32")},
            "int8",
        ),
        predicted=Predicted(1.0),
        title="GPT on two nodes",
    )
    assert (plan.ranks, plan.data_parts, plan.size("shard"), plan.shape()) == (
        4,
        2,
        1,
        "replicate 2 x tensor 2",
    )
    assert hash(plan) == hash(JobPlan.from_toml(GOOD))
    with pytest.raises(
        InputError, match=re.escape("(replicate, tensor) has 2 x 2 = 4 ranks, and this job has 3")
    ):
        plan.check_world(3)


@pytest.mark.parametrize(("before", "after", "words"), WRONG, ids=[each[2][:40] for each in WRONG])
def test_a_wrong_plan_is_refused_by_key_and_place(before, after, words):
    text = GOOD.replace(before, after, 1)
    assert text != GOOD
    with pytest.raises(InputError) as caught:
        JobPlan.from_toml(text)
    assert words in str(caught.value)
    assert "\n" not in str(caught.value)


PLANS = {
    "replicas": JobPlan({"replicate": 3}, replicate=ReplicateAxis("powersgd"), comment='says "no"\n\ttwice \\ \x7f'),
    "shards": JobPlan(
        {"replicate": 2, "shard": 4}, ReplicateAxis("onebit"), ShardAxis("int8/256", "int8", ("blocks.*", "head"))
    ),
    "placed": JobPlan(
        {"placed": 2}, placed=PlacedAxis({"tower.0": 0, "tower.1": 1}, "int8", micro_batches=4), title="\u00e9"
    ),
    "order": JobPlan(
        {"tensor": 2, "replicate": 2},
        ReplicateAxis("qsgd4"),
        tensor=TensorAxis({"z": Split("gather"), "a b": "sequence"}, backward="bf16"),
        predicted=Predicted(1 / 3, "mine"),
    ),
    "three": JobPlan(
        {"replicate": 2, "shard": 2, "tensor": 2}, ReplicateAxis("fp16"), ShardAxis("fp32"), tensor=TensorAxis({"a": "row"})
    ),
}  # fmt: skip


@pytest.mark.parametrize("plan", PLANS.values(), ids=PLANS)
def test_a_plan_that_was_written_is_read_as_the_same(plan, tmp_path):
    path = tmp_path / "new" / "plan.toml"
    plan.write(path)
    again = JobPlan.read(path)
    assert again == plan
    assert list(again.mesh.items()) == list(plan.mesh.items())
    assert again.to_toml() == plan.to_toml() == path.read_text(encoding="utf-8")
    fits(hybrids.schema(), tomllib.loads(plan.to_toml()))


def test_axes_that_do_not_work_together_are_refused():
    tensor, shard, copies = TensorAxis({"a": "row"}), ShardAxis("fp32"), ReplicateAxis("fp32")
    placed = PlacedAxis({"a": 0})
    for words, mesh, axes in (
        ("both 'placed' and 'shard'", {"placed": 2, "shard": 2}, {"placed": placed, "shard": shard}),
        ("both 'placed' and 'tensor'", {"placed": 2, "tensor": 2}, {"placed": placed, "tensor": tensor}),
        ("'replicate' before 'shard'", {"shard": 2, "replicate": 2}, {"shard": shard, "replicate": copies}),
        ("'shard' before 'tensor'", {"tensor": 2, "shard": 2}, {"shard": shard, "tensor": tensor}),
    ):
        with pytest.raises(InputError, match=re.escape(words)):
            JobPlan(mesh, **axes)
    with pytest.raises(InputError, match="'a' is on rank 2, and the axis has 2 ranks: 0 to 1"):
        JobPlan({"placed": 2}, placed=PlacedAxis({"a": 2}))
    for codec in ("auto", "ladder"):
        with pytest.raises(InputError, match=f"replicate.codec = '{codec}' chooses codecs by gradients"):
            JobPlan({"replicate": 2, "tensor": 2}, ReplicateAxis(codec), tensor=tensor)
    with pytest.raises(InputError, match="modules is empty"):
        TensorAxis({})


class MisfitError(Exception):
    """A value does not fit a schema."""


def fits(schema, value):
    """Check a value by the words of JSON schema that ours uses; an unknown word is an error of the test."""
    known = {"$schema", "title", "description", "type", "properties", "required", "additionalProperties",
             "enum", "const", "minimum", "items", "anyOf", "minProperties"}  # fmt: skip
    assert schema.keys() <= known, schema.keys() - known
    if "anyOf" in schema:
        for each in schema["anyOf"]:
            try:
                return fits(each, value)
            except MisfitError:
                pass
        raise MisfitError(value)
    kinds = {"object": dict, "array": list, "string": str, "integer": int, "number": int | float}
    if "type" in schema and (not isinstance(value, kinds[schema["type"]]) or isinstance(value, bool)):
        raise MisfitError(value)
    if value not in schema.get("enum", [value]) or value != schema.get("const", value):
        raise MisfitError(value)
    if "minimum" in schema and value < schema["minimum"]:
        raise MisfitError(value)
    for each in value if isinstance(value, list) else ():
        fits(schema["items"], each)
    return fits_object(schema, value) if isinstance(value, dict) else None


def fits_object(schema, value):
    more = schema.get("additionalProperties", True)
    if not set(schema.get("required", ())) <= value.keys() or len(value) < schema.get("minProperties", 0):
        raise MisfitError(value)
    for name, each in value.items():
        if name in schema.get("properties", {}):
            fits(schema["properties"][name], each)
        elif more is False:
            raise MisfitError(name)
        elif more is not True:
            fits(more, each)


def test_the_schema_takes_what_the_reader_takes_and_refuses_what_it_refuses():
    """Up to what no schema knows: codecs, and what one table says of another."""
    fits(hybrids.schema(), tomllib.loads(GOOD))
    beyond = ("'itn8'", "what it lost", "the mesh has", "is for the styles", "cannot read")
    for before, after, words in WRONG:
        if not any(each in words for each in beyond):
            with pytest.raises(MisfitError):
                fits(hybrids.schema(), tomllib.loads(GOOD.replace(before, after, 1)))


VALUES = (
    True,
    7,
    -1,
    1.5,
    "text",
    "row",
    "int8",
    [],
    ["a"],
    [1],
    {},
    {"a": 1},
    {"a": "row"},
    {"a": {"style": "row"}},
)


def test_schema_and_reader_agree_about_a_value_of_any_type_under_any_key():
    data = tomllib.loads(GOOD) | {"placed": {"modules": {"a": 0}, "micro_batches": 2}, "comment": ""}
    data["shard"] = {"codec": "fp32", "weights": "fp32", "modules": []}
    paths = [(name,) for name in data] + [
        (table, name) for table in data if isinstance(data[table], dict) for name in data[table]
    ]
    judged = {True: 0, False: 0}
    for path, value in itertools.product(paths, VALUES):
        changed = json.loads(json.dumps(data))
        inside = changed
        for name in path[:-1]:
            inside = inside[name]
        inside[path[-1]] = value
        try:
            fits(hybrids.schema(), changed)
            accepted = True
        except MisfitError:
            accepted = False
        types_fit = reads(changed)
        assert accepted == types_fit, (path, value)
        judged[accepted] += 1
    assert min(judged.values()) > 20


def reads(data):
    """Whether the reader takes a plan's types and keys; other refusals, such as of combinations, do not count."""
    try:
        job_plan.tables.read(JobPlan, data, "plan")
    except InputError as error:
        said = str(error)
        kinds = ("it must be", "is missing", "unknown key", "no table", "unknown axis", "is empty", "no axis;",
                 "version is")  # fmt: skip
        return not any(each in said for each in kinds)
    return True


def test_the_shipped_schema_is_that_of_the_dataclasses():
    assert SCHEMA.read_text() == job_plan.schema_text(), "python tests/unit/test_job_plan.py writes it"


def test_the_docs_list_every_key():
    text = DOCS.read_text()
    for kind, table in (
        (JobPlan, None),
        (ReplicateAxis, "replicate"),
        (ShardAxis, "shard"),
        (PlacedAxis, "placed"),
        (TensorAxis, "tensor"),
        (Split, "tensor.modules"),
        (Predicted, "predicted"),
    ):
        for each in fields(kind):
            key = f"{table}.{each.name}" if table else each.name
            assert f"| `{key}` | {each.metadata['help']} |" in text, key


def test_patterns_name_modules_part_by_part():
    net = nn.ModuleDict(
        {"blocks": nn.ModuleList(nn.Sequential(nn.ReLU()) for _ in range(2)), "head": nn.ReLU()}
    )
    assert names.matching(net, {"blocks.*": 1, "head": 2}, "here") == {
        "blocks.0": 1,
        "blocks.1": 1,
        "head": 2,
    }
    assert names.listed(net, ["*", "blocks.0.0"], "here") == ["head", "blocks.0.0", "blocks"]
    with pytest.raises(
        InputError, match=re.escape("here: 'block.*' names no module of ModuleDict; did you mean 'blocks.*'?")
    ):
        names.matching(net, {"block.*": 1}, "here")
    with pytest.raises(InputError, match=r"there are: blocks, blocks.\*, blocks.\*.\*, head"):
        names.matching(net, {"xyz": 1}, "here")
    with pytest.raises(
        InputError, match=re.escape("both 'blocks.*' and 'blocks.1' name blocks.1, with different")
    ):
        names.matching(net, {"blocks.*": 1, "blocks.1": 2}, "here")


def test_batches_are_sliced_in_their_containers():
    import torch

    x = torch.arange(6).view(6, 1)
    batch = {"x": x, "pair": (x[:, 0], ["a"] * 3 + ["b"] * 3), "scale": torch.tensor(2.0)}
    part = batches.sliced(batch, 3, 6)
    assert part["x"].flatten().tolist() == part["pair"][0].tolist() == [3, 4, 5]
    assert part["pair"][1] == ["b"] * 3
    assert part["scale"] == 2
    with pytest.raises(InputError, match="have 5, 6 rows"):
        batches.samples_of([x, torch.zeros(5)])
    assert batches.digest(batch) == batches.digest(dict(batch))
    assert batches.digest(batch) != batches.digest({**batch, "x": x + 1})
    assert hybrids.part_of_batch(x) is x
    assert hybrids.part_of_batch(x, 3) == (x, 3)


def test_launch_takes_a_plan_in_place_of_codecs(tmp_path):
    script = tmp_path / "train.py"
    script.write_text("")
    options = launcher.parse(["--plan", "plan.toml", "--nproc-per-node", "4", str(script), "--plan", "other"])
    assert (options.job.plan, options.job.worker, options.job.label) == (
        "plan.toml",
        launcher.PLAN_WORKER,
        "plan.toml",
    )
    assert options.job.arguments == ("--plan", "other")
    assert options.world == 4
    assert launcher.Job.from_words(options.job.words()) == options.job
    assert launcher.parse(["--nnodes", "1:2", str(script)]).world is None
    assert launcher.parse([str(script)]).job.worker == launcher.WORKER
    for words in (["--codec", "int4"], ["--shadow", "5"], ["--weights", "int8"]):
        with pytest.raises(LaunchError, match=f"{words[0]} does not go with --plan"):
            launcher.parse(["--plan", "plan.toml", *words, str(script)])


if __name__ == "__main__":
    SCHEMA.write_text(job_plan.schema_text())
