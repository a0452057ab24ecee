"""The table of known data sets, `catalog.json`, and where their files are kept.

Checksums are those of the CIFAR page, of torchvision (SVHN, Textures, Places365), pytorch-ood and avalanche. Of ODIN's
copies the archives differ in depth below their folder (Imagenet/test, LSUN_resize/LSUN_resize).
"""

import json
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from importlib import resources
from pathlib import Path, PurePosixPath
from typing import Literal
from urllib.parse import urlsplit

from igeood.errors import import_extra


@dataclass(frozen=True)
class Download:
    """One file to fetch, and its checksum ("md5:…" or "sha256:…") where somebody published one."""

    url: str
    checksum: str | None = None
    into: str = ""

    @property
    def file(self) -> str:
        """Where the file is put, below the root."""
        return str(PurePosixPath(self.into) / PurePosixPath(urlsplit(self.url).path).name)


@dataclass(frozen=True)
class Dataset:
    """One line of the table.

    Attributes
    ----------
    name, title, licence, home : str
        Its name here and in print; what its owners allow; its web page.
    kind : str
        How it is read: CIFAR's records, a MATLAB file, image files, or made noise.
    counts : mapping from split to number of images
    layouts : mapping from split to the known layouts, the official one first
        Each is the files or folders below the root that make up the split.
    downloads : sequence of Download
    mean, std : three floats each, or None for sets that are only out-of-distribution
    classes : int or None
    note : str
    """

    name: str
    title: str
    licence: str
    home: str
    kind: Literal["cifar", "mat", "images", "noise"]
    counts: Mapping[str, int]
    layouts: Mapping[str, Sequence[Sequence[str]]] = field(default_factory=dict)
    downloads: Sequence[Download] = ()
    mean: tuple[float, ...] | None = None
    std: tuple[float, ...] | None = None
    classes: int | None = None
    note: str = ""


def _read_table() -> dict[str, Dataset]:
    table = {}
    for name, line in json.loads(resources.files(__package__).joinpath("catalog.json").read_text("utf-8")).items():
        downloads = tuple(Download(**download) for download in line.pop("downloads", ()))
        line |= {key: tuple(line[key]) for key in ("mean", "std") if key in line}
        table[name] = Dataset(name, downloads=downloads, **line)
    return table


DATASETS = _read_table()


def data_root(root: str | os.PathLike[str] | None = None) -> Path:
    """The folder of the data sets: the argument, else $IGEOOD_DATA, else `igeood` in the user's cache folder."""
    folder = root or os.environ.get("IGEOOD_DATA") or import_extra("pooch", "data").os_cache("igeood")
    return Path(os.path.expanduser(folder))  # noqa: PTH111 (Path.expanduser fails for a user that is not known)
