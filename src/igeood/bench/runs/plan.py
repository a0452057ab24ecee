"""Which cells a benchmark has, from what it is asked to run."""

from collections.abc import Iterator
from dataclasses import dataclass

from igeood import datasets
from igeood.detectors import METHODS
from igeood.errors import InputError

PAPER = ("black-box", "grey-box", "white-box", "white-box-fgsm")
SETTINGS = (*PAPER, "white-box-validation")
GREY = ("odin", "energy", "igeood-logits")  # those that the paper gives an input step
NO_VALIDATION = "none"


@dataclass(frozen=True)
class Plan:
    """What to run.

    Attributes
    ----------
    ood : tuple of str
        OOD data sets to measure on.
    settings : tuple of str
        Of `SETTINGS`. The white box is tuned on samples of the OOD set that it is measured on, as in the paper; that
        of `white-box-fgsm` on adversarial samples, that of `white-box-validation` as black and grey box are.
    methods : tuple of str
        Of `igeood.METHODS`.
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
    tpr : float
        The operating point.
    attack : float
        Size of the adversarial samples, in pixel units.
    """

    ood: tuple[str, ...]
    settings: tuple[str, ...] = PAPER
    methods: tuple[str, ...] = tuple(METHODS)
    validation: tuple[str, ...] = ()
    limit: int | None = 300
    images: int | None = None
    train: int | None = None
    splits: int = 5
    seed: int = 0
    tpr: float = 0.95
    attack: float = 0.05

    def __post_init__(self) -> None:
        for name, given, known in (("settings", self.settings, SETTINGS), ("methods", self.methods, METHODS)):
            for value in given:
                if value not in known:
                    raise InputError.unknown(name, value, known)
        if not self.ood:
            raise InputError("ood: name at least one OOD data set to measure on")
        for name in ("ood", "validation"):  # one name for one set, however its path is spelt
            object.__setattr__(self, name, tuple(dict.fromkeys(map(datasets.canonical, getattr(self, name)))))
        for name in ("limit", "images", "train", "splits"):
            value = getattr(self, name)
            if value is not None and value < 1:
                raise InputError(f"{name}: must be at least 1, got {value}")


@dataclass(frozen=True)
class Cell:
    """One number of a table: see the module's text."""

    setting: str
    method: str
    validation: str
    ood: str
    seed: int


def cells(plan: Plan, in_distribution: str) -> Iterator[Cell]:
    """All cells of a network in the order in which they are run."""
    outside = [name for name in plan.ood if name != in_distribution]
    for setting in plan.settings:
        for method in plan.methods:
            white = setting.startswith("white-box")
            if METHODS[method].needs_layers != white or (setting == "grey-box" and method not in GREY):
                continue
            named = {"white-box": ("own",), "white-box-fgsm": ("fgsm",)}
            for validation in named.get(setting, plan.validation or (NO_VALIDATION,)):
                for ood in outside:
                    for split in range(plan.splits if setting == "white-box" else 1):
                        if ood != validation:
                            yield Cell(setting, method, validation, ood, plan.seed + split)
