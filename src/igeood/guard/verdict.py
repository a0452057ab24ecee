"""What a guard says of samples."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from igeood.calibration import Calibration
from igeood.outputs import Array, as_kind

SHOWN = 5  # rows in a text


class Judgement(NamedTuple):
    """What a guard says of one sample, in plain values; the fields are those of `Verdict`."""

    is_ood: bool
    score: float
    p_value: float
    label: int
    name: str | None
    reason: str | None


@dataclass(frozen=True, eq=False, repr=False)
class Verdict:
    """What a guard says of N samples, in the kind of array that came in.

    A verdict is a sequence: `verdict[3]` and iteration give a `Judgement`, a slice, a mask or indices a `Verdict`.

    Attributes
    ----------
    is_ood : array of bool
        (N,) whether the score is above the threshold.
    score : array
        (N,) higher is more out-of-distribution; infinite where a sample could not be read.
    p_value : array
        (N,) conformal p-value: small is out-of-distribution.
    label : array of int
        (N,) the classifier's own answer, the largest logit of the clean input; −1 where a sample could not be read.
    reason : array of object, or None
        (N,) why a sample could not be read, and None for the others; None if all were read.
    classes : tuple of str, or None
        The classes' names, where the guard knows them.
    """

    is_ood: Array
    score: Array
    p_value: Array
    label: Array
    reason: np.ndarray[Any, Any] | None = None
    classes: tuple[str, ...] | None = None

    @classmethod
    def of(
        cls, score: Tensor, label: Tensor, calibration: Calibration, reasons: Mapping[int, str], *, to_numpy: bool
    ) -> "Verdict":
        """The verdict that scores (N,) and a threshold give; rows that have a reason are out-of-distribution."""
        is_ood, p_value = calibration.look_up(score, label)
        reason = None
        if reasons:
            rows = torch.tensor(list(reasons), device=score.device)
            is_ood[rows] = True
            p_value[rows] = 1.0 / (len(calibration.scores) + 1.0)
            label = label.index_fill(0, rows, -1)
            reason = np.full(len(score), None, dtype=object)
            reason[list(reasons)] = list(reasons.values())
        columns = [as_kind(value, to_numpy) for value in (is_ood, score, p_value, label)]
        return cls(columns[0], columns[1], columns[2], columns[3], reason)

    @property
    def name(self) -> np.ndarray[Any, Any] | None:
        """(N,) the name of each label, where the guard knows the classes' names."""
        if self.classes is None:
            return None
        names = np.array([*self.classes, None], dtype=object)  # the last one for −1
        return np.asarray(names[torch.as_tensor(self.label).cpu().numpy()])

    @property
    def is_read(self) -> np.ndarray[Any, np.dtype[np.bool_]]:
        """(N,) whether each sample could be read."""
        return np.array([True] * len(self) if self.reason is None else [why is None for why in self.reason], dtype=bool)

    def __len__(self) -> int:
        return len(self.is_ood)

    def __getitem__(self, rows: Any) -> Any:
        if isinstance(rows, (int, np.integer)):
            place = range(len(self))[rows]  # raises for a number outside
            return next(iter(self[place : place + 1]))
        columns: dict[str, Any] = {name: value[rows] for name, value in self._columns().items()}
        if self.reason is not None:
            why = self.reason[rows.cpu().numpy() if isinstance(rows, Tensor) else rows]
            columns["reason"] = None if all(one is None for one in why) else why
        return replace(self, **columns)

    def __iter__(self) -> Iterator[Judgement]:
        columns = {"name": [None] * len(self), "reason": [None] * len(self), **self.to_dict()}
        return (Judgement(*values) for values in zip(*(columns[f] for f in Judgement._fields), strict=True))

    def _columns(self) -> dict[str, Array]:
        return {name: getattr(self, name) for name in ("is_ood", "score", "p_value", "label")}

    def to_dict(self) -> dict[str, list[Any]]:
        """Plain lists of N values by name; `name` if the classes have names, `reason` if there are any."""
        columns = {**self._columns(), "name": self.name, "reason": self.reason}
        return {name: value.tolist() for name, value in columns.items() if value is not None}

    def to_pandas(self) -> Any:
        """A pandas DataFrame with a row for each sample."""
        import pandas  # noqa: PLC0415 (whoever asks for it has it)

        return pandas.DataFrame(self.to_dict())

    def __repr__(self) -> str:
        """The counts, and the first rows."""
        unread = len(self) - int(self.is_read.sum())
        lost = f", {unread} not read" if unread else ""
        counts = f"{len(self)} judged, {int(self.is_ood.sum())} out-of-distribution{lost}"
        first = self[:SHOWN].to_dict()
        cells = [[name, *(f"{v:.4g}" if isinstance(v, float) else str(v) for v in vs)] for name, vs in first.items()]
        widths = [max(map(len, column)) for column in cells]
        lines = ["  ".join(f"{v:>{w}}" for v, w in zip(row, widths, strict=True)) for row in zip(*cells, strict=True)]
        more = [f"… {len(self) - SHOWN} more"] if len(self) > SHOWN else []
        return "\n  ".join([f"Verdict({counts})", *lines, *more])
