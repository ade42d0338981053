"""Runtimes answer a schedule's requests: across processes, in one process, or in a trace that only counts."""
