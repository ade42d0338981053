"""Tests of several processes take longest: every worker begins with some of them."""

SLOW = ("test_nccl.py", "test_lab.py", "test_collectives.py", "test_ddp.py", "test_pipeline.py")


def spread(slow, others, workers):
    """As many equal parts as there are workers, each beginning with its share of the slow ones.

    >>> spread(["A", "B", "C"], ["d", "e", "f", "g", "h"], 2)
    ['A', 'C', 'd', 'e', 'B', 'f', 'g', 'h']
    """
    size, found = -(-(len(slow) + len(others)) // workers), []
    left = list(others)
    for worker in range(workers):
        first = slow[worker::workers]
        count = max(0, size - len(first))
        found += [*first, *left[:count]]
        left = left[count:]
    return found + left


def pytest_collection_modifyitems(config, items):
    here = [item for item in items if item.path.parent.name == "device"]
    slow = [item for item in here if item.path.name in SLOW]
    workers = getattr(config, "workerinput", {}).get("workercount", 1)
    if workers == 1 or len(here) < len(items):
        return
    items[:] = spread(slow, [item for item in here if item not in slow], workers)
