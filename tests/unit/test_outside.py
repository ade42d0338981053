"""What `torch.compile` leaves as it is: the same results as without it."""

import torch

from thinwire import codecs
from thinwire.outside import outside_of_graphs
from thinwire.runtimes import local


def test_codecs_and_local_ranks_work_inside_a_compiled_function():
    codec, x = codecs.get("int8/64"), torch.randn(256, generator=torch.Generator().manual_seed(0))

    def there_and_back(x):
        return codec.decode(codec.encode(2 * x), 256) + 1

    def reduced(x):
        ranks = [x * 1, x * 3]
        local.all_reduce(ranks, "int8/64")
        return ranks[0] + 1

    for each in (there_and_back, reduced):
        assert torch.equal(torch.compile(each, backend="eager")(x), each(x))


def test_the_compiler_is_loaded_only_where_something_is_compiled(monkeypatch):
    disabled = []
    monkeypatch.setattr(torch._dynamo, "disable", lambda function: (disabled.append(function), function)[1])
    doubled = outside_of_graphs(lambda x, *, by=2: by * x)
    assert (doubled(3), doubled(3, by=5), disabled) == (6, 15, [])
    monkeypatch.setattr(torch.compiler, "is_compiling", lambda: True)
    assert (doubled(3), doubled(3, by=5)) == (6, 15)
    assert len(disabled) == 1  # and kept
