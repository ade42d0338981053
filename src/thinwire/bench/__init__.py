"""Benchmarks on this machine: speed beside a plain copy, beside torch and beside other libraries."""
