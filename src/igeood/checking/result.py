"""What a check found: tables, plain values, advice."""

import math
import os
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor

from igeood.calibration import Calibration
from igeood.checking.faults import Usual
from igeood.errors import Finding, import_extra
from igeood.terminal import aligned

WORST = 5  # classes in a text
FEW = 20  # samples of which nothing is said
MANY = 0.1  # of the samples: a fault that changes or refuses so many does harm
SILENT = 0.03  # so many silent failures are named; a fault that is caught has fewer


@dataclass(frozen=True)
class Share:
    """How many of n samples are kept, with an exact interval; `below` says that all of it is below the promise."""

    name: str
    n: int
    kept: float
    low: float
    high: float
    below: bool


@dataclass(frozen=True, eq=False)
class Example:
    """One sample: its input, the classifier's answer and how sure it is, the verdict, and what of it is rare."""

    x: Tensor
    answer: str
    confidence: float
    p_value: float
    is_ood: bool
    reason: str


@dataclass(frozen=True, eq=False)
class FaultResult:
    """What a fault does to n samples.

    Attributes
    ----------
    refused, changed, silent : float
        Shares of samples: refused by the guard; with another answer of the classifier than on the clean input; and
        those that are changed and kept. NaN if the fault could not be tried.
    before, after : Example, optional
        One sample without and with the fault, a silent failure if there is any.
    problem : str
        Why the fault could not be tried.
    """

    name: str
    n: int
    refused: float = math.nan
    changed: float = math.nan
    silent: float = math.nan
    before: Example | None = None
    after: Example | None = None
    problem: str = ""


@dataclass(frozen=True, eq=False)
class OodResult:
    """What is refused of n samples of an OOD set, the AUROC, and its least and most surprising samples."""

    name: str
    n: int
    refused: float
    auroc: float
    least: list[Example]
    most: list[Example]


@dataclass(frozen=True, eq=False, repr=False)
class Check:
    """What a guard keeps of held-out samples, and what it catches of faults and of OOD samples.

    Attributes
    ----------
    promise : str
        The guard's.
    tpr : float
        The share of known inputs that it promises to keep.
    kept : Share
        Of all held-out samples.
    by_true, by_predicted : list of Share
        Of each class, the smallest upper end of the interval first: by the samples' labels, where they have some, and
        by the answers.
    accuracy : float or None
        The share of right answers, where there are labels.
    left_out, unread : int
        Held-out samples that fit, tune or calibrate has seen, which are not counted; and those that could not be read.
    faults : list of FaultResult
        In the order of the catalogue.
    no_faults : str
        Why there are none.
    ood : list of OodResult
        In the order given.
    """

    promise: str
    tpr: float
    kept: Share
    by_true: list[Share]
    by_predicted: list[Share]
    accuracy: float | None
    left_out: int
    unread: int
    faults: list[FaultResult]
    no_faults: str
    ood: list[OodResult]
    calibration: Calibration
    guard: str = ""
    usual: Usual | None = None
    decode: Callable[[Tensor], str] | None = None
    findings: list[Finding] = field(default_factory=list)

    @property
    def advice(self) -> list[str]:
        """At most three sentences: what it catches, what it misses, what would help."""
        tried = [one for one in self.faults if not one.problem and one.n >= FEW]
        return [*_of_classes(self), *_of_silent(tried), *_of_sets(self.ood), *_of_caught(tried)][:3]

    def rows(self) -> list[dict[str, Any]]:
        """One plain dict for each class, fault and OOD set."""
        parts: dict[str, Sequence[Any]] = {"held out": [self.kept], "class": self.by_true, "answer": self.by_predicted}
        parts |= {"fault": self.faults, "ood": self.ood}
        return [{"what": what, **_plain(vars(each))} for what, results in parts.items() for each in results]

    def to_dict(self) -> dict[str, Any]:
        """All figures as plain values."""
        own = ("promise", "tpr", "accuracy", "left_out", "unread", "no_faults", "advice")
        rows = [{n: None if v != v else v for n, v in row.items()} for row in self.rows()]  # noqa: PLR0124 (no NaN in JSON)
        return {**{name: getattr(self, name) for name in own}, "rows": rows}

    def to_pandas(self) -> Any:
        """A pandas DataFrame with a row for each class, fault and OOD set."""
        import pandas  # noqa: PLC0415 (whoever asks for it has it)

        return pandas.DataFrame(self.rows()).set_index(["what", "name"])

    def report(self, path: str | os.PathLike[str], *, verdicts: Sequence[str] = ()) -> None:
        """Write one HTML page that needs no other file and no network (extra `report`).

        `verdicts` are files that `igeood score` wrote with this guard, for a monitor to watch in their order.
        """
        import_extra("igeood.checking.report", "report").write(self, path, verdicts)

    def __repr__(self) -> str:
        """Tables of what is kept, of faults and of OOD sets, and the advice."""
        return "\n".join(_tables(self))


def _plain(values: dict[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in values.items() if isinstance(value, (str, int, float))}


def percent(share: float) -> str:
    """A share in words: two digits are enough of what few samples show.

    >>> percent(0.123), percent(0.9996), percent(1.0)
    ('12%', '99.9%', '100%')
    """
    if 0.99 < share < 1.0:
        return f"{math.floor(1000 * share) / 10:g}%"
    if 0.0 < share < 0.001:
        return "<0.1%"
    return f"{100 * share:.0f}%" if share >= 0.01 or share == 0.0 else f"{100 * share:.1f}%"


def _first(names: Sequence[str]) -> str:
    """The first three names, and how many others there are."""
    return ", ".join(names[:3]) + (f" and {len(names) - 3} more" if len(names) > 3 else "")


def _of_classes(check: Check) -> Iterable[str]:
    below = [share for share in check.by_predicted if share.below]
    if check.kept.below:
        yield (
            f"Only {percent(check.kept.kept)} of the held-out samples are kept, and {100 * check.tpr:.4g}% are "
            "promised: do they come from the same source as the calibration samples?"
        )
    elif below:
        names = _first([share.name for share in below])
        has_own = check.calibration.per_class
        own = "calibrate(..., per_class=True) gives each class its own threshold"
        help_ = "calibrate with more samples of them" if has_own else own
        yield (f"Inputs that are taken for {names} are kept less often than {100 * check.tpr:.4g}%: {help_}.")


def _of_silent(faults: list[FaultResult]) -> Iterable[str]:
    silent = sorted((one for one in faults if one.silent >= SILENT), key=lambda one: -one.silent)
    if silent:
        names = _first([f"{one.name} ({percent(one.silent)})" for one in silent])
        yield (
            f"Silent failures, another answer that is kept, come with {names}: test for these before the "
            "classifier, or give such inputs to tune a probe."
        )


def _of_caught(faults: list[FaultResult]) -> Iterable[str]:
    harmful = [one for one in faults if one.changed >= MANY or one.refused >= 1.0 - MANY]
    caught = [one.name for one in harmful if one.silent < min(SILENT, MANY * max(one.changed, MANY))]
    if caught:
        few = f"fewer than {percent(SILENT)}"
        yield f"It catches {_first(caught)}: {few} of these inputs get another answer and are kept."


def _of_sets(sets: list[OodResult]) -> Iterable[str]:
    missed = [one for one in sets if one.refused < 0.5]
    if missed:
        worst = min(missed, key=lambda one: one.refused)
        yield (
            f"{percent(1.0 - worst.refused)} of {worst.name} are kept: igeood.compare shows whether another method "
            "refuses more, and tune with a probe learns from such samples."
        )


def _tables(check: Check) -> Iterable[str]:
    kept = check.kept
    lost = f"; {check.left_out} that were seen before are left out" if check.left_out else ""
    unread = f"; {check.unread} could not be read" if check.unread else ""
    interval = f"{percent(kept.low)} to {percent(kept.high)}"
    yield f"Kept {percent(kept.kept)} of {kept.n} held-out samples ({interval}){lost}{unread}."
    yield f"Promise: {check.promise}."
    if check.accuracy is not None:
        yield f"The classifier is right on {percent(check.accuracy)} of them."
    for title, shares in (("class", check.by_true), ("taken for", check.by_predicted)):
        if shares:
            rows = [
                [s.name, str(s.n), percent(s.kept), f"{percent(s.low)} to {percent(s.high)}", "!" * s.below]
                for s in shares
            ]
            yield from ["", *aligned([[title, "n", "kept", "interval", ""], *rows[:WORST]])]
            if len(shares) > WORST:
                yield f"… and {len(shares) - WORST} other classes"
    if check.faults:
        rows = [[f.name, *map(percent, (f.refused, f.changed, f.silent))] for f in check.faults if not f.problem]
        yield from ["", *aligned([["fault", "refused", "changed", "silent"], *rows])]
        yield from (f"{one.name}: {one.problem}" for one in check.faults if one.problem)
    else:
        yield from ["", f"No faults: {check.no_faults}."]
    if check.ood:
        rows = [[one.name, str(one.n), percent(one.refused), f"{one.auroc:.3f}"] for one in check.ood]
        yield from ["", *aligned([["OOD set", "n", "refused", "AUROC"], *rows])]
    yield from ["", *check.advice]
