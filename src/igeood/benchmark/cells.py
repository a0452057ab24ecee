"""The benchmark itself: how each cell is tuned, and what it measures.

A cell is one network, setting, method, validation set and OOD set. In-distribution test images are split once: some are
for validation, the others are what every setting is measured on. A set that a method is tuned on is never what it is
measured on: named validation sets are left out of the results that they tuned, and the white box, where it is tuned on
samples of the OOD set itself as in the paper, is measured on the others.
"""

import copy
import hashlib
import json
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch

from igeood import datasets, storage
from igeood.benchmark.network import Network
from igeood.benchmark.observing import Observer, Progress
from igeood.benchmark.plan import NO_VALIDATION, Cell, Plan, cells
from igeood.benchmark.results import Record, Results
from igeood.datasets import ImageSet
from igeood.detectors import Detector, Ensemble, IgeoodLogits, detector
from igeood.detectors.ensemble import FEWEST, WeightSearch
from igeood.diagnostics import diagnose
from igeood.errors import InputError
from igeood.extraction import random_state_kept
from igeood.files import only_one
from igeood.guard import EPSILONS
from igeood.metrics import evaluate
from igeood.outputs import Outputs
from igeood.perturbation import Attack
from igeood.tuning import Trial, tune_temperature
from igeood.version import __version__

UNTUNED = ("msp", "mahalanobis")  # methods without a temperature of their own
VALIDATION = 1000  # images of each kind to tune on, as in the paper; of a smaller set, half
GREY_EPSILON = 0.0012  # without validation
EXTREMES = 8  # images with the highest, and with the lowest scores, that are kept with them

Rows = np.ndarray[Any, np.dtype[np.int64]]


def run(
    networks: list[Network],
    plan: Plan,
    folder: str | Path,
    *,
    root: str | Path | None = None,
    progress: Progress | None = None,
    done: Callable[[int, int, Record], None] | None = None,
) -> Results:
    """Measure every cell that is not measured yet.

    Parameters
    ----------
    networks : list of Network
        Classifiers to benchmark.
    plan : Plan
        What to run.
    folder : path
        Where results are kept; one process at a time.
    root : path, optional
        Where the data sets are: see `igeood.datasets.data_root`.
    progress : callable, optional
        Called with a text, the images done and their number, as a network runs.
    done : callable, optional
        Called after each cell with its number, the number of all, and its record.

    Returns
    -------
    Results
        All that the folder holds.
    """
    for network in networks:
        _check(network, plan, root)
    target = Path(folder)
    target.mkdir(parents=True, exist_ok=True)
    with only_one(target / ".lock", "out"), random_state_kept(), torch.no_grad():
        results = Results(target)
        total = sum(1 for network in networks for _ in cells(plan, network.in_distribution))
        number = 0
        for network in networks:
            bench = _Bench(network, plan, results, root, progress)
            for cell in cells(plan, network.in_distribution):
                record = bench.measure(cell)
                number += 1
                if done is not None:
                    done(number, total, record)
    return results


def halves(n: int, seed: int) -> tuple[Rows, Rows]:
    """Rows of a set of n test images: those to tune on, and those to measure on."""
    order = np.random.default_rng(seed).permutation(n)
    size = min(VALIDATION, n // 2)
    return np.sort(order[:size]), np.sort(order[size:])


def _check(network: Network, plan: Plan, root: str | Path | None) -> None:
    """Find out what cannot be measured before the network runs: it may take an hour."""
    own = network.in_distribution
    if own in plan.validation:
        raise InputError(f"validation: {own} is what {network.file} was trained on; name an OOD set")
    if not any(True for _ in cells(plan, own)):
        raise InputError(
            f"ood: nothing to measure on {network.file}: {', '.join(plan.methods)} in {', '.join(plan.settings)}, "
            f"on {', '.join(plan.ood)} without what it was trained or tuned on"
        )
    for split in ("train", "test"):
        if datasets.load(own, root=root, split=split).labels is None:
            raise InputError(f"in-distribution: {own} has no labels; it must be what {network.file} was trained on")
    for name in (*plan.validation, *plan.ood):
        n = VALIDATION if name == NO_VALIDATION else len(datasets.load(name, root=root))
        if n < 2 * FEWEST and ("white-box" in plan.settings or name in plan.validation):
            raise InputError(f"ood: {name} has {n} images; tuning on it needs at least {2 * FEWEST}")


@dataclass(frozen=True, eq=False)
class _Tuned:
    """A detector ready to score, and how it came about."""

    detector: Detector
    epsilon: float
    record: Record


class _Bench:
    """One network's cells."""

    def __init__(
        self, network: Network, plan: Plan, results: Results, root: str | Path | None, progress: Progress | None
    ) -> None:
        self.network, self.plan, self.results, self.root = network, plan, results, root
        self.observer = Observer(network, results.folder / "outputs", progress)
        self._sets: dict[tuple[str, str], ImageSet] = {}
        self._wholes: dict[str, frozenset[bytes]] = {}
        self._seen: dict[tuple[str, str], Outputs] = {}
        self._fits: dict[tuple[str, float | None], Detector] = {}
        self._tuned: dict[tuple[Any, ...], _Tuned] = {}
        self._temperatures: dict[tuple[Any, ...], list[Trial]] = {}
        self._describe()

    # What there is to see.

    def _set(self, name: str, part: str = "test") -> ImageSet:
        if (name, part) not in self._sets:
            limit = {"train": self.plan.train, "validation": VALIDATION}.get(part, self.plan.images)
            split = "train" if part == "train" else "test"
            self._sets[name, part] = datasets.load(name, root=self.root, split=split, limit=limit)
        return self._sets[name, part]

    def _outputs(self, name: str, part: str = "test") -> Outputs:
        if (name, part) not in self._seen:
            self._seen[name, part] = self.observer.outputs(self._set(name, part), part)
        return self._seen[name, part]

    @property
    def _train(self) -> Outputs:
        return self._outputs(self.network.in_distribution, "train")

    def _halves(self, name: str, seed: int) -> tuple[Rows, Rows]:
        return halves(len(self._set(name)), seed)

    def _inside(self, seed: int) -> tuple[Rows, Rows]:
        return self._halves(self.network.in_distribution, seed)

    def _limited(self, rows: Rows) -> Rows:
        limit = self.plan.limit
        if limit is None or limit >= len(rows):
            return rows
        return rows[np.linspace(0, len(rows) - 1, limit).round().astype(np.int64)]

    # What is asked.

    def _asked(self, cell: Cell) -> Record:
        """Everything that a cell's figures depend on, but for the code."""
        own = self.network.in_distribution
        digests = {part: self._set(own, part).digest()[:16] for part in ("train", "test")}
        if cell.validation not in ("own", "fgsm", NO_VALIDATION):
            digests["validation"] = self._set(cell.validation, "validation").digest()[:16]
        asked = self._identity()
        asked |= {**asdict(cell), "tpr": self.plan.tpr, "data": {**digests, "ood": self._set(cell.ood).digest()[:16]}}
        if cell.setting == "grey-box":
            asked["limit"] = self.plan.limit
        if cell.setting == "white-box-fgsm":
            asked["attack_size"] = self.plan.attack
        return asked

    def _identity(self) -> Record:
        network = self.network
        about = {"network": network.name, "weights": network.weights, "in_distribution": network.in_distribution}
        return {**about, "mean": list(network.mean), "std": list(network.std)}

    def _check_apart(self, cell: Cell) -> None:
        """Raise if images are measured on that were tuned on, or are known, under another set's name."""
        others = {cell.validation: "was tuned on", self.network.in_distribution: "the network was trained on"}
        for name, what in others.items():
            if name in ("own", "fgsm", NO_VALIDATION):
                continue
            for each in (name, cell.ood):
                if each not in self._wholes:
                    self._wholes[each] = datasets.load(each, root=self.root).contents()
            shared = len(self._wholes[name] & self._wholes[cell.ood])
            if shared:
                raise InputError(f"ood: {shared} images of {cell.ood} are also in {name}, which {what}; leave them out")

    def measure(self, cell: Cell) -> Record:
        """The cell's record: from the results, or measured and put there."""
        asked = self._asked(cell)
        found = self.results.cells.find(asked)
        if found is not None:
            return found
        self._check_apart(cell)
        tuned = self._tune(cell)
        inside = self._inside(cell.seed)[1]
        outside = self._halves(cell.ood, cell.seed)[1] if cell.setting == "white-box" else None
        if outside is None:
            outside = np.arange(len(self._set(cell.ood)))
        if cell.setting == "grey-box":
            inside, outside = self._limited(inside), self._limited(outside)
        id_scores = self._score(tuned, cell, self.network.in_distribution, inside)
        ood_scores = self._score(tuned, cell, cell.ood, outside)
        name = hashlib.sha256(json.dumps(asked, sort_keys=True).encode()).hexdigest()[:24]
        scores = self.results.folder / "scores" / f"{name}.safetensors"
        scores.parent.mkdir(exist_ok=True)
        storage.write(scores, *self._kept_scores(tuned, cell, inside, outside, id_scores, ood_scores))
        figures = evaluate(id_scores, ood_scores, self.plan.tpr)
        record = {
            **asked, "file": self.network.file, "id_images": len(id_scores), "ood_images": len(ood_scores),
            "tnr": figures.tnr_at_tpr, "auroc": figures.auroc, "aupr": figures.aupr,
            "temperature": tuned.record["temperature"], "epsilon": tuned.epsilon, "scores": scores.name,
            "igeood": __version__, "torch": torch.__version__,
        }  # fmt: skip
        return self.results.cells.append(record)

    def _score(self, tuned: _Tuned, cell: Cell, name: str, rows: Rows) -> torch.Tensor:
        if cell.setting == "grey-box":
            images = self._set(name)[rows]
            outputs = self.observer.stepped(images, tuned.detector, self._fitted_on(), (tuned.epsilon,))[0]
        else:
            outputs = self._outputs(name)[torch.from_numpy(rows)]
        return torch.as_tensor(tuned.detector.score(outputs))

    def _kept_scores(
        self, tuned: _Tuned, cell: Cell, inside: Rows, outside: Rows, id_scores: torch.Tensor, ood_scores: torch.Tensor
    ) -> tuple[Record, dict[str, torch.Tensor]]:
        """What is written of a cell: scores, what they are made of in a white box, and the extreme images."""
        record: Record = {"cell": asdict(cell)}
        tensors = {"id": id_scores, "ood": ood_scores}
        sides = (
            ("id", self.network.in_distribution, inside, id_scores),
            ("ood", cell.ood, outside, ood_scores),
        )
        for side, name, rows, scores in sides:
            order = scores.argsort(descending=True, stable=True)
            for which, at in (("most", order[:EXTREMES]), ("least", order.flip(0)[:EXTREMES])):
                tensors[f"{side}_{which}_rows"] = at.clone()
                tensors[f"{side}_{which}"] = torch.from_numpy(self._set(name)[rows[at.numpy()]].images())
            if isinstance(tuned.detector, Ensemble):
                record["columns"] = tuned.detector.columns_
                parts = torch.as_tensor(tuned.detector.contributions(self._outputs(name)[torch.from_numpy(rows)]))
                tensors[f"{side}_parts"] = parts.float()
        return record, tensors

    def _fitted_on(self) -> str:
        return self._set(self.network.in_distribution, "train").digest()

    # How a cell is tuned.

    def _tune(self, cell: Cell) -> _Tuned:
        """The cell's detector. Cells that differ in the OOD set only share it, unless they are tuned on that set."""
        own = cell.ood if cell.validation == "own" else ""
        key = (cell.setting, cell.method, cell.validation, own, cell.seed)
        if key not in self._tuned:
            self._tuned.clear()  # cells come in the order of their tunings: no other is needed again
            asked = {k: v for k, v in self._asked(cell).items() if k not in ("ood", "data")}
            data = {k: v for k, v in self._asked(cell)["data"].items() if own or k != "ood"}
            tune = self._tune_white if cell.setting.startswith("white-box") else self._tune_logits
            self._tuned[key] = tune(cell, {**asked, "ood": own, "data": data})
        return self._tuned[key]

    def _remember(self, asked: Record, found: Record) -> Record:
        assert not asked.keys() & found.keys()  # noqa: S101 (else what was found would hide what was asked)
        kept = self.results.tunings.find(asked)
        return self.results.tunings.append({**asked, **found}) if kept is None else kept

    def _tune_logits(self, cell: Cell, asked: Record) -> _Tuned:
        record = self.results.tunings.find(asked)
        if record is None:
            trials = self._trials(cell)
            default = getattr(detector(cell.method), "temperature", None)
            best = max(trials, key=Trial.rank).temperature if trials else default
            steps = self._steps(cell, best) if cell.setting == "grey-box" else []
            epsilon = max(steps, key=lambda s: (s[1], -s[0]))[0] if steps else 0.0
            if cell.setting == "grey-box" and cell.validation == NO_VALIDATION:
                epsilon = GREY_EPSILON
            found = {"temperature": best, "epsilon": epsilon, "trials": [list(asdict(t).values()) for t in trials]}
            record = self._remember(asked, {**found, "steps": steps})
        return _Tuned(self._fitted(cell.method, record["temperature"]), record["epsilon"], record)

    def _fitted(self, method: str, temperature: float | None) -> Detector:
        """A copy of the method's detector, fitted once."""
        options = {} if temperature is None or method in UNTUNED else {"temperature": temperature}
        if (method, temperature) not in self._fits:
            self._fits[method, temperature] = detector(method, **options).fit(self._train)
        return copy.copy(self._fits[method, temperature])

    def _trials(self, cell: Cell) -> list[Trial]:
        """Temperatures tried on the validation set, with what they reached; shared by the black and the grey box."""
        if cell.method in UNTUNED or cell.validation == NO_VALIDATION:
            return []
        key = (cell.method, cell.validation, cell.seed)
        if key not in self._temperatures:
            rows = torch.from_numpy(self._inside(cell.seed)[0])
            inside = self._outputs(self.network.in_distribution)[rows]
            outside = self._outputs(cell.validation, "validation")
            start = self._fitted(cell.method, None)
            found = tune_temperature(start, self._train, inside, outside, tpr=self.plan.tpr, seed=cell.seed)
            self._temperatures[key] = list(found.trials)
        return self._temperatures[key]

    def _steps(self, cell: Cell, temperature: float | None) -> list[list[float]]:
        """Sizes of the input step tried on the validation set, with the TNR that they reached."""
        if cell.validation == NO_VALIDATION:
            return []
        made = self._fitted(cell.method, temperature)
        inside = self._set(self.network.in_distribution)[self._limited(self._inside(cell.seed)[0])]
        outside = self._set(cell.validation, "validation")
        outside = outside[self._limited(np.arange(len(outside)))]
        both = [self.observer.stepped(images, made, self._fitted_on(), EPSILONS) for images in (inside, outside)]
        scored = [(made.score(a), made.score(b)) for a, b in zip(*both, strict=True)]
        return [[e, evaluate(a, b, self.plan.tpr).tnr_at_tpr] for e, (a, b) in zip(EPSILONS, scored, strict=True)]

    def _tune_white(self, cell: Cell, asked: Record) -> _Tuned:
        """Temperature and weights on OOD samples; weights only on adversarial samples; neither without validation."""
        made = self._fitted(cell.method, None)
        if not isinstance(made, Ensemble):
            raise InputError(f"method: {cell.method!r} is not one for a white box")
        rows = self._inside(cell.seed)[0]
        inside = self._outputs(self.network.in_distribution)[torch.from_numpy(rows)]
        outside, attack = self._foreign(cell, rows)
        if outside is not None and attack is None and made.output_ is not None:
            best = self._white_temperature(cell, made.output_, inside, outside)
            made = made.at_temperature(best, self._train)
        weights: WeightSearch | None = None
        if outside is not None:
            weights = made.fit_weights(inside, outside, tpr=self.plan.tpr, seed=cell.seed)
        found = {
            "temperature": getattr(made, "temperature", None), "epsilon": 0.0,
            "strength": weights and weights.strength, "tnr_in_folds": weights and weights.tnr,
            "columns": made.columns_, "column_weights": made.weights_.tolist(),
            "attack": None if attack is None else asdict(attack),
        }  # fmt: skip
        return _Tuned(made, 0.0, self._remember(asked, found))

    def _foreign(self, cell: Cell, rows: Rows) -> tuple[Outputs | None, Attack | None]:
        """What a white box is tuned on: attacks on these rows, samples of the OOD set itself, a named set, or none."""
        if cell.validation == "fgsm":
            return self.observer.attacked(self._set(self.network.in_distribution)[rows], self.plan.attack)
        if cell.validation == "own":
            return self._outputs(cell.ood)[torch.from_numpy(self._halves(cell.ood, cell.seed)[0])], None
        return None if cell.validation == NO_VALIDATION else self._outputs(cell.validation, "validation"), None

    def _white_temperature(self, cell: Cell, output: IgeoodLogits, inside: Outputs, outside: Outputs) -> float:
        """The best temperature of FR₀ on the OOD validation samples: IGEOOD and IGEOOD+ share it."""
        key = ("white", cell.validation, cell.ood if cell.validation == "own" else "", cell.seed)
        if key not in self._temperatures:
            found = tune_temperature(output, self._train, inside, outside, tpr=self.plan.tpr, seed=cell.seed)
            self._temperatures[key] = list(found.trials)
        return max(self._temperatures[key], key=Trial.rank).temperature

    def _describe(self) -> None:
        """Put the network's own line beside the results: its layers, how Gaussian they are, and its accuracy."""
        own = self.network.in_distribution
        sets = {part: self._set(own, part) for part in ("train", "test")}
        asked = {**self._identity(), "data": {part: images.digest()[:16] for part, images in sets.items()}}
        if self.results.networks.find(asked) is not None:
            return
        train, test = self._train, self._outputs(own)
        assert test.labels is not None  # noqa: S101 (`_check` has seen to it; this tells the type checker)
        nearest = torch.as_tensor(IgeoodLogits().fit(train).predict_class(test))
        found = {
            "file": self.network.file, "classes": train.n_classes,
            "layers": [[layer, int(value.shape[1])] for layer, value in train.features.items()],
            "train_images": len(train), "test_images": len(test),
            "notes": [f"{part}: {images.note}" for part, images in sets.items() if images.note],
            "accuracy": float((test.logits.argmax(dim=1) == test.labels).double().mean()),
            "accuracy_fisher_rao": float((nearest == test.labels).double().mean()),
            "diagnostics": {layer: asdict(d) for layer, d in diagnose(train).items()},
        }  # fmt: skip
        self.results.networks.append({**asked, **found})
