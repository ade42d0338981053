"""Thin adapters to training frameworks."""

from thinwire.integrations.attachment import attach, attached, detach
from thinwire.integrations.checkpoint import reshard
from thinwire.integrations.dcp import load_sharded, sharded_state
from thinwire.integrations.ddp import hook
from thinwire.integrations.handle import Handle

__all__ = [
    "Handle",
    "attach",
    "attached",
    "detach",
    "hook",
    "load_sharded",
    "reshard",
    "sharded_state",
]
