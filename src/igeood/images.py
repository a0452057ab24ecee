"""Folders of image files as the inputs of a guarded model; inputs as pictures."""

import base64
import io
import warnings
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from igeood.errors import InputError, import_extra, is_of_disk
from igeood.guard import Guard
from igeood.model.batch import Batch
from igeood.model.step import check_channels

MAX_PIXELS = 2**26  # of a resized image: one pixel high and very long, it would fill the memory
FORMATS = ("BMP", "GIF", "JPEG", "PNG", "PPM", "TIFF", "WEBP")  # Pillow has others, of which one starts Ghostscript
SUFFIXES = frozenset([".jpg", ".jpeg", ".png", ".bmp", ".gif", ".webp", ".tif", ".tiff", ".ppm", ".pgm"])
PREFIX = "folder:"
LUMINANCE = np.array([0.299, 0.587, 0.114])  # of red, green and blue, for a network of one channel
SIDE = 96  # pixels of a picture's longer side, where it is larger

Pixels = NDArray[np.uint8]


class ImageFolder:
    """The images below a folder as batches of a guard's inputs; it can be read again.

    Parameters
    ----------
    name : str
        The folder, with or without `folder:` before it.
    guard : Guard
        Whose `preparation` says how images become inputs.
    batch : int
        Images at a time.
    training : bool
        Batches have labels: each sub-folder is a class.

    Attributes
    ----------
    on_error : {"raise", "refuse"}
        With "refuse", a file that does not decode is black, and has its reason in the batch's `reasons`.
    classes : tuple of str or None
        Names of the sub-folders that are classes.
    report : callable
        Gets the number of images that are done, and of all, after each batch.
    """

    on_error = "raise"
    report: Callable[[int, int | None], None] = staticmethod(lambda *_: None)

    def __init__(self, name: str, guard: Guard, *, batch: int, training: bool) -> None:
        if guard.preparation is None:
            cure = "make it with `igeood fit`, give --size to `igeood check`, or call Python"
            raise InputError("it has no size of images", argument="guard", cure=cure)
        folder = Path(name.removeprefix(PREFIX))
        self.preparation = guard.preparation
        self.batch = batch
        self.paths = image_files(folder)
        self.rows = len(self.paths)
        self.is_grey = takes_grey(guard.source.model)
        self.classes: tuple[str, ...] | None = None
        self.labels: Tensor | None = None
        if training:
            self.classes, self.labels = class_labels(folder, self.paths)

    def __iter__(self) -> Iterator[Batch]:
        return (batch for batch, _ in self.blocks())

    def blocks(self, *, ids: bool = False) -> Iterator[tuple[Batch, list[str] | range]]:
        """Batches of inputs (n, 3 or 1, size, size) with the files' names, or else the images' numbers."""
        size = self.preparation["size"]
        for start in range(0, self.rows, self.batch):
            rows = slice(start, min(start + self.batch, self.rows))
            pixels = np.zeros((rows.stop - start, 3, size, size), np.uint8)
            reasons: dict[int, str] = {}
            for row, path in enumerate(self.paths[rows]):
                try:
                    pixels[row] = read_image(path, size)
                except InputError as error:  # noqa: PERF203
                    if self.on_error == "raise":
                        raise
                    reasons[row] = str(error)
            if self.is_grey:
                pixels = np.rint(np.tensordot(LUMINANCE, pixels, axes=(0, 1))[:, None]).astype(np.uint8)
            x = normalised(pixels, self.preparation["mean"], self.preparation["std"]).contiguous()
            labels = None if self.labels is None else self.labels[rows]
            names = [str(path) for path in self.paths[rows]] if ids else range(start, rows.stop)
            yield Batch({"": x}, labels=labels, reasons=reasons), names
            self.report(rows.stop, self.rows)


def takes_grey(model: nn.Module | None) -> bool:
    """Whether a network's first convolution takes one channel."""
    convolutions = (m for m in (() if model is None else model.modules()) if isinstance(m, nn.Conv2d))
    return getattr(next(convolutions, None), "in_channels", 3) == 1


def prepare(guard: Guard, size: int | None, mean: str | None, std: str | None) -> None:
    """Set how images become inputs: the pixels of each side, and by what they are normalised."""
    if size is None:
        raise InputError("how many pixels does the model take?", argument="size", cure="give {size=224}, for example")
    scale = {"mean": channels(mean or "0", "mean"), "std": channels(std or "1", "std")}
    use_preparation(guard, {"size": size, **scale})


def use_preparation(guard: Guard, preparation: dict[str, Any]) -> None:
    """Set how a guard prepares images: as another guard, or a summary, has done."""
    guard.preparation = preparation
    is_grey = takes_grey(getattr(guard.source, "model", None))
    guard.source.std = preparation["std"] * (1 if is_grey else 3 // len(preparation["std"]))


def channels(text: str, name: str) -> list[float]:
    """One number, or three, from text with commas between them."""
    values: Any = check_channels(text.split(","), name, positive=name == "std")
    if len(values) not in (1, 3):
        raise InputError(f"expected one number, or three with commas between them; got {text!r}", argument=name)
    return list(values)


def image_files(folder: Path) -> list[Path]:
    """The image files below a folder, in the order of their paths, without hidden ones."""
    if not folder.is_dir():
        raise InputError("there is no such folder", place=str(folder), cure="give one with images in it")
    named = (path for path in folder.rglob("*") if path.suffix.lower() in SUFFIXES)
    shown = (path for path in named if not any(part.startswith(".") for part in path.relative_to(folder).parts))
    files = sorted((path for path in shown if path.is_file()), key=lambda path: path.parts)
    if not files:
        raise InputError("no image files in it", place=str(folder), cure="give another folder")
    return files


def class_labels(folder: Path, paths: Sequence[Path]) -> tuple[tuple[str, ...], Tensor]:
    """Names of the classes, which are sub-folders, and the class (N,) of each file below them."""
    classes = sorted(path.name for path in folder.iterdir() if path.is_dir() and not path.name.startswith("."))
    if len(classes) < 2:
        problem = f"expected a sub-folder for each class, at least two; found {len(classes)}"
        raise InputError(problem, place=str(folder))
    names = [path.relative_to(folder).parts[0] for path in paths]
    for name in {*names} ^ {*classes}:
        problem = "no image files in it" if name in classes else "lies beside the classes"
        cure = "put each image into the sub-folder of its class, and leave none empty"
        raise InputError(problem, place=str(folder / name), cure=cure)
    return tuple(classes), torch.tensor([classes.index(name) for name in names])


def read_image(path: Path, side: int, *, nearest: bool = False) -> Pixels:
    """The image in a file, (3, side, side), as `resized` makes it."""
    pillow = import_extra("PIL.Image", "data")
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # Pillow's, about files that it reads nevertheless
            with pillow.open(path, formats=FORMATS) as image:
                return resized(image, side, nearest=nearest)
    except Exception as error:  # each of Pillow's formats fails in its own way
        if is_of_disk(error):
            raise
        raise InputError(f"does not decode ({error})", place=str(path), cure="remove it, or get a copy") from error


def resized(image: Any, side: int, *, nearest: bool = False) -> Pixels:
    """Resize the shorter side of a Pillow image to `side` pixels, crop the centre, convert to RGB: (3, side, side).

    The filter is Pillow's bilinear one, which averages over all pixels that an output pixel covers. Copies of data sets
    that were resized without such an average (nearest neighbour) are aliased, and much easier to detect: `nearest`
    makes such a copy.
    """
    pillow = import_extra("PIL.Image", "data")
    scale = side / min(image.size)
    width, height = (max(side, round(scale * length)) for length in image.size)
    if width * height > MAX_PIXELS:
        raise InputError(f"{image.width} x {image.height} pixels is too long and narrow to resize")
    if image.mode.startswith("I"):  # 16 bits: Pillow would cut them off at 255
        image = pillow.fromarray((np.asarray(image).clip(0, 65535) // 257).astype(np.uint8))
    method = pillow.Resampling.NEAREST if nearest else pillow.Resampling.BILINEAR
    whole = image.convert("RGB").resize((width, height), method)
    left, top = (width - side) // 2, (height - side) // 2
    return np.asarray(whole.crop((left, top, left + side, top + side))).transpose(2, 0, 1)


def normalised(images: Pixels | Tensor, mean: Sequence[float], std: Sequence[float]) -> Tensor:
    """Network inputs (N, 3, H, W) from images of bytes."""
    pixels = torch.as_tensor(images).float() / 255
    centre, scale = (torch.tensor(values)[:, None, None] for values in (mean, std))
    return ((pixels - centre) / scale).contiguous(memory_format=torch.channels_last)


def as_pixels(image: Tensor, low: Tensor, high: Tensor) -> Pixels:
    """An image (C, H, W) as bytes (3, H, W), from black at `low` to white at `high`; grey without 3 channels."""
    scaled = ((image - low) / (high - low).clamp(min=1e-12)).clamp(0.0, 1.0).nan_to_num()
    channels = scaled[:3] if len(scaled) >= 3 else scaled[:1].expand(3, -1, -1)
    return (255 * channels).round().byte().numpy()


def picture(image: Pixels, side: int = SIDE) -> str:
    """An image (3, H, W) as the address of a PNG that is in the address itself."""
    pillow = import_extra("PIL.Image", "data")
    content = io.BytesIO()
    drawn = pillow.fromarray(np.ascontiguousarray(image.transpose(1, 2, 0)))
    drawn.thumbnail((side, side))
    drawn.save(content, "PNG", optimize=True)
    return "data:image/png;base64," + base64.b64encode(content.getvalue()).decode()
