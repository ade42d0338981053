"""All kinds of parallelism that `thinwire bench parallel` measures."""

from thinwire.bench import parallel_hybrids as hybrids
from thinwire.bench import parallel_layers as layers
from thinwire.bench import parallel_sub_batches as sub_batches
from thinwire.bench.parallel_kinds import COMPUTE, HALF, PLAIN, Kind, fully_sharded, hybrid_sharded

USUAL = (PLAIN, HALF, COMPUTE, "int8", "int4")
BOTH = (*USUAL, f"{HALF}:int8", f"{HALF}:int4")
EXACT_AND_CODECS = (PLAIN, COMPUTE, "bf16", "int8", "int4")
COUNTED = [f"{codec}{count}" for codec in (PLAIN, "int8", "int4") for count in ("", "@2", "@4")]
KINDS: dict[str, Kind] = {
    "fsdp": Kind(fully_sharded, (PLAIN, HALF, COMPUTE, "int8", "int8+int4")),
    "hsdp": Kind(hybrid_sharded, (*USUAL, "int8+int8+int4"), world=4, nodes=2),
    "tensor": Kind(layers.tensor, BOTH),
    "sequence": Kind(layers.sequence, BOTH),
    "pipeline": Kind(layers.pipeline, BOTH),
    "expert": Kind(layers.expert, BOTH),
    "branches": Kind(hybrids.branches, EXACT_AND_CODECS, alone=True),
    "stages": Kind(hybrids.stages, EXACT_AND_CODECS, alone=True),
    "columns": Kind(hybrids.columns, EXACT_AND_CODECS, alone=True),
    "hybrid": Kind(hybrids.hybrid, EXACT_AND_CODECS, world=4, alone=True),
    "hybrid-stages": Kind(hybrids.hybrid_stages, EXACT_AND_CODECS, world=4, alone=True),
    "sub-batches": Kind(sub_batches.build, (HALF, COMPUTE, *COUNTED)),
}
