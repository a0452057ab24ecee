"""Which cells a benchmark has, from what it is asked to run."""

import itertools
from collections.abc import Iterator
from dataclasses import dataclass

from igeood.bench import datasets
from igeood.detectors import METHODS
from igeood.errors import InputError

PAPER = ("black-box", "grey-box", "white-box", "white-box-fgsm")
SETTINGS = (*PAPER, "white-box-validation", "untuned")
GREY = ("odin", "energy", "igeood-logits", "deconf-c")  # those that the paper gives an input step
NO_VALIDATION = "none"
TPR = 0.95  # the operating point
ATTACK = 0.05  # size of adversarial samples, in pixel units
# other settings: a named set, or none
TUNED_ON = {"white-box": ("own",), "white-box-fgsm": ("fgsm",), "untuned": (NO_VALIDATION,)}


@dataclass(frozen=True)
class Plan:
    """What to run.

    Attributes
    ----------
    ood : tuple of str
        OOD data sets to measure on.
    settings : tuple of str
        Of `SETTINGS`. The white box is tuned on samples of the OOD set that it is measured on, as in the paper; that
        of `white-box-fgsm` on adversarial samples, that of `white-box-validation` as black and grey box are. In
        `untuned` every method is measured as it is, on all test images.
    methods : tuple of str
        Of `igeood.METHODS`; empty: all that a setting has. Those that are not tuned are then left out of the white box.
    validation : tuple of str
        OOD data sets to tune the black and the grey box on, each in turn; empty: they keep their defaults.
    limit : int or None
        Images of each kind that the grey box sees, which runs the network anew for each method.
    images : int or None
        Of each test set at most, evenly spaced.
    train : int or None
        Training images at most, evenly spaced.
    splits : int
        Random splits of the white box tuned on OOD samples, which are averaged in the tables.
    seed : int
        Of the first split.
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

    def __post_init__(self) -> None:
        for name, known in (("settings", SETTINGS), ("methods", METHODS)):
            for value in getattr(self, name):
                if value not in known:
                    raise InputError.unknown(name, value, known)
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
    if method.needs_layers:
        return setting.startswith("white-box") and (is_named or bool(method.tunes))
    return setting == "black-box" or (setting == "grey-box" and name in GREY)


def cells(plan: Plan, in_distribution: str) -> Iterator[Cell]:
    """All cells of a network in the order in which they are run."""
    for setting, method in itertools.product(plan.settings, plan.methods or METHODS):
        if not _suits(setting, method, is_named=bool(plan.methods)):
            continue
        splits = plan.splits if setting == "white-box" else 1
        for validation in TUNED_ON.get(setting) or plan.validation or (NO_VALIDATION,):
            for ood, split in itertools.product(plan.ood, range(splits)):
                if ood not in (validation, in_distribution):
                    yield Cell(setting, method, validation, ood, plan.seed + split)
