"""Calls that `torch.compile` leaves as they are: a graph ends before each of them, and another begins."""

import functools
from collections.abc import Callable
from typing import ParamSpec, TypeVar

import torch

P = ParamSpec("P")
T = TypeVar("T")


def outside_of_graphs(function: Callable[P, T]) -> Callable[P, T]:
    """The same function, which the compiler does not look into.

    torch's own `disable` takes seconds to load the compiler; here it is loaded by those only who compile.
    """
    held: list[Callable[P, T]] = []

    @functools.wraps(function)
    def call(*args: P.args, **options: P.kwargs) -> T:
        if not held:
            if not torch.compiler.is_compiling():
                return function(*args, **options)
            held.append(torch._dynamo.disable(function))
        return held[0](*args, **options)

    # The compiler counts by code, so every function has one of its own.
    call.__code__ = call.__code__.replace(co_name=function.__name__)  # type: ignore[attr-defined]
    return call
