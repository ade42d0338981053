"""Declared bytes of sharded models and pipelines against those that the hosts' interfaces count."""

import pytest

from thinwire.bench import parallel

pytestmark = [pytest.mark.rest, pytest.mark.timeout(200)]
HEADERS = 1514 / 1448  # at most: a kernel may hand larger packets to an interface, with fewer headers
SMALL_NBYTES = 40_000  # barriers, acknowledgements and tensors that torch sends, in a step


@pytest.mark.parametrize("kind", ["fsdp", "pipeline"])
def test_a_rank_sends_what_it_says(kind):
    result = parallel.run([kind], [(2, "1gbit")], ["int8"], seconds=0.1)
    ((_, coded),) = [cell["rows"] for cell in result["cells"]]
    said, counted = coded["sent_nbytes"], coded["interface_nbytes"]
    assert coded["method"] == "int8"
    assert said > 50_000
    assert said < counted <= said * HEADERS + SMALL_NBYTES, (said, counted)
