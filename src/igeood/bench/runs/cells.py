"""The benchmark itself: how each cell is tuned, and what it measures.

A cell is one network, setting, method, validation set and OOD set. In-distribution test images are split once: some are
for validation, the others are what every setting is measured on. A set that a method is tuned on is never what it is
measured on: named validation sets are left out of the results that they tuned, and the white box, where it is tuned on
samples of the OOD set itself as in the paper, is measured on the others.
"""

import copy
from collections.abc import Callable
from dataclasses import asdict
from functools import cache, partial
from pathlib import Path
from typing import Any

import numpy as np
import torch

from igeood import datasets, storage
from igeood.benchmark.network import Network
from igeood.benchmark.observing import Observer, Progress, key_of
from igeood.benchmark.plan import NO_VALIDATION, Cell, Plan, cells
from igeood.benchmark.results import Record, Results
from igeood.datasets import ImageSet
from igeood.detectors import Detector, Ensemble, IgeoodLogits, detector
from igeood.detectors.ensemble import FEWEST
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
UNNAMED = ("own", "fgsm", NO_VALIDATION)  # what is tuned on without a set's name
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


def _load(plan: Plan, root: str | Path | None, name: str, part: str) -> ImageSet:
    limit = {"train": plan.train, "validation": VALIDATION}.get(part, plan.images)
    return datasets.load(name, root=root, split="train" if part == "train" else "test", limit=limit)


def _fit(method: str, temperature: float | None, train: Outputs) -> Detector:
    options = {} if temperature is None or method in UNTUNED else {"temperature": temperature}
    return detector(method, **options).fit(train)


def _noted(search: str, trials: list[Trial]) -> Record:
    """A search of the temperature as its tuning's record has it: whoever shares it need not do it again."""
    return {"search": search if trials else None, "trials": [list(asdict(trial).values()) for trial in trials]}


class _Bench:
    """One network's cells."""

    def __init__(
        self, network: Network, plan: Plan, results: Results, root: str | Path | None, progress: Progress | None
    ) -> None:
        self.network, self.plan, self.results, self.root = network, plan, results, root
        self.own = own = network.in_distribution
        self.observer = see = Observer(network, results.folder / "outputs", progress)
        # Of a set and its part, train, test or validation. None refers to `self`: a network's outputs go with it.
        self._set = load = cache(partial(_load, plan, root))
        self._outputs = outputs = cache(lambda name, part: see.outputs(load(name, part), part))
        self._whole = cache(lambda name: datasets.load(name, root=root).contents())
        self._fit = cache(lambda method, temperature: _fit(method, temperature, outputs(own, "train")))
        self._tuned: dict[tuple[Any, ...], tuple[Detector, Record]] = {}
        self._temperatures: dict[tuple[Any, ...], list[Trial]] = {}
        self._describe()

    # What there is to see.

    @property
    def _train(self) -> Outputs:
        return self._outputs(self.own, "train")

    def _halves(self, name: str, seed: int) -> tuple[Rows, Rows]:
        return halves(len(self._set(name, "test")), seed)

    def _limited(self, rows: Rows) -> Rows:
        n = min(self.plan.limit or len(rows), len(rows))
        return rows[np.linspace(0, len(rows) - 1, n).round().astype(np.int64)]

    # What is asked.

    def _asked(self, cell: Cell) -> Record:
        """Everything that a cell's figures depend on, but for the code."""
        sets = {"train": (self.own, "train"), "test": (self.own, "test"), "ood": (cell.ood, "test")}
        if cell.validation not in UNNAMED:
            sets["validation"] = (cell.validation, "validation")
        digests = {part: self._set(*where).digest()[:16] for part, where in sets.items()}
        asked = {**self._identity(), **asdict(cell), "tpr": self.plan.tpr, "data": digests}
        if cell.setting == "grey-box":
            asked["limit"] = self.plan.limit
        if cell.setting == "white-box-fgsm":
            asked["attack_size"] = self.plan.attack
        return asked

    def _identity(self) -> Record:
        network = self.network
        about = {"network": network.name, "weights": network.weights, "in_distribution": self.own}
        return {**about, "mean": list(network.mean), "std": list(network.std)}

    def _check_apart(self, cell: Cell) -> None:
        """Raise if images are measured on that were tuned on, or are known, under another set's name."""
        for name, what in {cell.validation: "was tuned on", self.own: "the network was trained on"}.items():
            shared = 0 if name in UNNAMED else len(self._whole(name) & self._whole(cell.ood))
            if shared:
                raise InputError(f"ood: {shared} images of {cell.ood} are also in {name}, which {what}; leave them out")

    def measure(self, cell: Cell) -> Record:
        """The cell's record: from the results, or measured and put there."""
        asked = self._asked(cell)
        found = self.results.cells.find(asked)
        if found is not None:
            return found
        self._check_apart(cell)
        made, tuned = self._tune(cell)
        rows = {"id": self._halves(self.own, cell.seed)[1], "ood": np.arange(len(self._set(cell.ood, "test")))}
        if cell.setting == "white-box":
            rows["ood"] = self._halves(cell.ood, cell.seed)[1]
        if cell.setting == "grey-box":
            rows = {side: self._limited(each) for side, each in rows.items()}
        scores = {side: self._score(made, tuned, cell, side, each) for side, each in rows.items()}
        name = f"{key_of(asked)}.safetensors"
        path = self.results.folder / "scores" / name
        path.parent.mkdir(exist_ok=True)
        columns = {"columns": made.columns_} if isinstance(made, Ensemble) else {}
        storage.write(path, {"cell": asdict(cell), **columns}, self._kept_scores(made, cell, rows, scores))
        figures = evaluate(scores["id"], scores["ood"], self.plan.tpr)
        record = {
            **asked, "file": self.network.file, "id_images": len(rows["id"]), "ood_images": len(rows["ood"]),
            "tnr": figures.tnr_at_tpr, "auroc": figures.auroc, "aupr": figures.aupr,
            "temperature": tuned["temperature"], "epsilon": tuned["epsilon"], "scores": name,
            "igeood": __version__, "torch": torch.__version__,
        }  # fmt: skip
        return self.results.cells.append(record)

    def _score(self, made: Detector, tuned: Record, cell: Cell, side: str, rows: Rows) -> torch.Tensor:
        name = self.own if side == "id" else cell.ood
        if cell.setting == "grey-box":
            images = self._set(name, "test")[rows]
            outputs = self.observer.stepped(images, made, self._fitted_on(), (tuned["epsilon"],))[0]
        else:
            outputs = self._outputs(name, "test")[torch.from_numpy(rows)]
        return torch.as_tensor(made.score(outputs))

    def _kept_scores(
        self, made: Detector, cell: Cell, rows: dict[str, Rows], scores: dict[str, torch.Tensor]
    ) -> dict[str, torch.Tensor]:
        """What is written of a cell: scores, what they are made of in a white box, and the extreme images."""
        tensors = dict(scores)
        for side, name in (("id", self.own), ("ood", cell.ood)):
            order = scores[side].argsort(descending=True, stable=True)
            for which, at in (("most", order[:EXTREMES]), ("least", order.flip(0)[:EXTREMES])):
                tensors[f"{side}_{which}_rows"] = at.clone()
                images = self._set(name, "test")[rows[side][at.numpy()]].images()
                tensors[f"{side}_{which}"] = torch.from_numpy(images)
            if isinstance(made, Ensemble):
                outputs = self._outputs(name, "test")[torch.from_numpy(rows[side])]
                tensors[f"{side}_parts"] = torch.as_tensor(made.contributions(outputs)).float()
        return tensors

    def _fitted_on(self) -> str:
        return self._set(self.own, "train").digest()

    # How a cell is tuned.

    def _tune(self, cell: Cell) -> tuple[Detector, Record]:
        """The cell's detector, ready to score, and how it came about.

        Cells that differ in the OOD set only share it, unless they are tuned on that set.
        """
        own = cell.ood if cell.validation == "own" else ""
        key = (cell.setting, cell.method, cell.validation, own, cell.seed)
        if key not in self._tuned:
            self._tuned.clear()  # cells come in the order of their tunings: no other is needed again
            asked = {**self._asked(cell), "ood": own}
            asked["data"] = {k: v for k, v in asked["data"].items() if own or k != "ood"}
            tune = self._tune_white if cell.setting.startswith("white-box") else self._tune_logits
            self._tuned[key] = tune(cell, asked)
        return self._tuned[key]

    def _remember(self, asked: Record, found: Record) -> Record:
        assert not asked.keys() & found.keys()  # noqa: S101 (else what was found would hide what was asked)
        return self.results.tunings.find(asked) or self.results.tunings.append({**asked, **found})

    def _tune_logits(self, cell: Cell, asked: Record) -> tuple[Detector, Record]:
        record = self.results.tunings.find(asked)
        if record is None:
            named, grey = cell.validation != NO_VALIDATION, cell.setting == "grey-box"
            trials: list[Trial] = []
            if named and cell.method not in UNTUNED:
                outside = self._outputs(cell.validation, "validation")
                trials = self._tried(asked, cell.method, self._fitted(cell.method, None), cell, outside)
            default = getattr(detector(cell.method), "temperature", None)
            best = max(trials, key=Trial.rank).temperature if trials else default
            steps = self._steps(cell, best) if grey and named else []
            epsilon = max(steps, key=lambda s: (s[1], -s[0]))[0] if steps else GREY_EPSILON if grey else 0.0
            found = {"temperature": best, "epsilon": epsilon, **_noted(cell.method, trials), "steps": steps}
            record = self._remember(asked, found)
        return self._fitted(cell.method, record["temperature"]), record

    def _fitted(self, method: str, temperature: float | None) -> Detector:
        """A copy of the method's detector, fitted once."""
        return copy.copy(self._fit(method, temperature))

    def _inside(self, cell: Cell) -> Outputs:
        """The in-distribution images to tune on."""
        return self._outputs(self.own, "test")[torch.from_numpy(self._halves(self.own, cell.seed)[0])]

    def _tried(self, asked: Record, name: str, start: Detector, cell: Cell, outside: Outputs) -> list[Trial]:
        """Temperatures tried on validation samples; black and grey box share them, and so do IGEOOD and IGEOOD+."""
        key = (name, cell.validation, asked["ood"], cell.seed)
        if key not in self._temperatures:
            common = {k: v for k, v in asked.items() if k not in ("setting", "method", "limit", "attack_size")}
            before = self.results.tunings.find({**common, "search": name})  # by a run that was stopped
            found = [Trial(*values) for values in before["trials"]] if before else self._search(start, cell, outside)
            self._temperatures[key] = found
        return self._temperatures[key]

    def _search(self, start: Detector, cell: Cell, outside: Outputs) -> list[Trial]:
        inside = self._inside(cell)
        return list(tune_temperature(start, self._train, inside, outside, tpr=self.plan.tpr, seed=cell.seed).trials)

    def _steps(self, cell: Cell, temperature: float | None) -> list[list[float]]:
        """Sizes of the input step tried on the validation set, with the TNR that they reached."""
        made = self._fitted(cell.method, temperature)
        inside = self._set(self.own, "test")[self._limited(self._halves(self.own, cell.seed)[0])]
        outside = self._set(cell.validation, "validation").limited(self.plan.limit)
        both = [self.observer.stepped(images, made, self._fitted_on(), EPSILONS) for images in (inside, outside)]
        scored = [(made.score(a), made.score(b)) for a, b in zip(*both, strict=True)]
        return [[e, evaluate(a, b, self.plan.tpr).tnr_at_tpr] for e, (a, b) in zip(EPSILONS, scored, strict=True)]

    def _tune_white(self, cell: Cell, asked: Record) -> tuple[Detector, Record]:
        """Temperature and weights on OOD samples; weights only on adversarial samples; neither without validation."""
        made = self._fitted(cell.method, None)
        if not isinstance(made, Ensemble):
            raise InputError(f"method: {cell.method!r} is not one for a white box")
        outside, attack = self._foreign(cell)
        trials: list[Trial] = []
        if outside is not None and attack is None and made.output_ is not None:
            trials = self._tried(asked, "white", made.output_, cell, outside)
            best = max(trials, key=Trial.rank)
            made = made.at_temperature(best.temperature, self._train)
        weights = None
        if outside is not None:
            weights = made.fit_weights(self._inside(cell), outside, tpr=self.plan.tpr, seed=cell.seed)
        found = {
            "temperature": getattr(made, "temperature", None), "epsilon": 0.0,
            "strength": weights and weights.strength, "tnr_in_folds": weights and weights.tnr,
            "columns": made.columns_, "column_weights": made.weights_.tolist(), "attack": attack and asdict(attack),
            **_noted("white", trials),
        }  # fmt: skip
        return made, self._remember(asked, found)

    def _foreign(self, cell: Cell) -> tuple[Outputs | None, Attack | None]:
        """What a white box is tuned on: adversarial samples, samples of the OOD set itself, a named set, or none."""
        if cell.validation == "fgsm":
            rows = self._halves(self.own, cell.seed)[0]
            return self.observer.attacked(self._set(self.own, "test")[rows], self.plan.attack)
        if cell.validation == "own":
            return self._outputs(cell.ood, "test")[torch.from_numpy(self._halves(cell.ood, cell.seed)[0])], None
        return None if cell.validation == NO_VALIDATION else self._outputs(cell.validation, "validation"), None

    def _describe(self) -> None:
        """Put the network's own line beside the results: its layers, how Gaussian they are, and its accuracy."""
        sets = {part: self._set(self.own, part) for part in ("train", "test")}
        asked = {**self._identity(), "data": {part: images.digest()[:16] for part, images in sets.items()}}
        if self.results.networks.find(asked) is not None:
            return
        train, test = self._train, self._outputs(self.own, "test")
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
