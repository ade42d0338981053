"""Trials of training, and their records."""

from thinwire.study.record import Layer, Point, Record, Trial

__all__ = ["Layer", "Point", "Record", "Trial"]
