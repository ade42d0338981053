"""Hybrids of parallelism, from a plan: a mesh, where the modules of a network go, a codec for each direction.

docs/hybrids.md begins with the question "my model does not fit".
"""

__all__: list[str] = []
