"""Data sets on disk: fetch them, and say what is there.

Below the root, `.igeood/` holds each set's lock, and what is being fetched and unpacked.
"""

import shutil
import tarfile
import zipfile
import zlib
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from igeood.bench.datasets.catalog import Dataset, Download
from igeood.bench.datasets.loading import load_dataset, present
from igeood.errors import InputError, import_extra
from igeood.files import only_one

OWN = ".igeood"
MAX_BYTES = 8 << 30  # that an archive may unpack to
ARCHIVES = (".tar", ".tar.gz", ".tgz", ".zip")
CHUNK = 1 << 18
Show = Callable[[str, int, int | None], None]  # the file's name, bytes so far, bytes in all if known


@dataclass(frozen=True)
class Status:
    """What there is of a set: `found` of `expected` images, and in words what is wrong.

    `state` is "ok", "partial", "missing" or "damaged".
    """

    name: str
    state: str
    found: int
    expected: int
    detail: str = ""


def status(dataset: Dataset, root: Path) -> Status:
    """Count the images of a set below `root`; a file that cannot be right makes the set "damaged"."""
    expected = sum(dataset.counts.values())
    try:
        counts = {s: len(load_dataset(dataset, root, s)) if begun(dataset, root, s) else 0 for s in dataset.counts}
    except InputError as error:
        return Status(dataset.name, "damaged", 0, expected, str(error))
    total = sum(counts.values())
    wrong = [f"{split} {n:,} of {dataset.counts[split]:,}" for split, n in counts.items() if n != dataset.counts[split]]
    state = "ok" if not wrong else "partial" if total else "missing"
    return Status(dataset.name, state, total, expected, "; ".join(wrong))


def begun(dataset: Dataset, root: Path, split: str = "test") -> bool:
    """Whether anything of a split is there."""
    return dataset.kind == "noise" or bool(present(dataset, root, split))


def get(dataset: Dataset, root: Path, *, force: bool = False, progress: Show | None = None) -> bool:
    """Download a set and unpack it below `root`; returns False if it is there already, whole, or needs no files.

    Files are fetched and unpacked aside, checked, and moved into place when all of them are whole. Files that do not
    belong to the set are left alone.

    Parameters
    ----------
    dataset : Dataset
    root : Path
        The folder of the data sets.
    force : bool
        Fetch again what is there.
    progress : callable, optional
        Called with the file's name, the bytes so far, and the bytes in all if known.
    """
    if dataset.kind == "noise":
        return False
    aside = root / OWN / dataset.name
    with only_one(root / OWN / f"{dataset.name}.lock", dataset.name):
        shutil.rmtree(aside, ignore_errors=True)  # what a killed run left
        if not force and status(dataset, root).state == "ok":
            return False
        try:
            for download in dataset.downloads:
                _get(dataset, download, aside, progress)
            _move(aside / "files", root)
        finally:
            shutil.rmtree(aside, ignore_errors=True)
    after = status(dataset, root)
    if after.state != "ok":
        problem = f"{dataset.name} is {after.state} after download ({after.detail})"
        raise InputError(problem, place=str(root), cure=f"see {dataset.home}")
    return True


def _get(dataset: Dataset, download: Download, aside: Path, progress: Show | None) -> None:
    """Fetch one file; it, or what is in it, is then below aside/files."""
    pooch = import_extra("pooch", "data")
    file = aside / "files" / download.file
    pooch.get_logger().setLevel("WARNING")  # it advises the callers of pooch, not our users
    bar = _Bar(file.name, progress) if progress else False
    plain = {"Accept-Encoding": "identity"}  # the file as it was published, or its checksum differs
    downloader = pooch.HTTPDownloader(progressbar=bar, chunk_size=CHUNK, headers=plain)
    try:
        pooch.retrieve(download.url, download.checksum, file.name, file.parent, downloader=downloader)
    except (OSError, ValueError) as error:  # OSError: all that requests raises
        cure = f"nothing was kept: run it again, or see {dataset.home} for a new address"
        raise InputError(str(error), place=download.url, cure=cure) from error
    if file.name.endswith(ARCHIVES):
        own = {place.split("/")[0] for layouts in dataset.layouts.values() for layout in layouts for place in layout}
        unpack(file, file.parent, folders=own)
        file.unlink()


class _Bar:
    """A progress bar as pooch wants it, for a function."""

    total = 0

    def __init__(self, file: str, show: Show) -> None:
        self.file = file
        self.show = show
        self.done = 0

    def update(self, n: int) -> None:
        self.done += n
        self.show(self.file, min(self.done, self.total) if self.total else self.done, self.total or None)

    def reset(self) -> None:
        self.done = 0

    def close(self) -> None:
        pass


def unpack(archive: Path, into: Path, *, folders: Iterable[str]) -> None:
    """Unpack some top-level folders of a tar or zip archive, all of them or none. It writes nothing outside of them."""
    how: Any = {} if archive.suffix == ".zip" else {"filter": "data"}  # of a zip it passes over what is outside
    mode: Any = "r:" if archive.suffix == ".tar" else "r:gz"
    try:
        with zipfile.ZipFile(archive) if archive.suffix == ".zip" else tarfile.open(archive, mode) as packed:
            members = packed.getmembers() if isinstance(packed, tarfile.TarFile) else packed.infolist()
            sizes = [m.size if isinstance(m, tarfile.TarInfo) else m.file_size for m in members]
        if sum(sizes) > MAX_BYTES:
            raise InputError(f"unpacks to more than {MAX_BYTES:,} bytes: not the official one", place=archive.name)
        into.mkdir(parents=True, exist_ok=True)
        with TemporaryDirectory(dir=into) as aside:
            shutil.unpack_archive(archive, aside, **how)
            for folder in folders:
                _move(Path(aside, folder), into / folder)
    except (OSError, EOFError, zlib.error, tarfile.TarError, zipfile.BadZipFile) as error:
        raise InputError(f"cannot be unpacked ({error})", place=archive.name, cure="fetch it again") from error


def _move(source: Path, target: Path) -> None:
    """Rename a file or a folder; where the folder is there already, what is in it."""
    if source.is_dir() and target.is_dir():
        for entry in list(source.iterdir()):
            _move(entry, target / entry.name)
    elif source.exists():
        source.replace(target)
