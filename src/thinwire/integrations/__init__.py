"""Thin adapters to training frameworks."""

from thinwire.integrations.checkpoint import load_sharded, sharded_state
from thinwire.integrations.ddp import attach, attached, detach, hook
from thinwire.integrations.state import reshard
from thinwire.integrations.wire import Wire

__all__ = ["Wire", "attach", "attached", "detach", "hook", "load_sharded", "reshard", "sharded_state"]
