"""The paper's training recipe, with checkpoints from which a killed run goes on exactly as if it had not stopped.

Every random choice is drawn from the seed, the epoch and the step, so a checkpoint holds the weights, the momentum and
where the run is; nothing else is needed to go on.
"""

import hashlib
import json
import os
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors.torch import save
from torch import Tensor, nn
from torch.nn import functional

from igeood import storage
from igeood.bench.networks.catalog import build
from igeood.errors import InputError
from igeood.files import only_one, write_whole
from igeood.geometry import categorical

Images = np.ndarray[Any, np.dtype[np.uint8]]
Labels = np.ndarray[Any, np.dtype[np.int64]]
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
        Nesterov momentum and weight decay.
    augment : bool
        Shift each image by up to 4 pixels and mirror half of them.
    seed : int
        Of the first weights, the order of the images, and the augmentation.
    """

    epochs: int = 300
    batch: int = 64
    rate: float = 0.1
    momentum: float = 0.9
    decay: float = 1e-4
    augment: bool = True
    seed: int = 0

    def __post_init__(self) -> None:
        for name, low in (("epochs", 1), ("batch", 2), ("seed", 0)):
            value = getattr(self, name)
            if isinstance(value, bool) or not isinstance(value, int) or value < low:
                raise InputError(f"{name}: must be a whole number, at least {low}; got {value!r}")
        for name in ("rate", "momentum", "decay"):
            if not 0.0 <= getattr(self, name) < float("inf"):
                raise InputError(f"{name}: must be a finite number ≥ 0, got {getattr(self, name)!r}")

    def rate_at(self, epoch: int) -> float:
        """Learning rate of an epoch, counted from 0."""
        return self.rate * 0.1 ** sum(epoch >= share * self.epochs for share in (0.5, 0.75))


@dataclass(frozen=True)
class Task:
    """What is learnt, and on what it is judged: images (N, 3, 32, 32) of bytes, and their classes.

    Attributes
    ----------
    name : str
        Of the data set.
    classes : int
        Their number.
    images, labels : array
        Training images and classes.
    test_images, test_labels : array
        To report the accuracy on; nothing is chosen by it.
    mean, std : tuple of float
        Of the channels, to normalise by; of the training images where they are not given.
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
        counts = {"images": (self.images, self.labels), "test_images": (self.test_images, self.test_labels)}
        for name, (images, labels) in counts.items():
            if len(images) == 0 or len(images) != len(labels):
                raise InputError(f"{name}: {len(images)} images and {len(labels)} labels; both are needed, one each")
        absent = np.setdiff1d(np.arange(self.classes), self.labels)
        if len(absent):
            told = f"{len(absent)} of {self.classes} have none"
            raise InputError(f"labels: no training image of class {absent[0]} ({told})")
        if not self.mean:
            mean, std = _moments(self.images)
            object.__setattr__(self, "mean", mean)
            object.__setattr__(self, "std", std)

    def digest(self) -> str:
        """SHA-256 of everything that the weights depend on, 16 hex digits."""
        digest = hashlib.sha256(repr((self.classes, self.mean, self.std, self.images.shape)).encode())
        digest.update(np.ascontiguousarray(self.images).data)
        digest.update(np.ascontiguousarray(self.labels).data)
        return digest.hexdigest()[:16]


def _moments(images: Images) -> tuple[tuple[float, ...], tuple[float, ...]]:
    """Mean and deviation of each channel in [0, 1], from how often each of the 256 values occurs."""
    values = np.arange(256) / 255
    shares = [np.bincount(images[:, c].ravel(), minlength=256) / images[:, c].size for c in range(3)]
    means = [float(share @ values) for share in shares]
    deviations = [float(np.sqrt(share @ (values - m) ** 2)) for share, m in zip(shares, means, strict=True)]
    return tuple(round(m, 4) for m in means), tuple(max(round(s, 4), 1e-3) for s in deviations)


@dataclass(frozen=True)
class Progress:
    """Where a run is: epochs and steps done, the mean loss and accuracy of the epoch so far."""

    epoch: int
    step: int
    steps: int
    loss: float
    accuracy: float


@dataclass(frozen=True)
class Accuracies:
    """Shares of test images classified rightly: by the largest logit, and by the nearest Fisher–Rao centroid."""

    softmax: float
    fisher_rao: float


def normalised(images: Images | Tensor, mean: Sequence[float], std: Sequence[float]) -> Tensor:
    """Network inputs (N, 3, H, W) from images of bytes."""
    pixels = torch.as_tensor(images).float() / 255
    centre, scale = (torch.tensor(v)[:, None, None] for v in (mean, std))
    return ((pixels - centre) / scale).contiguous(memory_format=torch.channels_last)


def augmented(images: Images, draw: np.random.Generator) -> Images:
    """Each image shifted by up to 4 pixels over a black border, and mirrored or not: one choice an image."""
    n, _, height, width = images.shape
    padded = np.pad(images, ((0, 0), (0, 0), (PADDING, PADDING), (PADDING, PADDING)))
    top, left = draw.integers(0, 2 * PADDING + 1, size=(2, n))
    columns = np.broadcast_to(np.arange(width), (n, width))
    columns = np.where(draw.random(n)[:, None] < 0.5, columns[:, ::-1], columns) + left[:, None]
    rows = np.arange(height) + top[:, None]
    found: Images = padded[np.arange(n)[:, None, None], :, rows[:, :, None], columns[:, None]]  # (N, H, W, 3)
    return found.transpose(0, 3, 1, 2)


class Run:
    """A training run: the network, its optimiser, and where it is."""

    def __init__(self, network: str, task: Task, recipe: Recipe) -> None:
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(recipe.seed)
            self.model = build(network, task.classes)
        self.model.to(memory_format=torch.channels_last)  # type: ignore[call-overload]
        self.network, self.task, self.recipe = network, task, recipe
        nesterov, parameters = recipe.momentum > 0, self.model.parameters()
        self.optimiser = torch.optim.SGD(
            parameters, recipe.rate, recipe.momentum, weight_decay=recipe.decay, nesterov=nesterov
        )
        self.epoch = self.step = 0
        self.loss = self.right = 0.0  # sums over the epoch so far
        self.steps = -(-len(task.images) // recipe.batch)
        self._order: tuple[int, np.ndarray[Any, Any]] | None = None

    def record(self) -> dict[str, Any]:
        """What must be the same for a checkpoint to fit."""
        return {"network": self.network, "recipe": asdict(self.recipe), "data": self.task.digest()}

    def advance(self) -> Progress:
        """Take one step."""
        if self.step == self.steps:
            self.epoch, self.step, self.loss, self.right = self.epoch + 1, 0, 0.0, 0.0
        images, labels = self._batch()
        for group in self.optimiser.param_groups:
            group["lr"] = self.recipe.rate_at(self.epoch)
        self.model.train()
        logits = self.model(normalised(images, self.task.mean, self.task.std))
        loss = functional.cross_entropy(logits, labels)
        if not bool(loss.isfinite()):
            raise InputError(f"rate: the loss is no longer finite in epoch {self.epoch + 1}; train with a smaller rate")
        self.optimiser.zero_grad()
        loss.backward()  # type: ignore[no-untyped-call]
        self.optimiser.step()
        self.step += 1
        self.loss += float(loss.detach()) * len(labels)
        self.right += float((logits.argmax(dim=1) == labels).sum())
        seen = min(self.step * self.recipe.batch, len(self.task.images))
        return Progress(self.epoch, self.step, self.steps, self.loss / seen, self.right / seen)

    @property
    def finished(self) -> bool:
        """Whether the last step of the last epoch is done."""
        return self.epoch == self.recipe.epochs - 1 and self.step == self.steps

    def _batch(self) -> tuple[Images, Tensor]:
        seed = self.recipe.seed
        if self._order is None or self._order[0] != self.epoch:
            self._order = (self.epoch, np.random.default_rng([seed, self.epoch]).permutation(len(self.task.images)))
        rows = self._order[1][self.step * self.recipe.batch : (self.step + 1) * self.recipe.batch]
        images = self.task.images[rows]
        if self.recipe.augment:
            images = augmented(images, np.random.default_rng([seed, self.epoch, self.step]))
        return images, torch.from_numpy(self.task.labels[rows])

    def save(self, path: Path) -> None:
        """Write a checkpoint."""
        tensors = {f"model.{name}": value for name, value in self.model.state_dict().items()}
        for name, parameter in self.model.named_parameters():
            momentum = self.optimiser.state.get(parameter, {}).get("momentum_buffer")
            if momentum is not None:
                tensors[f"momentum.{name}"] = momentum
        where = {"epoch": self.epoch, "step": self.step, "loss": self.loss, "right": self.right}
        storage.write(path, {**self.record(), **where}, tensors)

    def load(self, path: Path) -> None:
        """Go on where a checkpoint is."""
        record, tensors = storage.read(path, "checkpoint")
        for key, value in self.record().items():
            if record.get(key) != value:
                raise InputError(
                    f"out: the checkpoint {path} was made with another {key}: {_difference(record.get(key), value)}; "
                    f"give the same settings to go on, or delete it to start anew"
                )
        try:
            self._restore(record, tensors)
        except (KeyError, TypeError, ValueError, RuntimeError):
            raise InputError(f"out: the checkpoint {path} is of another network; delete it to start anew") from None

    def _restore(self, record: dict[str, Any], tensors: dict[str, Tensor]) -> None:
        self.model.load_state_dict({k.removeprefix("model."): v for k, v in tensors.items() if k.startswith("model.")})
        for name, parameter in self.model.named_parameters():
            if f"momentum.{name}" in tensors:
                momentum = torch.empty_like(parameter).copy_(tensors[f"momentum.{name}"])
                self.optimiser.state[parameter]["momentum_buffer"] = momentum
        self.epoch = range(self.recipe.epochs).index(record["epoch"])
        self.step = range(self.steps + 1).index(record["step"])
        self.loss, self.right = float(record["loss"]), float(record["right"])


def _difference(there: Any, here: Any) -> str:
    if isinstance(there, dict) and isinstance(here, dict):
        return ", ".join(f"{k} {there.get(k)} there, {here[k]} here" for k in here if there.get(k) != here[k])
    return f"{there} there, {here} here"


def train(
    network: str,
    task: Task,
    path: str | os.PathLike[str],
    recipe: Recipe | None = None,
    *,
    progress: Callable[[Progress], None] | None = None,
    every: float = 60.0,
) -> Accuracies:
    """Train a reference classifier, and write its weights to a safetensors file that says how they were made.

    A run that was killed goes on from its checkpoint, beside `path`, and ends with the same weights to the bit.

    Parameters
    ----------
    network : str
        One of `igeood.bench.networks.NETWORKS`.
    task : Task
        What to learn.
    path : path
        The file to write; it must not be there yet.
    recipe : Recipe, optional
        How; the paper's by default.
    progress : callable, optional
        Called after each step.
    every : float
        Seconds between checkpoints.

    Returns
    -------
    Accuracies
        On the test images.
    """
    target = Path(path)
    if target.suffix != ".safetensors":
        raise InputError(f"out: weights go to a .safetensors file, got {target}; name one")
    checkpoint = target.with_suffix(".training")
    there = InputError(f"out: {target} is there already; delete it to train again, or name another file")
    if target.exists() and not checkpoint.exists():
        raise there
    target.parent.mkdir(parents=True, exist_ok=True)
    with only_one(target.with_name(f".{target.stem}.lock"), "out"):
        run = Run(network, task, recipe or Recipe())
        if checkpoint.exists():
            run.load(checkpoint)
        if target.exists() and not run.finished:  # else this run was killed when it had but its checkpoint to remove
            raise there
        saved = time.monotonic()
        while not run.finished:
            now = run.advance()
            if progress is not None:
                progress(now)
            if run.step == run.steps or time.monotonic() - saved >= every:
                run.save(checkpoint)
                saved = time.monotonic()
        found = accuracies(run.model, task)
        tensors = {name: value.detach().contiguous() for name, value in run.model.state_dict().items()}
        write_whole(target, save(tensors, _about(run, found)))
        checkpoint.unlink(missing_ok=True)
    return found


def _about(run: Run, found: Accuracies) -> dict[str, str]:
    """The file's metadata: what it takes to use the weights, and to make them again."""
    return {
        "network": run.network,
        "trained_on": run.task.name,
        "classes": str(run.task.classes),
        "train_images": str(len(run.task.images)),
        "test_images": str(len(run.task.test_images)),
        "mean": ",".join(map(str, run.task.mean)),
        "std": ",".join(map(str, run.task.std)),
        "test_accuracy": f"{found.softmax:.4f}",
        "test_accuracy_fisher_rao": f"{found.fisher_rao:.4f}",
        "training": json.dumps(run.record(), sort_keys=True),
    }


def accuracies(model: nn.Module, task: Task) -> Accuracies:
    """Accuracy on the test images, by the largest logit and by the nearest centroid of the training logits (Eq. 4)."""
    labels, truth = torch.from_numpy(task.labels), torch.from_numpy(task.test_labels)
    learnt, test = (_logits(model, images, task) for images in (task.images, task.test_images))
    centroids = categorical.centroids(learnt, labels, task.classes)
    nearest = categorical.pairwise_distance(test, centroids).argmin(dim=1)
    return Accuracies(*(float((a == truth).double().mean()) for a in (test.argmax(dim=1), nearest)))


@torch.no_grad()
def _logits(model: nn.Module, images: Images, task: Task) -> Tensor:
    model.eval()
    parts = (images[start : start + EVALUATION_BATCH] for start in range(0, len(images), EVALUATION_BATCH))
    return torch.cat([model(normalised(part, task.mean, task.std)) for part in parts])
