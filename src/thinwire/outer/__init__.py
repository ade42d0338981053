"""Training that rarely communicates: ranks train alone and average from time to time, or send a part of a step.

docs/outer.md begins with the question "my ranks are in two cities".
"""

__all__: list[str] = []
