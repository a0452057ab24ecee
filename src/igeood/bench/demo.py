"""The whole pipeline on the embedded sets: train, guard, compare, report. No download."""

import json
import math
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path

import numpy as np
import torch

from igeood.bench import datasets
from igeood.bench.datasets import ImageSet
from igeood.bench.datasets.images import Rows
from igeood.bench.networks import Recipe, learning_task, train
from igeood.bench.runs import Network, Plan, Results, load_network
from igeood.bench.runs import run as run_benchmark
from igeood.bench.runs.averages import Averages
from igeood.bench.runs.observing import Notify
from igeood.checking import Check, check
from igeood.errors import InputError
from igeood.files import only_one
from igeood.guard import Guard, white_box
from igeood.model.factory import read_weights

NETWORK = "resnet-10-16"
KNOWN = "demo:digits"
OOD = {
    "demo:left-out": "digits 8 and 9",
    "demo:letters": "capital letters",
    "demo:photographs": "photographs",
    "gaussian": "Gaussian noise",
}
# the default, and the three of the last layer that refused most on 8 to 10 classes in 0.2's comparison
METHODS = ("evidence", "mahalanobis++", "vim", "knn")
IMAGES = 360  # of each set at most, about as many as there are digits to try the guard on
EPOCHS = 12
BATCH = 32
RATE = 0.05


@dataclass(frozen=True)
class Demo:
    """What the demonstration made.

    Attributes
    ----------
    results : Results
        Of the comparison; beside them are `weights.safetensors` and `guard.safetensors`.
    check : Check
        What the default guard, calibrated on digits alone, does with digits and with each foreign set.
    methods : dict
        For each method of the comparison the share of foreign images that it refuses, on average over the sets.
    """

    results: Results
    check: Check
    methods: dict[str, float]


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
    guard, unseen = _guarded(network, seed)
    guard.save(target / "guard.safetensors")
    foreign = {title: list(network.batches(datasets.load(name, limit=IMAGES), BATCH)) for name, title in OOD.items()}
    checked = check(guard, list(network.batches(unseen, BATCH)), foreign, seed=seed)
    plan = Plan(tuple(OOD), ("untuned",), METHODS, images=IMAGES, seed=seed)
    done = lambda number, total, _: notify("comparing methods", number, total)  # noqa: E731
    results = run_benchmark([network], plan, target, done=done)
    ours = Averages(results)
    (key,) = (key for key in ours.classifiers() if key.weights == network.weights)
    shares = {m: [float(ours.value("untuned", key, ood, m, "tnr") or math.nan) for ood in OOD] for m in METHODS}
    return Demo(results, checked, {method: float(np.mean(values)) / 100 for method, values in shares.items()})


def _trained(path: Path, seed: int, notify: Notify) -> Network:
    """The classifier of the digits 0…7: trained, unless its weights are there."""
    recipe = Recipe(epochs=EPOCHS, batch=BATCH, rate=RATE, augment=False, seed=seed)
    if not path.exists():
        done = lambda now: notify("training", now.epoch * now.steps + now.step, EPOCHS * now.steps)  # noqa: E731
        train(NETWORK, learning_task(KNOWN), path, recipe, progress=done)
    elif json.loads(read_weights(path)[1].get("training", "{}")).get("recipe") != asdict(recipe):
        problem = f"{path} is of another demonstration, or seed"
        raise InputError(problem, argument="out", cure="name another folder")
    return load_network(str(path))


def _guarded(network: Network, seed: int) -> tuple[Guard, ImageSet]:
    """The default white box, fitted and calibrated; and the digits that it has not seen."""
    known = datasets.load(KNOWN)
    held_out, unseen = (known[rows] for rows in parted(len(known), seed))
    guard = white_box(network.model).fit(network.batches(datasets.load(KNOWN, split="train"), BATCH))
    guard.calibrate(network.batches(held_out, BATCH))
    return guard, unseen


def parted(n: int, seed: int) -> tuple[Rows, Rows]:
    """Rows of the test digits for the guard: half to calibrate it, half to try it on."""
    order = np.random.default_rng([seed, 1]).permutation(n)
    return np.sort(order[: n // 2]), np.sort(order[n // 2 :])
