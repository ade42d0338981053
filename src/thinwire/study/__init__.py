"""Questions, trials and what came of them."""

from thinwire.study.record import Layer, Point, Record, Trial

__all__ = ["Layer", "Point", "Record", "Trial"]
