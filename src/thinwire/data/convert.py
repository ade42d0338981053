"""Convert the files of a source to the files of a set, which are the same for every source."""

import gzip
import json
import shutil
from pathlib import Path
from typing import Any

from thinwire.errors import DataError, MissingDependencyError

CIFAR_BATCHES = ("data_batch_1", "data_batch_2", "data_batch_3", "data_batch_4", "data_batch_5", "test_batch")
CIFAR_BATCH = 10_000
DIGITS_FILES = ("digits.csv", "optdigits.tes")


def collect(raw: Path, out: Path) -> None:
    """Move the files to `out`; unpack gzipped ones."""
    for path in sorted(raw.iterdir()):
        if path.suffix == ".gz":
            with gzip.open(path) as packed, (out / path.stem).open("wb") as plain:
                shutil.copyfileobj(packed, plain)
        else:
            path.rename(out / path.name)


def cifar_from_png(raw: Path, out: Path) -> None:
    """Convert six pictures with an image in every row, and two lists of labels, to the official batches.

    A record of a batch is the label, then the red, the green and the blue plane: 3073 bytes.
    """
    try:
        from PIL import Image
    except ImportError:
        raise MissingDependencyError("CIFAR-10 as PNG needs pillow: pip install pillow") from None
    import numpy as np

    labels = [
        each for name in ("train", "test") for each in json.loads((raw / f"{name}_lables.json").read_text())
    ]
    for number, name in enumerate(CIFAR_BATCHES):
        with Image.open(raw / f"{name}.png") as picture:
            pixels = np.asarray(picture)
        if pixels.shape != (CIFAR_BATCH, 1024, 3):
            raise DataError(f"{name}.png has shape {pixels.shape}, not {(CIFAR_BATCH, 1024, 3)}")
        records = np.empty((CIFAR_BATCH, 3073), np.uint8)
        records[:, 0] = labels[number * CIFAR_BATCH : (number + 1) * CIFAR_BATCH]
        records[:, 1:] = pixels.transpose(0, 2, 1).reshape(CIFAR_BATCH, 3072)
        records.tofile(out / f"{name}.bin")


def digits_from_csv(raw: Path, out: Path) -> None:
    """Convert lines of 64 pixels from 0 to 16 and a label to a pair of IDX files."""
    import numpy as np

    collected = out / "collected"
    collected.mkdir()
    collect(raw, collected)
    paths = [collected / name for name in DIGITS_FILES if (collected / name).is_file()]
    if not paths:
        raise DataError(f"it has none of the files {', '.join(DIGITS_FILES)}")
    rows = np.array([line.split(",") for line in paths[0].read_text().split()], np.float64).astype(np.uint8)
    write_idx(out / "digits-images-idx3-ubyte", rows[:, :64].reshape(-1, 8, 8))
    write_idx(out / "digits-labels-idx1-ubyte", rows[:, 64])


def write_idx(path: Path, array: Any) -> None:
    """Write an array of bytes as IDX: two zeros, type, number of dimensions, their sizes, the bytes."""
    header = bytes((0, 0, 8, array.ndim)) + b"".join(size.to_bytes(4, "big") for size in array.shape)
    path.write_bytes(header + array.tobytes())


def join_texts(raw: Path, out: Path) -> None:
    """Join the addresses in the order of their years, with an empty line between them."""
    texts = [path.read_bytes().strip() for path in sorted(raw.glob("*.txt"))]
    (out / "sotu.txt").write_bytes(b"\n\n".join(texts) + b"\n")
