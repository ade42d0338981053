"""All kinds of parallelism that `thinwire bench parallel` measures."""

from thinwire.bench import parallel_layers as layers
from thinwire.bench.parallel_kinds import COMPUTE, HALF, PLAIN, Kind, fully_sharded, hybrid_sharded

USUAL = (PLAIN, HALF, COMPUTE, "int8", "int4")
KINDS: dict[str, Kind] = {
    "fsdp": Kind(fully_sharded, (PLAIN, HALF, COMPUTE, "int8", "int8+int4")),
    "hsdp": Kind(hybrid_sharded, USUAL, world=4),
    "tensor": Kind(layers.tensor, USUAL),
    "sequence": Kind(layers.sequence, USUAL),
    "pipeline": Kind(layers.pipeline, USUAL),
    "expert": Kind(layers.expert, USUAL),
}
