"""Thin adapters to training frameworks."""

from thinwire.integrations.ddp import attach, attached, detach, hook
from thinwire.integrations.state import reshard
from thinwire.integrations.wire import Wire

__all__ = ["Wire", "attach", "attached", "detach", "hook", "reshard"]
