"""Thin adapters to training frameworks."""

from thinwire.integrations import pipeline
from thinwire.integrations.checkpoint import reshard
from thinwire.integrations.dcp import load_sharded, sharded_state
from thinwire.integrations.ddp import attach, attached, detach, hook
from thinwire.integrations.handle import Handle

__all__ = [
    "Handle",
    "attach",
    "attached",
    "detach",
    "hook",
    "load_sharded",
    "pipeline",
    "reshard",
    "sharded_state",
]
