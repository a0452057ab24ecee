"""What to learn, the paper's recipe, and training with checkpoints: a killed run goes on as if it had not stopped.

Every random choice is drawn from the seed, the epoch and the step, so a checkpoint holds the weights, the optimiser's
state and the number of epochs done; nothing else is needed to go on.
"""

import hashlib
import json
import math
import os
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Literal

import numpy as np
import torch
from safetensors.torch import save
from torch import Tensor, nn
from torch.nn import functional

from igeood.bench.datasets import DATASETS, load
from igeood.bench.datasets.images import Images, Labels, Rows
from igeood.bench.networks.catalog import build
from igeood.errors import InputError
from igeood.files import only_one, read_record, write_record, write_whole
from igeood.images import normalised
from igeood.model.reader import logits_of

Maker = Callable[[int], nn.Module]  # from the number of classes
PADDING = 4
EVALUATION_BATCH = 250


@dataclass(frozen=True)
class Recipe:
    """How to train; the defaults are the paper's.

    Attributes
    ----------
    epochs : int
        Passes over the training images.
    batch : int
        Images a step.
    rate : float
        Learning rate; a tenth of it after half of the epochs, a hundredth after three quarters.
    momentum, decay : float
        Nesterov momentum (of SGD) and weight decay. A parameter with an attribute `no_decay` has none.
    augment : bool
        Shift each image by up to 4 pixels and mirror half of them.
    seed : int
        Of the first weights, the order of the images, and the augmentation.
    optimiser : {"sgd", "adam"}
    """

    epochs: int = 300
    batch: int = 64
    rate: float = 0.1
    momentum: float = 0.9
    decay: float = 1e-4
    augment: bool = True
    seed: int = 0
    optimiser: Literal["sgd", "adam"] = "sgd"

    def __post_init__(self) -> None:
        for name, low in {"epochs": 1, "batch": 2, "seed": 0, "rate": 0, "momentum": 0, "decay": 0}.items():
            if not low <= getattr(self, name) < math.inf:
                problem = f"must be a finite number, at least {low}; got {getattr(self, name)!r}"
                raise InputError(problem, argument=name)
        if self.optimiser not in ("sgd", "adam"):
            raise InputError.unknown("optimiser", self.optimiser, ("sgd", "adam"))

    def rate_at(self, epoch: int) -> float:
        """Learning rate of an epoch, counted from 0."""
        return self.rate * 0.1 ** sum(epoch >= share * self.epochs for share in (0.5, 0.75))

    def optimiser_of(self, model: nn.Module) -> torch.optim.Optimizer:
        """The optimiser of a model's parameters."""
        plain, bare = ([p for p in model.parameters() if hasattr(p, "no_decay") is it] for it in (False, True))
        groups = [{"params": plain, "weight_decay": self.decay}, {"params": bare, "weight_decay": 0.0}]
        if self.optimiser == "adam":
            return torch.optim.AdamW(groups, self.rate)
        return torch.optim.SGD(groups, self.rate, self.momentum, nesterov=self.momentum > 0)


@dataclass(frozen=True)
class Task:
    """Images (N, 3, 32, 32) of bytes with their classes, to learn and to test.

    Attributes
    ----------
    name : str
        Of the data set.
    classes : int
        Number of classes.
    images, labels : array
        Training images and classes.
    test_images, test_labels : array
        To report the accuracy on; nothing is chosen by it.
    mean, std : tuple of float
        Of the channels, to normalise by; default: those of the training images.
    """

    name: str
    classes: int
    images: Images
    labels: Labels
    test_images: Images
    test_labels: Labels
    mean: tuple[float, ...] = ()
    std: tuple[float, ...] = ()

    def __post_init__(self) -> None:
        pairs = {"images": (self.images, self.labels), "test_images": (self.test_images, self.test_labels)}
        for name, (images, labels) in pairs.items():
            if len(images) == 0 or len(images) != len(labels):
                problem = f"{len(images)} images and {len(labels)} labels; both are needed, one each"
                raise InputError(problem, argument=name)
        absent = np.setdiff1d(np.arange(self.classes), self.labels)
        if len(absent):
            problem = f"no training image of {len(absent)} classes, of {absent[0]} for example"
            raise InputError(problem, argument="labels")
        if not self.mean:
            for name, moment, least in (("mean", np.mean, 0.0), ("std", np.std, 1e-3)):
                values = [moment(channel) / 255 for channel in self.images.transpose(1, 0, 2, 3)]
                object.__setattr__(self, name, tuple(np.array(values).clip(least).round(4).tolist()))

    def digest(self) -> str:
        """SHA-256 of everything that the weights depend on, 16 hex digits."""
        digest = hashlib.sha256(repr((self.classes, self.mean, self.std, self.images.shape)).encode())
        for array in (self.images, self.labels):
            digest.update(np.ascontiguousarray(array).data)
        return digest.hexdigest()[:16]


def learning_task(name: str, *, root: str | None = None, limit: int | None = None) -> Task:
    """A labelled set, to train a classifier on; normalised as is usual for it, or else by its own moments."""
    learn, test = (load(name, root=root, split=split, limit=limit) for split in ("train", "test"))
    if learn.labels is None or test.labels is None or learn.classes is None:
        raise InputError(f"{name} has no labels to learn", argument="data", cure="name a set of labelled images")
    usual = (getattr(DATASETS.get(name), key, None) or () for key in ("mean", "std"))
    return Task(name, learn.classes, learn.images(), learn.labels, test.images(), test.labels, *usual)


def augmented(images: Images, draw: np.random.Generator) -> Images:
    """Shift each image by up to 4 pixels over a black border, and mirror half of them: one choice an image."""
    n = len(images)
    padded = np.pad(images, ((0, 0), (0, 0), (PADDING, PADDING), (PADDING, PADDING)))
    windows = np.lib.stride_tricks.sliding_window_view(padded, images.shape[2:], (2, 3))  # (N, 3, 9, 9, H, W)
    top, left = draw.integers(0, 2 * PADDING + 1, size=(2, n))
    shifted = windows[np.arange(n), :, top, left]  # (N, 3, H, W)
    return np.where(draw.random((n, 1, 1, 1)) < 0.5, shifted[..., ::-1], shifted)


@dataclass(frozen=True)
class Progress:
    """Position of a run: epochs and steps done, the mean loss and accuracy of the epoch so far."""

    epoch: int
    step: int
    steps: int
    loss: float
    accuracy: float


class Run:
    """A training run: the network, its optimiser, and the number of epochs done."""

    def __init__(
        self, network: str, task: Task, recipe: Recipe, make: Maker | None = None, head: str = "linear"
    ) -> None:
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(recipe.seed)
            self.model = make(task.classes) if make else build(network, task.classes, head=head)
        self.model.to(memory_format=torch.channels_last)  # type: ignore[call-overload]
        self.optimiser = recipe.optimiser_of(self.model)
        self.task = task
        self.recipe = recipe
        self.epoch = 0
        self.record = {"network": network, "head": head, "recipe": asdict(recipe), "data": task.digest()}

    def advance(self, progress: Callable[[Progress], None] | None = None) -> None:
        """Train for one epoch."""
        batch = self.recipe.batch
        n = len(self.task.images)
        order = np.random.default_rng([self.recipe.seed, self.epoch]).permutation(n)
        for group in self.optimiser.param_groups:
            group["lr"] = self.recipe.rate_at(self.epoch)
        self.model.train()
        loss = correct = 0.0
        for step, start in enumerate(range(0, n, batch)):
            step_loss, step_correct = self._step(order[start : start + batch], step)
            loss += step_loss
            correct += step_correct
            seen = min(start + batch, n)
            if progress is not None:
                progress(Progress(self.epoch, step + 1, -(-n // batch), loss / seen, correct / seen))
        self.epoch += 1

    def _step(self, rows: Rows, step: int) -> tuple[float, int]:
        """One step of the optimiser; returns the sum of the losses, and how many images were classified correctly."""
        images = self.task.images[rows]
        labels = torch.from_numpy(self.task.labels[rows])
        if self.recipe.augment:
            images = augmented(images, np.random.default_rng([self.recipe.seed, self.epoch, step]))
        logits = logits_of(self.model(normalised(images, self.task.mean, self.task.std)))
        loss = functional.cross_entropy(logits, labels)
        if not bool(loss.isfinite()):
            problem = f"the loss is no longer finite in epoch {self.epoch + 1}"
            raise InputError(problem, argument="rate", cure="train with a smaller rate")
        self.optimiser.zero_grad()
        loss.backward()  # type: ignore[no-untyped-call]
        self.optimiser.step()
        return float(loss.detach()) * len(rows), int((logits.argmax(dim=1) == labels).sum())

    def save(self, path: Path) -> None:
        """Write a checkpoint: the weights, and each parameter's state in the optimiser."""
        tensors = {f"|{name}": value for name, value in self.model.state_dict().items()}
        for name, parameter in self.model.named_parameters():
            state = self.optimiser.state.get(parameter, {})
            tensors |= {f"{key}|{name}": value for key, value in state.items() if isinstance(value, Tensor)}
        write_record(path, {"kind": "checkpoint", **self.record, "epoch": self.epoch}, tensors)

    def load(self, path: Path) -> None:
        """Continue from a checkpoint."""
        record, tensors = read_record(path, "checkpoint")
        for key, value in self.record.items():
            if record.get(key) != value:
                problem = f"the checkpoint {path} was made with another {key} ({record.get(key)}, not {value})"
                cure = "give the same settings to go on, or delete it to start anew"
                raise InputError(problem, argument="out", cure=cure)
        self.model.load_state_dict({place[1:]: value for place, value in tensors.items() if place.startswith("|")})
        for place, value in tensors.items():
            key, _, name = place.partition("|")
            if key:
                like = self.model.get_parameter(name)  # in its memory layout, as another one rounds otherwise
                same = value.shape == like.shape
                self.optimiser.state[like][key] = torch.empty_like(like).copy_(value) if same else value
        self.epoch = record["epoch"]


def train(
    network: str,
    task: Task,
    path: str | os.PathLike[str],
    recipe: Recipe | None = None,
    *,
    make: Maker | None = None,
    head: str = "linear",
    progress: Callable[[Progress], None] | None = None,
) -> float:
    """Train a classifier, and write its weights to a safetensors file with metadata on how they were made.

    Each epoch leaves a checkpoint beside `path`. A run that was killed goes on from there, and ends with the same
    weights to the bit.

    Parameters
    ----------
    network : str
        One of `igeood.bench.networks.NETWORKS`; with `make`, any name.
    task : Task
        What to learn.
    path : path
        The file to write; it must not exist yet.
    recipe : Recipe, optional
        How; the paper's by default.
    make : callable, optional
        Makes a network of your own from the number of classes.
    head : {"linear", "deconf-c"}
        As in `igeood.bench.networks.build`.
    progress : callable, optional
        Called after each step.

    Returns
    -------
    float
        Accuracy on the test images.
    """
    target = Path(path)
    if target.suffix != ".safetensors":
        raise InputError(f"weights go to a .safetensors file, got {target}", argument="out")
    checkpoint = target.with_suffix(".training")
    with only_one(target.with_name(f".{target.stem}.lock"), "out"):
        if target.exists() and not checkpoint.exists():  # with both, a run was killed before it removed the latter
            cure = "delete it to train again, or name another file"
            raise InputError(f"{target} exists already", argument="out", cure=cure)
        run = Run(network, task, recipe or Recipe(), make, head)
        if checkpoint.exists():
            run.load(checkpoint)
        while run.epoch < run.recipe.epochs:
            run.advance(progress)
            run.save(checkpoint)
        share = accuracy(run.model, task)
        about = {  # how to use the weights, and how to make them again
            "network": network,
            "head": head,
            "trained_on": task.name,
            "classes": str(task.classes),
            "train_images": str(len(task.images)),
            "test_images": str(len(task.test_images)),
            "mean": ",".join(map(str, task.mean)),
            "std": ",".join(map(str, task.std)),
            "test_accuracy": f"{share:.4f}",
            "training": json.dumps(run.record, sort_keys=True),
        }
        write_whole(target, save({name: value.contiguous() for name, value in run.model.state_dict().items()}, about))
        checkpoint.unlink(missing_ok=True)
    return share


@torch.no_grad()
def accuracy(model: nn.Module, task: Task) -> float:
    """Share of the test images whose largest logit is their class's."""
    model.eval()
    parts = (task.test_images[i : i + EVALUATION_BATCH] for i in range(0, len(task.test_images), EVALUATION_BATCH))
    guesses = torch.cat([logits_of(model(normalised(part, task.mean, task.std))).argmax(dim=1) for part in parts])
    return float((guesses.numpy() == task.test_labels).mean())
