"""The networks of docs/comparison.md, each with its data: what it was trained on, near and far OOD sets.

Forward passes are what is dear: `observed` makes one over all data of a network, and keeps logits and features in a
file. `Replay` is a stand-in for the network that gives them again, layers and head included.
"""

import json
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors.torch import load_file, safe_open, save_file
from torch import Tensor, nn

import igeood
from igeood.bench.datasets import data_root, load
from igeood.bench.networks import Task
from igeood.bench.runs import load_network
from igeood.images import normalised
from igeood.outputs import HEAD
from pretrained import Texts, clinc, encoded, foreign_texts, tiny_imagenet, with_head
from train_networks import FASHION, JOBS, beside, cifar, digits, fashion, in_channels, mnist, network

TRAIN = 10_000  # training inputs at most that methods are fitted with
HELD_OUT = 3_000  # inputs at most that say what is usual
LIMIT = 1_000  # inputs of an OOD set at most
BATCH = 100
BETWEEN = "//"  # between a part of the data and a block, in names of tensors
Inputs = np.ndarray
Sets = dict[str, Inputs]


def some(inputs: np.ndarray, limit: int = LIMIT) -> np.ndarray:
    """So many of them at most, evenly spaced."""
    return inputs[np.linspace(0, len(inputs) - 1, min(limit, len(inputs))).round().astype(int)]


# Networks with their data


@dataclass(frozen=True)
class Subject:
    """A network with its data; `prepare` makes a batch of some inputs."""

    model: nn.Module
    task: Task | Texts
    near: Sets
    far: Sets
    prepare: Callable[[Inputs], Any]

    def batches(self, inputs: Inputs) -> Iterator[Any]:
        for start in range(0, len(inputs), BATCH):
            yield self.prepare(inputs[start : start + BATCH])


def grey(images: Inputs) -> Inputs:
    """Colour images as grey ones in three channels."""
    return in_channels(images.mean(axis=1).round().astype(np.uint8))


def named(name: str, side: int = 32) -> Inputs:
    return load(name, limit=LIMIT, side=side).images()


def colour_sets(packages: Path, side: int = 32) -> Sets:
    sets = {"Chars74K": named("chars74k", side), "Fashion-MNIST": named(FASHION, side)}
    return {**sets, "MNIST": some(mnist(packages).test_images), "noise": named("gaussian", side)}


def pixels(task: Task) -> Callable[[Inputs], Tensor]:
    return lambda images: normalised(images, task.mean, task.std).contiguous()


def minilm(name: str, networks: Path, _: Path) -> Subject:
    sets = {name: some(texts) for name, texts in foreign_texts().items()}
    far = {"Wikipedia": sets.pop("Wikipedia")}
    return Subject(with_head(name, networks), clinc(), sets, far, encoded)


def efficientnet(networks: Path, packages: Path) -> Subject:
    """The near sets are those of the heads for a part of the classes, see `part_of_classes`."""
    task = tiny_imagenet()
    far = {"CIFAR-10": some(cifar(packages).test_images), **colour_sets(packages, 64)}
    return Subject(with_head("efficientnet-tiny-200", networks), task, {}, far, pixels(task))


def densenet(_: Path, packages: Path) -> Subject:
    trained = load_network(str(data_root() / "weights" / "densenet-bc-100-cifar10.safetensors"))
    learn = load("cifar-10", split="train", limit=TRAIN // 2)  # 40 ms an image
    test = load("cifar-10", split="test")
    parts = (learn.images(), learn.labels, test.images(), test.labels)
    task = Task("CIFAR-10", 10, *parts, trained.mean, trained.std)
    return Subject(trained.model, task, *cifar_sets(packages), pixels(task))


def cifar_sets(packages: Path) -> tuple[Sets, Sets]:
    """Tiny-ImageNet is near; resized by the nearest pixel it is aliased, and far."""
    aliased = {"Tiny-ImageNet, aliased": named("tiny-imagenet-nearest")}
    return {"Tiny-ImageNet": named("tiny-imagenet")}, {**aliased, **colour_sets(packages)}


def eight_classes(name: str, networks: Path, packages: Path) -> Subject:
    """Of a set of ten: the other two are near."""
    task = job_of(name).data(packages)
    kind = name.split("-")[1]
    whole = {"cifar": cifar, "fashion": fashion, "mnist": mnist}[kind](packages)
    left_out = {"classes 8 and 9": some(whole.test_images[whole.test_labels >= 8])}
    if kind == "cifar":
        near, far = cifar_sets(packages)
        return Subject(network(name, networks), task, {**left_out, **near}, far, pixels(task))
    known = {"fashion": "Fashion-MNIST", "mnist": "MNIST"}[kind]
    colour = {"CIFAR-10": some(cifar(packages).test_images), "Tiny-ImageNet": named("tiny-imagenet")}
    sets = {**colour, **colour_sets(packages)}
    far = {set_name: grey(images) for set_name, images in sets.items() if set_name != known}
    return Subject(network(name, networks), task, left_out, far, pixels(task))


def several_digits(name: str, networks: Path, packages: Path) -> Subject:
    """Foreign images in place of one digit (near) or of all (far); the digits upside down and as negatives."""
    job = job_of(name)
    task = job.data(packages)
    n = {100: 2, 1000: 3}[job.classes]
    images, _ = digits(packages, "t10k")
    known = [some(images[np.random.default_rng([n, 9, place]).permutation(len(images))]) for place in range(n)]

    def row(pieces: Inputs, count: int) -> Inputs:
        pieces = pieces.mean(axis=1).round().astype(np.uint8) if pieces.ndim == 4 else pieces
        orders = [np.random.default_rng([n, 7, place]).permutation(len(pieces)) for place in range(count)]
        size = min(len(pieces), LIMIT)
        return beside([*(pieces[order][:size] for order in orders), *(k[:size] for k in known[count:])])

    letters = named("chars74k", 28)
    things = named(FASHION, 28)
    near = {
        "one Fashion-MNIST": row(things, 1),
        "one Chars74K": row(letters, 1),
        "upside down": beside([k[:, ::-1] for k in known]),
    }
    far = {
        "Fashion-MNIST": row(things, n),
        "Chars74K": row(letters, n),
        "Tiny-ImageNet": row(named("tiny-imagenet", 28), n),
        "noise": row(named("gaussian", 28), n),
        "negatives": beside([255 - k for k in known]),
    }
    return Subject(network(name, networks), task, near, far, pixels(task))


def faulty(name: str, networks: Path, packages: Path) -> Subject:
    """Known images that went wrong on their way, as OOD sets: floats that `normalised` takes for pixels."""
    task = job_of(name).data(packages)
    images = some(task.test_images[1::2])
    sets = {
        "pixels × 255": images * 255.0,
        "pixels × 16": images * 16.0,
        "normalised twice": 255 * normalised(images, task.mean, task.std).numpy(),
        "black": np.zeros_like(images[:1]),
        "white": np.full_like(images[:1], 255),
        "noise": named("gaussian"),
    }
    kept = replace(task, test_images=task.test_images[::2], test_labels=task.test_labels[::2])
    return Subject(network(name, networks), kept, {}, sets, pixels(task))


def job_of(name: str) -> Any:
    return next(job for job in JOBS if job.name == name)


# What they gave


@dataclass(frozen=True)
class Observed:
    """What a network gave for its data: `parts` has logits, features by layer, and labels of each part.

    Parts are "train", "held out", and the OOD sets. `forward` is the CPU time of a forward pass, in microseconds an
    input.
    """

    classes: int
    accuracy: float
    forward: float
    near: list[str]
    far: list[str]
    weight: Tensor
    bias: Tensor
    parts: dict[str, dict[str, Tensor]]

    @property
    def sets(self) -> list[str]:
        return [*self.near, *self.far]

    @property
    def layers(self) -> list[str]:
        """Names of blocks, the input of the head last."""
        return [name for name in self.parts["train"] if name not in ("logits", "labels", HEAD)] + [HEAD]

    def save(self, path: Path) -> None:
        tensors = {f"{part}{BETWEEN}{name}": v for part, blocks in self.parts.items() for name, v in blocks.items()}
        about = {name: getattr(self, name) for name in ("classes", "accuracy", "forward", "near", "far")}
        tensors |= {"weight": self.weight, "bias": self.bias}
        unfinished = path.with_suffix(".unfinished")
        copies = {name: value.detach().contiguous().clone() for name, value in tensors.items()}
        save_file(copies, unfinished, {"about": json.dumps({**about, "layers": self.layers})})
        unfinished.replace(path)

    @staticmethod
    def load(path: Path) -> "Observed":
        with safe_open(path, "pt") as file:
            about = json.loads(file.metadata()["about"])
        tensors = load_file(path)
        order = ["logits", *about.pop("layers"), "labels"]
        parts: dict[str, dict[str, Tensor]] = {
            part: {} for part in ("train", "held out", *about["near"], *about["far"])
        }
        for part, blocks in parts.items():
            keys = {name: f"{part}{BETWEEN}{name}" for name in order}
            blocks |= {name: tensors[key] for name, key in keys.items() if key in tensors}
        return Observed(weight=tensors["weight"], bias=tensors["bias"], parts=parts, **about)


def observe(subject: Subject) -> Observed:
    """One forward pass over all data of a network."""
    task = subject.task
    inputs = {
        "train": some(task.images, TRAIN),
        "held out": some(task.test_images, HELD_OUT),
        **subject.near,
        **subject.far,
    }
    parts: dict[str, dict[str, Tensor]] = {}
    start = time.process_time()
    for name, values in inputs.items():
        outputs = igeood.extract(subject.model, subject.batches(values), head=True)
        parts[name] = {"logits": outputs.logits, **outputs.features}
    seconds = time.process_time() - start
    forward = 1e6 * seconds / sum(map(len, inputs.values()))
    parts["train"]["labels"] = torch.from_numpy(some(task.labels, TRAIN))
    parts["held out"]["labels"] = torch.from_numpy(some(task.test_labels, HELD_OUT))
    head = head_of(subject.model, parts["train"])
    accuracy = share_right(parts["held out"])
    return Observed(
        task.classes, accuracy, forward, list(subject.near), list(subject.far), head.weight, head.bias, parts
    )


@torch.no_grad()
def head_of(model: nn.Module, blocks: dict[str, Tensor]) -> nn.Linear:
    """The linear layer that made the logits from the input of the head."""
    width = (blocks["logits"].shape[1], blocks[HEAD].shape[1])
    fitting = [module for module in model.modules() if isinstance(module, nn.Linear) and module.weight.shape == width]
    return min(fitting, key=lambda head: float((head(blocks[HEAD][:10]) - blocks["logits"][:10]).abs().max()))


def share_right(blocks: dict[str, Tensor]) -> float:
    return float((blocks["logits"].argmax(dim=1) == blocks["labels"]).double().mean())


def part_of_classes(whole: Observed, head: nn.Linear, classes: int) -> Observed:
    """The same body under a head for the first classes: held-out inputs of the others are near."""

    def part(name: str, rows: Tensor | slice) -> dict[str, Tensor]:
        blocks = {block: value[rows] for block, value in whole.parts[name].items()}
        return {**blocks, "logits": head(blocks[HEAD]).detach()}

    parts = {name: part(name, whole.parts[name]["labels"] < classes) for name in ("train", "held out")}
    others = "the other classes"
    parts[others] = part("held out", whole.parts["held out"]["labels"] >= classes)
    parts[others].pop("labels")
    parts |= {name: part(name, slice(None)) for name in whole.sets}
    accuracy = share_right(parts["held out"])
    return Observed(classes, accuracy, whole.forward, [others, *whole.near], whole.far, head.weight, head.bias, parts)


class Replay(nn.Module):
    """A stand-in for an observed network: takes rows of its features side by side, which pass its layers again."""

    def __init__(self, observed: Observed) -> None:
        super().__init__()
        blocks = observed.parts["train"]
        self.widths = [blocks[name].shape[1] for name in observed.layers]
        self.layers = nn.ModuleList([nn.Identity() for _ in observed.layers[:-1]])
        self.head = nn.Linear(observed.weight.shape[1], observed.classes)
        self.head.load_state_dict({"weight": observed.weight, "bias": observed.bias})

    @property
    def names(self) -> list[str]:
        return [f"layers.{place}" for place in range(len(self.layers))]

    def forward(self, rows: Tensor) -> Tensor:
        *features, head_input = rows.split(self.widths, dim=1)
        for layer, value in zip(self.layers, features, strict=True):
            layer(value)
        return self.head(head_input)


def rows_of(observed: Observed, part: str) -> Tensor:
    """What `Replay` takes for a part of the data."""
    return torch.cat([observed.parts[part][name] for name in observed.layers], dim=1)


# The table's networks, real ones first

WHOLE = "EfficientNet-lite0, 200 classes of Tiny-ImageNet"
FROZEN = "MiniLM-L6 frozen, CLINC150"
REAL: dict[str, Callable[[Path, Path], Subject]] = {
    "MiniLM-L6 fine-tuned, CLINC150": partial(minilm, "minilm-l6-clinc-150-tuned"),
    FROZEN: partial(minilm, "minilm-l6-clinc-150"),
    WHOLE: efficientnet,
    "DenseNet-BC-100, CIFAR-10": densenet,
}
HEADS = {  # other heads on a body that is observed already
    "MiniLM-L6 frozen, 100 intents of CLINC150": ("minilm-l6-clinc-100", FROZEN),
    "EfficientNet-lite0, 100 classes of Tiny-ImageNet": ("efficientnet-tiny-100", WHOLE),
    "EfficientNet-lite0, 10 classes of Tiny-ImageNet": ("efficientnet-tiny-10", WHOLE),
}
SMALL: dict[str, Callable[[Path, Path], Subject]] = {
    "ResNet-10, 8 classes of CIFAR-10": partial(eight_classes, "resnet-cifar-8"),
    "CNN, 8 classes of CIFAR-10": partial(eight_classes, "cnn-cifar-8"),
    "CNN, 8 classes of Fashion-MNIST": partial(eight_classes, "cnn-fashion-8"),
    "ViT, 8 classes of Fashion-MNIST": partial(eight_classes, "vit-fashion-8"),
    "MLP, 8 classes of Fashion-MNIST": partial(eight_classes, "mlp-fashion-8"),
    "MLP, 8 classes of MNIST": partial(eight_classes, "mlp-mnist-8"),
    "CNN, pairs of MNIST digits": partial(several_digits, "cnn-mnist-pairs"),
    "CNN, triples of MNIST digits": partial(several_digits, "cnn-mnist-triples"),
}
FAULTS = "CNN, 8 classes of CIFAR-10, faulty inputs"
FAULTY: dict[str, Callable[[Path, Path], Subject]] = {FAULTS: partial(faulty, "cnn-cifar-8")}
NETWORKS = (*sorted([*REAL, *HEADS], reverse=True), *SMALL)


def is_kept(out: Path, name: str) -> bool:
    """Whether what a network gave, or the body that it shares, is in a file."""
    whole = HEADS[name][1] if name in HEADS else name
    return (out / f"{whole}.safetensors").exists()


def observed(name: str, networks: Path, packages: Path, out: Path) -> Observed:
    """From its file in `out`, or else by a forward pass over all data of the network."""
    path = out / f"{name}.safetensors"
    if path.exists():
        return Observed.load(path)
    if name in HEADS:
        network_name, whole = HEADS[name]
        head = with_head(network_name, networks).fc
        return part_of_classes(observed(whole, networks, packages, out), head, head.out_features)
    result = observe({**REAL, **SMALL, **FAULTY}[name](networks, packages))
    out.mkdir(parents=True, exist_ok=True)
    result.save(path)
    return result
