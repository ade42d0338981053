"""Thin adapters to training frameworks."""

from thinwire.integrations.ddp import Wire, attach, hook

__all__ = ["Wire", "attach", "hook"]
