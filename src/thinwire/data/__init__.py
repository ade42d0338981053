"""Real data sets: where they are stored, how they are fetched and checked.

Nothing is shipped with thinwire. `fetch` tries the sources of a set in order, checks the SHA-256 of every
file, and moves the files into a cache; they are the same from every source. `load` returns tensors.

    >>> from thinwire import data
    >>> list(data.SETS)
    ['mnist', 'fashion-mnist', 'cifar10', 'digits', 'sotu']
    >>> data.SETS["cifar10"].train, data.SETS["cifar10"].shape
    (50000, (3, 32, 32))
    >>> images, labels = data.load("mnist")  # doctest: +SKIP
"""

from thinwire.data.images import Images, images
from thinwire.data.read import load
from thinwire.data.sets import SETS, DataSet, File, get
from thinwire.data.sources import Progress, Source
from thinwire.data.store import Choice, best, came_from, check, describe, fetch, present, where
from thinwire.data.texts import Text, examples, is_text, texts

__all__ = [
    "SETS",
    "Choice",
    "DataSet",
    "File",
    "Images",
    "Progress",
    "Source",
    "Text",
    "best",
    "came_from",
    "check",
    "describe",
    "examples",
    "fetch",
    "get",
    "images",
    "is_text",
    "load",
    "present",
    "texts",
    "where",
]
