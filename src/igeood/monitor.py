"""Tells when a stream of inputs is no longer like the calibration samples: an e-detector on a guard's scores.

An input's score falls into one of the n+1 gaps between the n calibration scores; ties are broken by seeded numbers.
While inputs are exchangeable with the calibration samples, the t-th one falls into a set G of gaps, given all before,
with probability π = (|G| + earlier inputs in G) / (n + t): Pólya's urn, exact for a finite calibration set. For bets ε
and sets G of the gaps with p-values of at most ℓ,

    L = 1 − ε + ε·1{in G}/π,    M ← L·(M + 1),    M₀ = 0    (Shiryaev–Roberts)

so that E[L | past] = 1 and M_t − t is a martingale. The evidence is the mean of M over all ε and ℓ.
"""

import json
import logging
import math
import os
from functools import cached_property
from pathlib import Path
from typing import Any, Literal, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray

from igeood.calibration import Calibration
from igeood.errors import GuardFileError, InputError, NotReadyError
from igeood.files import digest, write_whole
from igeood.guard import Guard, Verdict
from igeood.metrics import exact_fraction

log = logging.getLogger("igeood")

Kind = Literal["p-values", "flags"]
KINDS = ("p-values", "flags")
BETS = np.array([0.01, 0.03, 0.1, 0.3, 0.9])
LEVELS = (0.01, 0.05, 0.2)
ENOUGH = 1000  # calibration samples: with fewer, drift that is there from the start is partly learnt as normal
BLOCK = 512  # inputs that are taken together; an alarm ends a block
SHOWN = 100  # alarms that are kept
FORMAT = "igeood monitor 1"
_COUNTS, _ARRAYS = ("inputs", "unread", "alarm_count"), ("hits", "wealth", "likelihood", "start")
# What a float32 model's rounding, which differs from batch to batch, may change in a score: a share of it, and where it
# is about 0. Inputs that come again are tied by it, whatever they are judged with.
_ROUNDING, _SMALLEST = 1e-5, 1e-8
_OFF_GRID = 0.381966  # a score of 0 does not lie between two cells


class Alarm(NamedTuple):
    """The evidence reached the run length at input `at`; the change began most likely at input `since`, from 0."""

    at: int
    since: int
    evidence: float


class Monitor:
    """Watches a guard's verdicts, in their order, for a change of the inputs. Its state is a handful of numbers.

    Parameters
    ----------
    guard : Guard or Calibration
        Calibrated, with 1,000 samples or more.
    run_length : float
        Inputs that pass at least, on average, before a false alarm.
    kind : {"p-values", "flags"}
        What is watched: the places of scores among the calibration scores; or how many inputs are refused, which also
        finds a drift that is there from the first input. It needs a threshold with `guarantee="tolerance"`.
    seed : int
        Of the numbers that break ties.

    Attributes
    ----------
    inputs, unread : int
        Inputs so far, and those of them that could not be read, which are no evidence.
    alarms : list of Alarm
        The first hundred since the start or `acknowledge`.
    alarm_count : int
        All alarms, also those that were acknowledged.
    """

    def __init__(
        self, guard: Guard | Calibration, run_length: float = 1_000_000, kind: Kind = "p-values", *, seed: int = 0
    ) -> None:
        calibration = _calibration(guard)
        if kind not in KINDS:
            raise InputError.unknown("kind", kind, KINDS)
        is_number = isinstance(run_length, (int, float, np.number)) and not isinstance(run_length, bool)
        if not (is_number and 1 <= run_length < math.inf):
            raise InputError(f"run_length: expected a number of inputs, at least 1; got {run_length!r}")
        if isinstance(seed, bool) or not isinstance(seed, (int, np.integer)) or not 0 <= seed < 1 << 64:
            raise InputError(f"seed: expected an integer from 0 to 2⁶⁴ − 1; got {seed!r}")
        self.calibration, self.run_length, self.kind, self.seed = calibration, float(run_length), kind, int(seed)
        self._n = len(calibration.scores)
        shares = [exact_fraction(level, "level") for level in LEVELS]
        self._sizes = np.array([int(share * (self._n + 1)) for share in shares if share * (self._n + 1) >= 1])
        if kind == "flags":
            self._check_flags()
        elif not len(self._sizes):
            raise InputError(f"guard: {self._n} calibration samples are too few to watch; calibrate with more")
        elif self._n < ENOUGH:
            problem = f"with {self._n} calibration samples, drift from the first input on is partly learnt as normal"
            log.warning("monitor: %s; calibrate with %s or more, or watch flags", problem, f"{ENOUGH:,}")
        self._cells, places = np.unique(_in_cells(_numpy(calibration.scores)), return_inverse=True)
        self._breakers = np.sort(places + _draws(self.seed, 0, 0, self._n))  # each score's cell, and its tie-breaker
        self.inputs = self.unread = self.alarm_count = self._read = 0
        self.alarms: list[Alarm] = []
        self._hits = np.zeros(len(self._sizes), dtype=np.int64)
        self._wealth = np.zeros((len(self._sizes), len(BETS)))  # M
        self._likelihood = np.zeros_like(self._wealth)  # of a change at `_start`, the most likely one of each bet
        self._start = np.zeros(self._wealth.shape, dtype=np.int64)

    def _check_flags(self) -> None:
        if self.calibration.guarantee != "tolerance":
            problem = "kind: 'flags' needs a threshold whose rate of false flags is known"
            raise InputError(f"{problem}; calibrate with guarantee='tolerance', or watch kind='p-values'")
        self._sizes = np.ones(1, dtype=np.int64)  # one set: the refused

    @cached_property
    def _identity(self) -> str:
        return _fingerprint(self.calibration)

    def is_like(self, other: "Monitor") -> bool:
        """Whether the other one watches a guard of the same calibration."""
        return self._identity == other._identity

    @property
    def evidence(self) -> float:
        """Mean of M: on average the number of inputs while nothing has changed; large after a change."""
        return float(self._wealth.mean())

    @property
    def alarm(self) -> bool:
        """Whether there was an alarm since the start, or since `acknowledge`."""
        return bool(self.alarms)

    @property
    def since(self) -> int | None:
        """The input, from 0, at which the change most likely began, by the first alarm; None without an alarm."""
        return self.alarms[0].since if self.alarms else None

    @property
    def promise(self) -> str:
        """What an alarm promises, in a sentence."""
        length = f"{self.run_length:,.0f}"
        text = f"at least {length} in-distribution inputs pass on average before a false alarm, and the chance of one "
        text += f"among the first T inputs is at most T / {length}"
        if self.calibration.trained_on:
            return self.calibration.promise
        if self.kind == "flags":
            return f"with {100 * self.calibration.confidence:.4g}% confidence, {text}"
        return f"{text}, on average over calibration sets of {self._n}"

    def update(self, verdict: Verdict) -> NDArray[np.float64]:
        """Take in a verdict, row by row; return the evidence (N,) after each row.

        Where the evidence reaches the run length there is an alarm, and it starts again from 0. Rows that could not be
        read are counted, and are no evidence.
        """
        if not isinstance(verdict, Verdict):
            given = type(verdict).__name__
            raise InputError(f"verdict: expected a Verdict, got {given}; give what predict returns, or a slice of it")
        is_read = verdict.is_read
        rows = np.flatnonzero(is_read)
        is_flags = self.kind == "flags"
        hits = _numpy(verdict.is_ood)[rows, None] if is_flags else self._in_sets(_numpy(verdict.score)[rows])
        parts, done, before = [np.empty(0)], 0, self.evidence
        while done < len(rows):
            part = slice(done, done + BLOCK)
            parts.append(self._advance(hits[part], self.inputs + rows[part]))
            done += len(parts[-1])
        self.inputs, self.unread = self.inputs + len(verdict), self.unread + len(verdict) - len(rows)
        evidence = np.append(np.concatenate(parts), before)[np.cumsum(is_read) - 1]  # of the last row that was read
        return np.where(is_read | (evidence < self.run_length), evidence, 0.0)  # it started again before an unread row

    def acknowledge(self) -> None:
        """Forget the alarms. The urn's counts stay: what came before is part of what is usual."""
        self.alarms = []

    def _in_sets(self, scores: NDArray[Any]) -> NDArray[np.bool_]:
        """(T, V) whether each score is in the gaps of each level: few calibration scores are above it."""
        if np.isnan(scores).any():
            raise InputError("verdict: a score is NaN; give verdicts of this guard")
        cells = _in_cells(scores)
        places = np.searchsorted(self._cells, cells)
        is_tied = np.append(self._cells, np.nan)[places] == cells
        draws = _draws(self.seed, 1, self._read, len(scores))
        above = self._n - np.searchsorted(self._breakers, places + np.where(is_tied, draws, 0.0))
        return np.asarray(above[:, None] < self._sizes)

    def _advance(self, hits: NDArray[np.bool_], numbers: NDArray[Any]) -> NDArray[np.float64]:
        """Take in the sets (T, V) that inputs fell into, up to the first alarm; return the evidence after each."""
        null: Any = 1.0 - self.calibration.tpr
        if self.kind == "p-values":
            earlier = self._hits + np.cumsum(hits, axis=0) - hits
            null = (self._sizes + earlier) / (self._n + 1.0 + self._read + np.arange(len(hits)))[:, None]
        product = np.cumsum(np.log(1.0 - BETS + BETS * (hits / null)[:, :, None]), axis=0)  # (T, V, E) of log L
        starts = -np.append(np.zeros_like(product[:1]), product[:-1], axis=0)  # a change at t has the factors from t on
        with np.errstate(divide="ignore", over="ignore"):  # past an alarm M may be huge
            sums = np.logaddexp.accumulate(np.append(np.log(self._wealth)[None], starts, axis=0), axis=0)[1:]
            wealth = np.exp(product + sums)
            likelihood = np.append(np.log(self._likelihood)[None], starts, axis=0)
            evidence = wealth.mean(axis=(1, 2))
        is_alarm = evidence >= self.run_length
        last = int(np.argmax(is_alarm)) if is_alarm.any() else len(hits) - 1
        best = likelihood[: last + 2].argmax(axis=0)  # 0 is the start so far
        self._start = np.where(best == 0, self._start, numbers[best - 1])
        self._likelihood = np.exp(product[last] + likelihood[: last + 2].max(axis=0))
        self._wealth, self._hits = wealth[last], self._hits + hits[: last + 1].sum(axis=0)
        self._read += last + 1
        if is_alarm[last]:
            self.alarm_count += 1
            self.alarms = [*self.alarms, Alarm(int(numbers[last]), self._likely_start(), float(evidence[last]))][:SHOWN]
            self._wealth, self._likelihood = np.zeros_like(self._wealth), np.zeros_like(self._wealth)
        return np.asarray(evidence[: last + 1])

    def _likely_start(self) -> int:
        return int(self._start.flat[self._likelihood.argmax()])

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write the state to a JSON file, which appears whole."""
        write_whole(path, self.state())

    def state(self) -> bytes:
        """What `save` writes."""
        state: dict[str, Any] = {name: getattr(self, name) for name in ("run_length", "kind", "seed", *_COUNTS)}
        state |= {name: getattr(self, f"_{name}").tolist() for name in _ARRAYS}
        state |= {"format": FORMAT, "guard": self._identity, "alarms": [*map(list, self.alarms)]}
        return f"{json.dumps(state)}\n".encode()

    @classmethod
    def load(cls, path: str | os.PathLike[str], guard: Guard | Calibration) -> "Monitor":
        """Read what `save` wrote; it must be of this guard, as it was calibrated then."""
        calibration = _calibration(guard)
        try:
            state = json.loads(Path(path).read_bytes())
            is_known, is_of_guard = state["format"] == FORMAT, state["guard"] == _fingerprint(calibration)
            if is_known and is_of_guard:
                monitor = cls(calibration, state["run_length"], state["kind"], seed=state["seed"])
                monitor._restore(state)
                return monitor
        except (ValueError, KeyError, TypeError, OverflowError, RecursionError) as error:
            problem = f"is damaged, or no monitor's state ({type(error).__name__})"
            raise GuardFileError(f"path: {path} {problem}; start a new monitor") from None
        if not is_known:
            raise GuardFileError(f"path: {path} was written by another version of igeood; start a new monitor")
        problem = "is the state of a monitor of another guard, or of another calibration"
        raise InputError(f"path: {path} {problem}; give that guard, or start a new monitor in another file")

    def _restore(self, state: dict[str, Any]) -> None:
        for name in _COUNTS:
            setattr(self, name, int(state[name]))
        for name in _ARRAYS:
            old, new = getattr(self, f"_{name}"), np.array(state[name])
            if new.shape != old.shape or not np.isfinite(new).all() or (new < 0).any():
                raise ValueError(name)
            setattr(self, f"_{name}", new.astype(old.dtype))
        self._read = self.inputs - self.unread
        if not 0 <= self.unread <= self.inputs or self.alarm_count < 0:
            raise ValueError("counts")
        self.alarms = [Alarm(int(at), int(since), float(evidence)) for at, since, evidence in state["alarms"]]

    def __repr__(self) -> str:
        state = f"alarm since input {self.since:,}" if self.alarm else "no alarm"
        return f"Monitor({self.kind}: {self.inputs:,} inputs, evidence {self.evidence:.3g}, {state})"


def _calibration(guard: Guard | Calibration) -> Calibration:
    calibration = guard.calibration if isinstance(guard, Guard) else guard
    if calibration is None:
        raise NotReadyError("monitor: no threshold yet; call calibrate with held-out samples first")
    if not isinstance(calibration, Calibration):
        raise InputError(f"guard: expected a Guard or its Calibration, got {type(guard).__name__}; load it first")
    return calibration


def _fingerprint(calibration: Calibration) -> str:
    about = {name: getattr(calibration, name) for name in ("tpr", "guarantee", "confidence")}
    return digest(about, {"scores": calibration.scores.cpu()})


def _numpy(values: Any) -> NDArray[Any]:
    return np.asarray(values.detach().cpu() if isinstance(values, torch.Tensor) else values)


def _in_cells(scores: NDArray[Any]) -> NDArray[np.float64]:
    """Scores on a grid as wide as rounding: those that only rounding sets apart are tied.

    The grid is the same for all guards: one that came from the calibration scores would treat them unlike inputs.
    """
    with np.errstate(over="ignore"):
        steps = np.arcsinh(scores.astype(np.float64) * (_ROUNDING / _SMALLEST)) / _ROUNDING
    return np.floor(steps + _OFF_GRID)


def _draws(seed: int, stream: int, first: int, n: int) -> NDArray[np.float64]:
    """(n,) uniform numbers of a stream from its `first` on: the same, however the stream is cut."""
    bits = np.random.Philox(key=np.array([seed, stream], dtype=np.uint64)).advance(first // 4)  # it makes four at once
    return np.random.Generator(bits).random(first % 4 + n)[first % 4 :]
