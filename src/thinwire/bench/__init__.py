"""Measurements of this machine: how fast the formats run, beside a copy and beside other libraries."""
