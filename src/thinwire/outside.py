"""Calls that `torch.compile` does not compile: a graph ends before each call, and a new one begins after."""

import functools
from collections.abc import Callable
from typing import ParamSpec, TypeVar

import torch

P = ParamSpec("P")
T = TypeVar("T")


def outside_of_graphs(function: Callable[P, T]) -> Callable[P, T]:
    """Return the same function, excluded from compilation.

    torch's own `disable` takes seconds to load the compiler; here only programs that compile load it.
    """
    disabled: list[Callable[P, T]] = []

    @functools.wraps(function)
    def call(*args: P.args, **options: P.kwargs) -> T:
        if not disabled:
            if not torch.compiler.is_compiling():
                return function(*args, **options)
            disabled.append(torch._dynamo.disable(function))
        return disabled[0](*args, **options)

    # The compiler counts recompilations per code object, so each function gets its own.
    call.__code__ = call.__code__.replace(co_name=function.__name__)  # type: ignore[attr-defined]
    return call
