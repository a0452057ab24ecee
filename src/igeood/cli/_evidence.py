"""A picture of a monitor's evidence."""

import io
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from igeood.errors import MissingExtraError
from igeood.files import write_whole

if TYPE_CHECKING:
    from igeood.monitor import Monitor

POINTS = 2000
_LINE, _ALARM = "#0072B2", "#D55E00"


class Trace:
    """The largest evidence in each of at most 2,000 equally long runs of inputs, however many there are."""

    def __init__(self, first: int) -> None:
        self.first, self._width = first, 1
        self._peaks, self._rest = np.empty(0), np.empty(0)

    def add(self, evidence: NDArray[np.float64]) -> None:
        """Take in the evidence after each of some inputs."""
        self._cut(np.append(self._rest, evidence))
        while len(self._peaks) > POINTS:
            pairs = len(self._peaks) // 2 * 2
            last = np.repeat(self._peaks[pairs:], self._width)
            self._peaks, self._width = self._peaks[:pairs].reshape(-1, 2).max(axis=1), 2 * self._width
            self._cut(np.append(last, self._rest))

    def _cut(self, rest: NDArray[np.float64]) -> None:
        whole = len(rest) // self._width * self._width
        self._peaks = np.append(self._peaks, rest[:whole].reshape(-1, self._width).max(axis=1))
        self._rest = rest[whole:]

    def points(self) -> tuple[NDArray[Any], NDArray[np.float64]]:
        """The number of each run's last input, and the largest evidence in it."""
        peaks = np.append(self._peaks, self._rest.max()) if len(self._rest) else self._peaks
        return self.first + self._width * (1 + np.arange(len(peaks))) - 1, peaks
