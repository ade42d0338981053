"""Parallelism inside a model, with encoded activations and gradients."""

from thinwire.parallel.expert import all_to_all as all_to_all
from thinwire.parallel.styles import ColwiseParallel as ColwiseParallel
from thinwire.parallel.styles import PrepareModuleInput as PrepareModuleInput
from thinwire.parallel.styles import PrepareModuleInputOutput as PrepareModuleInputOutput
from thinwire.parallel.styles import PrepareModuleOutput as PrepareModuleOutput
from thinwire.parallel.styles import RowwiseParallel as RowwiseParallel
from thinwire.parallel.styles import SequenceParallel as SequenceParallel
