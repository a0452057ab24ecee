"""The whole pipeline on the embedded sets: train, compare every method, guard, and report. No download."""

import json
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from pathlib import Path

import numpy as np
import torch

from igeood.bench import datasets
from igeood.bench.datasets import ImageSet
from igeood.bench.datasets.images import Rows
from igeood.bench.inputs import learning_task
from igeood.bench.networks import Recipe, read_weights, train
from igeood.bench.runs import Network, Plan, Results, load_network
from igeood.bench.runs import run as run_benchmark
from igeood.bench.runs.averages import raised
from igeood.bench.runs.observing import Notify
from igeood.errors import InputError
from igeood.files import only_one
from igeood.guard import Guard, Verdict, white_box

NETWORK, KNOWN, VALIDATION = "resnet-10-16", "demo:digits", "demo:small-letters"
OOD = ("demo:left-out", "demo:letters", "demo:photographs", "gaussian")
METHODS = ("msp", "odin", "energy", "igeood-logits", "mahalanobis", "igeood", "igeood+", "probe")
SETTINGS = ("black-box", "grey-box", "white-box-validation")
UNTUNED = ("fisher-rao-product", "knn", "vim", "mahalanobis++", "energy", "gen", "msp")  # beside, as they are
IMAGES = 1243  # of each set at most: as many as there are test digits
GREY_IMAGES = 150  # that the grey box sees of each set
EPOCHS, BATCH, RATE = 24, 32, 0.05


@dataclass(frozen=True)
class Demo:
    """What the demonstration made.

    Attributes
    ----------
    results : Results
        Of the comparison; beside them are `weights.safetensors` and `guard.safetensors`.
    guard : Guard
        The default white box, the Fisher–Rao product: calibrated on digits, it has not seen anything else.
    refused : dict
        For each set the share that the guard refuses, and the number of its images.
    why : dict
        For each OOD set why one input of it was refused, in words.
    """

    results: Results
    guard: Guard
    refused: dict[str, tuple[float, int]]
    why: dict[str, str]


def run(folder: str | Path, *, seed: int = 0, notify: Notify | None = None) -> Demo:
    """Run the demonstration. What a stopped run has finished is not done again.

    Parameters
    ----------
    folder : path
        Made if it is not there.
    seed : int
        Of the training, and of every split.
    notify : callable, optional
        Called with what is being done, how much of it is done, and of how much.
    """
    with _one_thread(), only_one(Path(folder) / ".demo.lock", "out"):
        return _run(Path(folder), seed, notify or (lambda *_: None))


@contextmanager
def _one_thread() -> Iterator[None]:
    """Torch on one thread: a small network gains little from more, and its numbers should not depend on them."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(threads)


def _run(target: Path, seed: int, notify: Notify) -> Demo:
    network = _trained(target / "weights.safetensors", seed, notify)
    tuned = Plan(OOD, SETTINGS, METHODS, (VALIDATION,), GREY_IMAGES, IMAGES, splits=1, seed=seed)
    done = lambda number, total, _: notify("comparing methods", number, total)  # noqa: E731
    for plan in (tuned, replace(tuned, settings=("untuned",), methods=UNTUNED)):
        results = run_benchmark([network], plan, target, done=done)
    guard, measured = _guarded(network, seed)
    guard.save(target / "guard.safetensors")
    refused, why = {}, {}
    for i, (name, images) in enumerate(measured.items()):
        batches = list(network.batches(images, BATCH))
        verdict = guard.predict(batches)
        refused[images.title] = (float(np.mean(np.asarray(verdict.is_ood))), len(images))
        if name != KNOWN and verdict.is_ood.any():
            why[images.title] = _reason(guard, network, images, verdict)
        notify("guarding", i + 1, len(measured))
    return Demo(results, guard, refused, why)


def _trained(path: Path, seed: int, notify: Notify) -> Network:
    """The classifier of the digits 0…7: trained, unless its weights are there."""
    recipe = Recipe(epochs=EPOCHS, batch=BATCH, rate=RATE, augment=False, seed=seed)
    if not path.exists():
        done = lambda now: notify("training", now.epoch * now.steps + now.step, EPOCHS * now.steps)  # noqa: E731
        train(NETWORK, learning_task(KNOWN), path, recipe, progress=done)
    elif json.loads(read_weights(path)[1].get("training", "{}")).get("recipe") != asdict(recipe):
        raise InputError(f"out: {path} is of another demonstration, or seed; name another folder")
    return load_network(str(path))


def _guarded(network: Network, seed: int) -> tuple[Guard, dict[str, ImageSet]]:
    """The default white box, fitted and calibrated; and the images of each set that none of it has seen."""
    known = datasets.load(KNOWN)
    held_out, unseen = (known[rows] for rows in parted(len(known), seed))
    guard = white_box(network.model).fit(network.batches(datasets.load(KNOWN, split="train"), BATCH))
    guard.calibrate(network.batches(held_out, BATCH))
    return guard, {KNOWN: unseen, **{name: datasets.load(name, limit=IMAGES) for name in OOD}}


def parted(n: int, seed: int) -> tuple[Rows, Rows]:
    """Rows of the test digits for the guard: half to calibrate it, half to try it on."""
    order = np.random.default_rng([seed, 1]).permutation(n)  # other halves than those of the comparison
    return np.sort(order[: n // 2]), np.sort(order[n // 2 :])


def _reason(guard: Guard, network: Network, images: ImageSet, verdict: Verdict) -> str:
    """Why the input in the middle of the refused scores was refused: neither the easiest nor the hardest."""
    refused = torch.as_tensor(verdict.is_ood).nonzero()[:, 0]
    order = refused[torch.as_tensor(verdict.score)[refused].argsort(stable=True)]
    row = int(order[len(order) // 2])
    explained = guard.explain(list(network.batches(images[[row]], BATCH)))
    assert explained.usual is not None  # noqa: S101 (the product knows it)
    parts = raised(explained.columns, explained.contributions[0].tolist(), explained.usual.tolist())
    reason = " and ".join(f"{part} ({value:+.1f})" for part, value in list(parts.items())[:2])
    return f"taken for {int(verdict.label[row])}, p-value {float(verdict.p_value[row]):.2g}, raised by {reason}"
