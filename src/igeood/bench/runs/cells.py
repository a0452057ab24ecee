"""The benchmark itself: each cell is tuned as a guard is, and measured.

A cell is one network, setting, method, validation set and OOD set. In-distribution test images are split once: some are
for validation, the others are what every setting is measured on. A set that a method is tuned on is never what it is
measured on: named validation sets are left out of the results that they tuned, and the white box, where it is tuned on
samples of the OOD set itself as in the paper, is measured on the others.
"""

import logging
import math
from collections.abc import Callable, Sequence
from dataclasses import asdict, replace
from functools import cache, partial
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from igeood.bench import bayes, datasets
from igeood.bench.datasets.images import Rows
from igeood.bench.diagnose import diagnose
from igeood.bench.methods.deconf import EPSILONS as DECONF_EPSILONS
from igeood.bench.runs.network import Network
from igeood.bench.runs.observing import Notify, Observer, key_of
from igeood.bench.runs.plan import ATTACK, NO_VALIDATION, RULES, STEPS, TPR, Cell, Plan, cells
from igeood.bench.runs.results import Record, Results
from igeood.detectors import METHODS, Detector, IgeoodLogits, Weighted, detector
from igeood.detectors.gaussians import LayerDetector
from igeood.detectors.weighted import FEWEST
from igeood.errors import InputError, UnsuitedError
from igeood.files import SCHEMA, digest, only_one, write_record
from igeood.guard.tune import Search, sweep, tune_detector
from igeood.metrics import evaluate
from igeood.model.reader import random_state_kept
from igeood.outputs import Outputs
from igeood.summary import Needs, Summary
from igeood.version import __version__

log = logging.getLogger("igeood")
DIAGNOSED = 2  # of a network's line: raise it when the diagnostics change
VALIDATION = 1000  # images of each kind to tune on, as in the paper; of a smaller set, half
FEWEST_TUNED = 40  # of them, where there is an input step
GREY_EPSILON = 0.0012  # before tuning: the default of `igeood.grey_box`
UNNAMED = ("own", "fgsm", NO_VALIDATION)  # what is tuned on without a set's name
DECONF = "deconf-c"  # whose input step is chosen by in-distribution samples
EXTREMES = 8  # images with the highest, and with the lowest scores, that are kept with them

Root = str | Path | None


def run(
    networks: list[Network],
    plan: Plan,
    folder: str | Path,
    *,
    root: Root = None,
    notify: Notify | None = None,
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
        Where the data sets are: see `igeood.bench.datasets.data_root`.
    notify : callable, optional
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
    with only_one(Path(folder) / ".lock", "out"), random_state_kept(), torch.no_grad():
        results = Results(folder)
        number = 0
        total = sum(1 for network in networks for _ in cells(plan, network.in_distribution))
        for network in networks:
            bench = _Bench(network, plan, results, root, notify)
            for number, cell in enumerate(cells(plan, network.in_distribution), start=number + 1):  # noqa: B020
                try:
                    record = bench.measure(cell)
                except UnsuitedError as error:
                    if plan.methods:
                        raise
                    log.warning("%s is left out: %s", cell.method, error)
                    continue
                if done is not None:
                    done(number, total, record)
    return results


def halves(n: int, seed: int) -> tuple[Rows, Rows]:
    """Rows of a set of n test images: those to tune on, and those to measure on."""
    order = np.random.default_rng(seed).permutation(n)
    size = min(VALIDATION, n // 2)
    return np.sort(order[:size]), np.sort(order[size:])


def _check(network: Network, plan: Plan, root: Root) -> None:
    """Find out what cannot be measured before the network runs: it may take an hour."""
    own = network.in_distribution
    if own in plan.validation:
        problem = f"{own} is what {network.file} was trained on"
        raise InputError(problem, argument="validation", cure="name an OOD set")
    if next(cells(plan, own), None) is None:
        cure = "name other sets, or {setting=untuned} for methods that are not tuned"
        raise InputError(f"nothing to measure on {network.file} of what was asked for", argument="ood", cure=cure)
    for name in dict.fromkeys([*plan.validation, *plan.ood]):
        n = VALIDATION if name == NO_VALIDATION else len(datasets.load(name, root=root))
        if n < 2 * FEWEST and ("white-box" in plan.settings or name in plan.validation):
            problem = f"{name} has {n} images; tuning on it needs at least {2 * FEWEST}"
            raise InputError(problem, argument="ood")


class _Bench:
    """One network's cells."""

    def __init__(self, network: Network, plan: Plan, results: Results, root: Root, notify: Notify | None) -> None:
        self.network = network
        self.plan = plan
        self.results = results
        self.own = network.in_distribution
        self.observer = Observer(network, results.folder / "outputs", notify)
        limits = {"train": ("train", plan.train), "validation": ("test", VALIDATION), "test": ("test", plan.images)}
        # None of these refers to `self`: a network's outputs go with it.
        load = partial(datasets.load, root=root, side=network.size)
        self._set = cache(lambda name, part: load(name, split=limits[part][0], limit=limits[part][1]))
        self._contents = cache(lambda name: load(name).contents())
        self._learnt: dict[str, tuple[Detector, Summary]] = {}
        self._tuned: dict[Cell, tuple[Detector, Record]] = {}
        self._describe()

    def _describe(self) -> None:
        """Put the network's own line beside the results: its layers, how Gaussian they are, and its accuracy."""
        sets = {part: self._set(self.own, part) for part in ("train", "test")}
        digests = {part: images.digest[:16] for part, images in sets.items()}
        asked = {**self.network.about, "data": digests, "diagnosed": DIAGNOSED}
        if self.results.networks.find(asked) is not None:
            return
        train, test = (self.observer.outputs(images, Needs(), part) for part, images in sets.items())
        train = train.only(Needs(layers="all").blocks(train.features))  # the head's input is the last layer's mean
        nearest = IgeoodLogits().fit(train).predict_class(test)
        assert test.labels is not None  # noqa: S101 (a trained network's images have them)
        right = [float((guess == test.labels).double().mean()) for guess in (test.logits.argmax(dim=1), nearest)]
        about = {
            "file": self.network.file,
            "classes": train.n_classes,
            "accuracy": right[0],
            "accuracy_fisher_rao": right[1],
            "train_images": len(train),
            "test_images": len(test),
            "layers": [[layer, int(value.shape[1])] for layer, value in train.features.items()],
            "notes": [f"{part}: {images.note}" for part, images in sets.items() if images.note],
            "diagnostics": {
                layer: {name: value if math.isfinite(value) else None for name, value in asdict(checks).items()}
                for layer, checks in diagnose(train).items()
            },
        }
        self.results.networks.append({**asked, **about})

    def _asked(self, cell: Cell) -> Record:
        """Everything that a cell's numbers depend on, but for the code; a tuning for all OOD sets has none."""
        sets = {"train": (self.own, "train"), "test": (self.own, "test")}
        sets |= {"ood": (cell.ood, "test")} if cell.ood else {}
        sets |= {"validation": (cell.validation, "validation")} if cell.validation not in UNNAMED else {}
        digests = {part: self._set(*where).digest[:16] for part, where in sets.items()}
        rules = {"tpr": TPR, "schema": SCHEMA, "rules": RULES}
        return {**self.network.about, **asdict(cell), **rules, "data": digests, **self._how(cell)}

    def _how(self, cell: Cell) -> Record:
        """What of the plan a cell's numbers depend on, where it is not the usual."""
        method = METHODS[cell.method]
        is_tuned = bool(method.tunes) and cell.validation != NO_VALIDATION
        parts = {
            "limit": cell.setting in STEPS,
            "attacked": cell.validation == "fgsm",
            "search": is_tuned and self.plan.search != "sweep" and "temperature" in method.options,
        }
        how = {name: getattr(self.plan, name) for name, matters in parts.items() if matters}
        options = self.plan.options_of(cell.method)
        return {**how, "options": options} if options else how

    def measure(self, cell: Cell) -> Record:
        """The cell's record: from the results, or measured and put there."""
        asked = self._asked(cell)
        known = self.results.cells.find(asked)
        if known is not None:
            return known
        for name, what in {cell.validation: "was tuned on", self.own: "the network was trained on"}.items():
            shared = 0 if name in UNNAMED else len(self._contents(name) & self._contents(cell.ood))
            if shared:
                problem = f"{shared} images of {cell.ood} are also in {name}, which {what}"
                raise InputError(problem, argument="ood", cure="leave them out")
        scorer, tuning = self._tune(cell)
        tensors: dict[str, Tensor] = {}
        for side, name in (("id", self.own), ("ood", cell.ood)):
            (outputs,) = self._seen(cell, scorer, (tuning["epsilon"],), name, tune=False)
            images = self._set(name, "test")[self._rows(cell, name, tune=False)]
            tensors |= {f"{side}{end}": tensor for end, tensor in _scored(scorer, outputs, images).items()}
        path = self.results.folder / "scores" / f"{key_of(asked)}.safetensors"
        write_record(path, {"kind": "scores", "cell": asdict(cell), "columns": scorer.term_names}, tensors)
        metrics = evaluate(tensors["id"], tensors["ood"], TPR)
        measured = {
            "file": self.network.file,
            "id_images": len(tensors["id"]),
            "ood_images": len(tensors["ood"]),
            "tnr": metrics.tnr_at_tpr,
            "auroc": metrics.auroc,
            "aupr": metrics.aupr,
            "temperature": tuning["temperature"],
            "epsilon": tuning["epsilon"],
            "scores": path.name,
            "igeood": __version__,
            "torch": torch.__version__,
        }
        return self.results.cells.append({**asked, **measured})

    def _rows(self, cell: Cell, name: str, part: str = "test", *, tune: bool = True) -> Rows:
        """Rows of a set that a cell is tuned on, or else measured on: halves of a set that it is both."""
        rows = np.arange(len(self._set(name, part)))
        if (name == self.own or cell.validation == "own") and cell.setting != "untuned":
            rows = halves(len(rows), cell.seed)[0 if tune else 1]
        most = self.plan.limit or 2 * len(rows)
        most = max(most // 2, FEWEST_TUNED) if tune else most
        if cell.setting in STEPS and most < len(rows):  # the network runs anew
            rows = rows[np.linspace(0, len(rows) - 1, most).round().astype(np.int64)]
        return rows

    def _seen(
        self, cell: Cell, scorer: Detector, epsilons: Sequence[float], name: str, part: str = "test", tune: bool = True
    ) -> list[Outputs]:
        """Outputs of a set's images as the setting sees them, for each size of the input step."""
        images = self._set(name, part)
        rows = self._rows(cell, name, part, tune=tune)
        if cell.setting in STEPS and any(epsilons):
            return self.observer.stepped(images[rows], scorer, self._set(self.own, "train").digest, epsilons)
        return [self.observer.outputs(images, scorer.needs, part)[torch.from_numpy(rows)]] * len(epsilons)

    def _tune(self, cell: Cell) -> tuple[Detector, Record]:
        """The cell's detector, ready to score, and how it was tuned: as `Guard.tune` does it.

        Cells that differ in the OOD set only share it, unless they are tuned on that set.
        """
        cell = replace(cell, ood=cell.ood if cell.validation == "own" else "")
        if cell not in self._tuned:
            scorer, summary = self._fit(cell.method)
            is_grey = cell.setting == "grey-box"
            tuning: Record | None = None
            epsilon = GREY_EPSILON if is_grey else 0.0
            if is_grey and cell.method == DECONF:
                tuning = self._tune_on_id(cell, scorer)
            elif cell.validation != NO_VALIDATION and METHODS[cell.method].tunes:
                validation = _Validation(self, cell)
                scorer, found = tune_detector(
                    scorer,
                    summary,
                    validation.read,
                    STEPS.get(cell.setting, (0.0,)),
                    epsilon=epsilon,
                    tpr=TPR,
                    seed=cell.seed,
                    search=self._search(cell, scorer),
                    progress=None,
                )
                tuning = {**asdict(found), "attack": validation.attack}
            epsilon = epsilon if tuning is None else tuning["epsilon"]
            asked = self._asked(cell)
            chosen = {"temperature": scorer.params().get("temperature"), "epsilon": epsilon}
            record = {**asked, **chosen, "tuning": tuning}
            self._tuned = {cell: (scorer, record)}
            if self.results.tunings.find(asked) is None:
                self.results.tunings.append(record)
        return self._tuned[cell]

    def _search(self, cell: Cell, scorer: Detector) -> Search | None:
        """How the temperature is sought. Adversarial samples fool the output: they say nothing of a part's."""
        if cell.validation == "fgsm" and scorer.softmax is not scorer:
            return None
        return sweep if self.plan.search == "sweep" else partial(bayes.search, seed=cell.seed)

    def _tune_on_id(self, cell: Cell, scorer: Detector) -> Record:
        """DeConf-C's choice: the input step after which the mean score of in-distribution samples is lowest."""
        outputs = self._seen(cell, scorer, DECONF_EPSILONS, self.own)
        means = [float(scorer.score(each).mean()) for each in outputs]
        steps = [{"epsilon": size, "mean_score": mean} for size, mean in zip(DECONF_EPSILONS, means, strict=True)]
        lowest = min(steps, key=lambda step: (step["mean_score"], step["epsilon"]))
        return {"epsilon": lowest["epsilon"], "n_id": len(outputs[0]), "steps": steps}

    def _fit(self, method: str) -> tuple[Detector, Summary]:
        """A method's detector, fitted once for all cells that follow."""
        if method not in self._learnt:
            needs = METHODS[method].needs
            summary = Summary.of(self.observer.outputs(self._set(self.own, "train"), needs, "train"), needs)
            summary.head = self.observer.head(needs)
            fitted = detector(method, **self.plan.options_of(method)).learn(summary)
            share(fitted)
            self._learnt = {method: (fitted, summary)}
        return self._learnt[method]

    def validation(
        self, cell: Cell, scorer: Detector, epsilons: Sequence[float]
    ) -> tuple[list[Outputs], list[Outputs], Record | None]:
        """Outputs to tune on: in-distribution, and adversarial ones, of the OOD set itself, or of a named set."""
        see = partial(self._seen, cell, scorer, epsilons)
        if cell.validation == "fgsm":
            images = self._set(self.own, "test")[self._rows(cell, self.own)]
            train = self._set(self.own, "train")
            images = train.limited(len(images)) if self.plan.attacked == "train" else images
            return see(self.own), *self.observer.attacked(images, scorer, train.digest, ATTACK, epsilons)
        return see(self.own), see(cell.ood) if cell.validation == "own" else see(cell.validation, "validation"), None


class _Validation:
    """A cell's validation samples, as `tune_detector` reads them; `attack` is what adversarial ones did."""

    def __init__(self, bench: _Bench, cell: Cell) -> None:
        self.bench = bench
        self.cell = cell
        self.attack: Record | None = None

    def read(self, detector: Detector, epsilons: Sequence[float]) -> tuple[list[Outputs], list[Outputs]]:
        """In-distribution and OOD outputs for each size of the input step."""
        id_outputs, ood_outputs, self.attack = self.bench.validation(self.cell, detector, epsilons)
        return id_outputs, ood_outputs


def share(fitted: Detector) -> None:
    """Let cells share what they all compute: the way to a temperature, and the layers' terms of a batch."""
    if fitted.softmax is not None:
        fitted.softmax.at_temperature = cache(fitted.softmax.at_temperature)  # type: ignore[method-assign]
    for part in fitted.parts.values() if isinstance(fitted, Weighted) else ():
        if isinstance(part, LayerDetector):  # of others the terms may be many, or quickly computed
            part.terms = _remembered(part)  # type: ignore[assignment, method-assign]


def _remembered(part: LayerDetector) -> Callable[[Outputs], Tensor]:
    """Terms of a fitted part that are kept by the content of the batch."""
    compute = part.terms
    known: dict[str, Tensor] = {}

    def terms(outputs: Outputs) -> Tensor:
        if torch.is_grad_enabled():
            return compute(outputs)
        content = digest({}, outputs.only(part.widths_).features)
        if content not in known:
            known[content] = compute(outputs)
        return known[content]

    return terms


def _scored(scorer: Detector, outputs: Outputs, images: datasets.ImageSet) -> dict[str, Tensor]:
    """Scores, their parts, and the images with extreme scores; each by the end of its name."""
    parts = scorer.terms(outputs)
    scores = parts.sum(dim=1)
    tensors = {"": scores, "_parts": parts.float()}
    order = scores.argsort(descending=True, stable=True)
    for which, rows in (("most", order[:EXTREMES]), ("least", order.flip(0)[:EXTREMES])):
        tensors |= {f"_{which}_rows": rows.clone(), f"_{which}": torch.from_numpy(images[rows.numpy()].images())}
    return tensors
