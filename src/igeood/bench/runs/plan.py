"""Which cells a benchmark has, from what it is asked to run."""

import itertools
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

from igeood.bench import datasets, methods  # noqa: F401 (the laboratory's methods register themselves)
from igeood.detectors import METHODS, detector
from igeood.errors import InputError
from igeood.guard.guard import EPSILONS

PAPER = ("black-box", "grey-box", "white-box", "white-box-fgsm")
WHITE_STEPS = (0.0, 0.0005, 0.001, 0.0015)  # those that the paper's white boxes have found
STEPS = {"grey-box": EPSILONS, "white-box-step": WHITE_STEPS, "white-box-fgsm-step": WHITE_STEPS}  # others have none
SETTINGS = (*PAPER, "white-box-step", "white-box-fgsm-step", "white-box-validation", "untuned")
# those that the paper gives an input step
STEPPED = ("odin", "energy", "igeood-logits", "deconf-c", "mahalanobis", "igeood", "igeood+")
NO_VALIDATION = "none"
RULES = 3  # how cells are tuned and measured: raise it when the same cell gets other numbers
TPR = 0.95  # the operating point
ATTACK = 0.05  # size of adversarial samples, in pixel units
# other settings: a named set, or none
TUNED_ON = {"white-box": ("own",), "white-box-step": ("own",), "untuned": (NO_VALIDATION,)}
TUNED_ON |= {"white-box-fgsm": ("fgsm",), "white-box-fgsm-step": ("fgsm",)}


@dataclass(frozen=True)
class Plan:
    """What to run.

    Attributes
    ----------
    ood : tuple of str
        OOD data sets to measure on.
    settings : tuple of str
        Of `SETTINGS`. The white box is tuned on samples of the OOD set that it is measured on, as in the paper; that
        of `white-box-fgsm` on adversarial samples, that of `white-box-validation` as black and grey box are. Those with
        `-step` also choose the size of the paper's input step. In `untuned` every method is measured as it is, on all
        test images.
    methods : tuple of str
        Of `igeood.METHODS`; empty: all that a setting has. Those that are not tuned are then left out of the white box.
    validation : tuple of str
        OOD data sets to tune the black and the grey box on, each in turn; empty: they keep their defaults.
    limit : int or None
        Images of each kind to measure on, and half as many to tune on, where there is an input step: the network runs
        anew for each method and size.
    images : int or None
        Of each test set at most, evenly spaced.
    train : int or None
        Training images at most, evenly spaced.
    splits : int
        Random splits of the white box tuned on OOD samples, which are averaged in the tables.
    seed : int
        Of the first split.
    search : {"sweep", "bayes"}
        How temperatures are sought: see `igeood.guard.tune.sweep` and `igeood.bench.bayes.search`.
    attacked : {"train", "test"}
        Images that adversarial samples are made from: of the training set, as in the paper, or those of the test set
        that are tuned on.
    options : mapping
        Options of the methods that have them, such as `{"centroid_temperature": 1.0}`.
    """

    ood: tuple[str, ...]
    settings: tuple[str, ...] = PAPER
    methods: tuple[str, ...] = ()
    validation: tuple[str, ...] = ()
    limit: int | None = 300
    images: int | None = None
    train: int | None = None
    splits: int = 5
    seed: int = 0
    search: Literal["sweep", "bayes"] = "sweep"
    attacked: Literal["train", "test"] = "train"
    options: Mapping[str, Any] = field(default_factory=dict)

    def options_of(self, method: str) -> dict[str, Any]:
        """Those of the options that a method has."""
        return {name: value for name, value in self.options.items() if name in METHODS[method].options}

    def __post_init__(self) -> None:
        for name, known in (("settings", SETTINGS), ("methods", METHODS)):
            for value in getattr(self, name):
                if value not in known:
                    raise InputError.unknown(name, value, known)
        for method in self.methods or METHODS:
            detector(method, **self.options_of(method))  # raises for a value that is none, before any network runs
        for option in self.options:
            if not any(self.options_of(method).keys() >= {option} for method in self.methods or METHODS):
                problem = f"no method that is measured has an option {option!r}"
                raise InputError(problem, argument="options", cure="leave it out")
        for name in ("ood", "validation"):  # one name for one set, however its path is spelt
            object.__setattr__(self, name, tuple(dict.fromkeys(map(datasets.canonical, getattr(self, name)))))


@dataclass(frozen=True)
class Cell:
    """One network's method in one setting, tuned on one set and measured on another."""

    setting: str
    method: str
    validation: str
    ood: str
    seed: int


def _suits(setting: str, name: str, *, is_named: bool) -> bool:
    """Whether a method has a place in a setting."""
    method = METHODS[name]
    if setting == "untuned":
        return method.tunes != "only"
    if method.needs.layers == "any" or (setting in STEPS and name not in STEPPED):
        return False
    if name == "deconf-c":
        return setting == "grey-box"
    if method.needs_layers:
        return setting.startswith("white-box") and (is_named or bool(method.tunes))
    return setting in ("black-box", "grey-box")


def cells(plan: Plan, in_distribution: str) -> Iterator[Cell]:
    """All cells of a network in the order in which they are run."""
    for setting, method in itertools.product(plan.settings, plan.methods or METHODS):
        if not _suits(setting, method, is_named=bool(plan.methods)):
            continue
        splits = plan.splits if TUNED_ON.get(setting) == ("own",) else 1
        for validation in TUNED_ON.get(setting) or plan.validation or (NO_VALIDATION,):
            for ood, split in itertools.product(plan.ood, range(splits)):
                if ood not in (validation, in_distribution):
                    yield Cell(setting, method, validation, ood, plan.seed + split)
