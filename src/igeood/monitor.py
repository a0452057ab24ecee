"""Tells when a stream of inputs is no longer like the calibration samples: an e-detector on a guard's scores.

An input's score falls into one of the n+1 gaps between the n calibration scores; ties are broken by seeded numbers.
While inputs are exchangeable with the calibration samples, the t-th one falls into a set G of gaps, given all before,
with probability π = (|G| + earlier inputs in G) / (n + t): Pólya's urn, exact for a finite calibration set. For bets ε
and sets G of the gaps with p-values of at most ℓ,

    L = 1 − ε + ε·1{in G}/π,    M ← L·(M + 1),    M₀ = 0    (Shiryaev–Roberts)

so that E[L | past] = 1 and M_t − t is a martingale. The evidence is the mean of M over all ε and ℓ.
"""

import json
import math
import warnings
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray

from igeood.calibration import Calibration, SeededRanks
from igeood.errors import GuardFileError, IgeoodWarning, InputError, NotReadyError
from igeood.files import PathLike, digest, write_whole
from igeood.guard import Guard, Verdict
from igeood.metrics import exact_fraction

Kind = Literal["p-values", "flags"]
KINDS = ("p-values", "flags")
BETS = np.array([0.01, 0.03, 0.1, 0.3, 0.9])
LEVELS = (0.01, 0.05, 0.2)
ENOUGH = 1000  # calibration samples: with fewer, drift that is there from the start is partly learnt as normal
BLOCK = 512  # inputs that are taken together; an alarm ends a block
SHOWN = 100  # alarms that are kept
FORMAT = "igeood monitor 1"
_COUNTS = ("inputs", "unread", "alarm_count")


class Alarm(NamedTuple):
    """The evidence reached the run length at input `at`; the change began most likely at input `since`, from 0."""

    at: int
    since: int
    evidence: float


class Bets:
    """The wealth of every bet ε on each of V sets (Shiryaev–Roberts), and where a change most likely began.

    Attributes
    ----------
    wealth : array
        (V, E) M.
    likelihood, start : array
        (V, E) likelihood ratio of a change at input `start`, the most likely one of each bet.
    """

    def __init__(self, n_sets: int) -> None:
        self.start = np.zeros((n_sets, len(BETS)), dtype=np.int64)
        self.restart()

    def restart(self) -> None:
        """Start again from no wealth."""
        self.wealth = np.zeros(self.start.shape)
        self.likelihood = np.zeros(self.start.shape)

    def advance(self, ratios: NDArray[Any], numbers: NDArray[Any], limit: float) -> NDArray[np.float64]:
        """Take in inputs up to the first at which the evidence reaches the limit; return the evidence after each.

        `ratios` are (T, V) 1{in G}/π, `numbers` (T,) those of the inputs.
        """
        product = np.cumsum(np.log(1.0 - BETS + BETS * ratios[:, :, None]), axis=0)  # (T, V, E) of log L
        starts = -np.append(np.zeros_like(product[:1]), product[:-1], axis=0)  # a change at t has the factors from t on
        with np.errstate(divide="ignore", over="ignore"):  # past the limit M may be huge
            sums = np.logaddexp.accumulate(np.append(np.log(self.wealth)[None], starts, axis=0), axis=0)[1:]
            wealth = np.exp(product + sums)
            likelihood = np.append(np.log(self.likelihood)[None], starts, axis=0)
            evidence = wealth.mean(axis=(1, 2))
        reached = np.flatnonzero(evidence >= limit)
        last = int(reached[0]) if len(reached) else len(ratios) - 1
        best = likelihood[: last + 2].argmax(axis=0)  # 0 is the start so far
        self.start = np.where(best == 0, self.start, numbers[best - 1])
        self.likelihood = np.exp(product[last] + likelihood[: last + 2].max(axis=0))
        self.wealth = wealth[last]
        return np.asarray(evidence[: last + 1])


class Monitor:
    """Watches a guard's verdicts, in their order, for a change of the inputs. Its state is a handful of numbers.

    Parameters
    ----------
    guard : Guard or Calibration
        Calibrated, with 1,000 samples or more.
    run_length : float
        Minimum mean number of inputs before a false alarm.
    kind : {"p-values", "flags"}
        What is watched: the places of scores among the calibration scores; or how many inputs are refused, which also
        finds a drift that is there from the first input. It needs a threshold with `guarantee="tolerance"`.
    seed : int
        Seed of the numbers that break ties.

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
        self.calibration = _calibration(guard)
        if kind not in KINDS:
            raise InputError.unknown("kind", kind, KINDS)
        is_number = isinstance(run_length, (int, float, np.number)) and not isinstance(run_length, bool)
        if not (is_number and 1 <= run_length < math.inf):
            raise InputError(f"expected a number of inputs, at least 1; got {run_length!r}", argument="run_length")
        if isinstance(seed, bool) or not isinstance(seed, (int, np.integer)) or not 0 <= seed < 1 << 64:
            raise InputError(f"expected an integer from 0 to 2⁶⁴ − 1; got {seed!r}", argument="seed")
        self.run_length = float(run_length)
        self.kind = kind
        self.seed = int(seed)
        self._n = len(self.calibration.scores)
        self._sizes = self._set_sizes()
        self._ranks = SeededRanks(_numpy(self.calibration.scores), self.seed)
        self.inputs = self.unread = self.alarm_count = 0
        self.alarms: list[Alarm] = []
        self._hits = np.zeros(len(self._sizes), dtype=np.int64)  # of each set, so far
        self._bets = Bets(len(self._sizes))

    def _set_sizes(self) -> NDArray[np.int64]:
        """(V,) gaps in each set G, of the levels that the calibration set is large enough for."""
        if self.kind == "flags":
            if self.calibration.guarantee != "tolerance":
                cure = "calibrate with guarantee 'tolerance', or use {kind='p-values'}"
                raise InputError("flags need a known rate", argument="kind", cure=cure)
            return np.ones(1, dtype=np.int64)  # one set: the refused
        sizes = [int(exact_fraction(level, "level") * (self._n + 1)) for level in LEVELS]
        if not any(sizes):
            raise InputError(f"{self._n} calibration samples are too few", argument="guard", cure="calibrate with more")
        if self._n < ENOUGH:
            what = f"monitor: only {self._n} calibration samples: drift from the first input is partly learnt as normal"
            cure = f"calibrate with {ENOUGH:,}, or with guarantee 'tolerance' and watch flags"
            warnings.warn(f"{what}; {cure}", IgeoodWarning, stacklevel=3)
        return np.array([size for size in sizes if size])

    def is_like(self, other: "Monitor") -> bool:
        """Whether the other one watches a guard of the same calibration."""
        return _fingerprint(self.calibration) == _fingerprint(other.calibration)

    @property
    def evidence(self) -> float:
        """Mean of M: on average the number of inputs while nothing has changed; large after a change."""
        return float(self._bets.wealth.mean())

    @property
    def alarm(self) -> bool:
        """Whether there was an alarm since the start, or since `acknowledge`."""
        return bool(self.alarms)

    @property
    def since(self) -> int | None:
        """The input, from 0, at which the change most likely began, by the first alarm; None without an alarm."""
        return self.alarms[0].since if self.alarms else None

    @property
    def likely_starts(self) -> set[int]:
        """Inputs that the next alarm may name as the start of the change, of those so far."""
        return set(self._bets.start.flatten().tolist())

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
            raise InputError(f"expected a Verdict, got {type(verdict).__name__}", argument="verdict")
        is_read = verdict.is_read
        rows = np.flatnonzero(is_read)
        scores = _numpy(verdict.score)[rows]
        hits = _numpy(verdict.is_ood)[rows][:, None]  # (T, V) whether each input is refused, or in each level's gaps
        if self.calibration.per_class:  # the rate of the refused is known for the threshold of all
            hits = ~(scores <= self.calibration.threshold)[:, None]
        if self.kind == "p-values":
            hits = self._ranks.above(scores, self.inputs - self.unread)[:, None] < self._sizes
        before = self.evidence
        parts = [np.empty(0)]
        done = 0
        while done < len(rows):
            block = slice(done, done + BLOCK)
            parts.append(self._advance(hits[block], self.inputs + rows[block], self.inputs - self.unread + done))
            done += len(parts[-1])
        self.inputs += len(verdict)
        self.unread += len(verdict) - len(rows)
        evidence = np.append(np.concatenate(parts), before)[np.cumsum(is_read) - 1]  # of the last row that was read
        return np.where(is_read | (evidence < self.run_length), evidence, 0.0)  # it started again before an unread row

    def acknowledge(self) -> None:
        """Forget the alarms. The urn's counts stay: what came before is part of what is usual."""
        self.alarms = []

    def _advance(self, hits: NDArray[np.bool_], numbers: NDArray[Any], n_before: int) -> NDArray[np.float64]:
        """Take in the sets (T, V) that inputs fell into, up to the first alarm; return the evidence after each."""
        null: Any = 1.0 - self.calibration.tpr
        if self.kind == "p-values":
            earlier = self._hits + np.cumsum(hits, axis=0) - hits
            null = (self._sizes + earlier) / (self._n + 1.0 + n_before + np.arange(len(hits)))[:, None]
        evidence = self._bets.advance(hits / null, numbers, self.run_length)
        self._hits = self._hits + hits[: len(evidence)].sum(axis=0)
        if evidence[-1] >= self.run_length:
            since = self._bets.start.flat[self._bets.likelihood.argmax()]
            alarm = Alarm(int(numbers[len(evidence) - 1]), int(since), float(evidence[-1]))
            self.alarm_count += 1
            self.alarms = [*self.alarms, alarm][:SHOWN]
            self._bets.restart()
        return evidence

    def save(self, path: PathLike) -> None:
        """Write the state to a JSON file, which appears whole."""
        write_whole(path, self.state())

    def state(self) -> bytes:
        """Content of the file that `save` writes."""
        state: dict[str, Any] = {name: getattr(self, name) for name in ("run_length", "kind", "seed", *_COUNTS)}
        state |= {name: values.tolist() for name, values in self._arrays().items()}
        state |= {"format": FORMAT, "guard": _fingerprint(self.calibration), "alarms": self.alarms}
        return f"{json.dumps(state)}\n".encode()

    @classmethod
    def load(cls, path: PathLike, guard: Guard | Calibration) -> "Monitor":
        """Read what `save` wrote; it must be of this guard, as it was calibrated then."""
        calibration = _calibration(guard)
        try:
            state = json.loads(Path(path).read_bytes())
            if state["format"] == FORMAT and state["guard"] == _fingerprint(calibration):
                monitor = cls(calibration, state["run_length"], state["kind"], seed=state["seed"])
                monitor._restore(state)
                return monitor
        except (ValueError, KeyError, TypeError, OverflowError, RecursionError) as error:
            raise GuardFileError(f"damaged ({type(error).__name__})", cure="start a new one", place=str(path)) from None
        raise InputError("of another guard or calibration", argument="path", cure="give that guard", place=str(path))

    def _arrays(self) -> dict[str, NDArray[Any]]:
        return {"hits": self._hits, **vars(self._bets)}

    def _restore(self, state: dict[str, Any]) -> None:
        for name in _COUNTS:
            setattr(self, name, int(state[name]))
        if not 0 <= self.unread <= self.inputs or self.alarm_count < 0:
            raise ValueError("counts")
        for name, old in self._arrays().items():
            new = np.array(state[name])
            if new.shape != old.shape or not np.isfinite(new).all() or (new < 0).any():
                raise ValueError(name)
            old[...] = new
        self.alarms = [Alarm(int(at), int(since), float(evidence)) for at, since, evidence in state["alarms"]]

    def __repr__(self) -> str:
        state = f"alarm since input {self.since:,}" if self.alarm else "no alarm"
        return f"Monitor({self.kind}: {self.inputs:,} inputs, evidence {self.evidence:.3g}, {state})"


def open_monitor(guard: Guard | Calibration, state: PathLike | None, options: Mapping[str, Any]) -> Monitor:
    """A monitor with these options; where the file `state` exists, the one that it describes, if it has them."""
    if state is None or not Path(state).exists():
        return Monitor(guard, **options)
    monitor = Monitor.load(state, guard)
    for name, value in options.items():
        before = getattr(monitor, name)
        if before != value:
            cure = f"give {{{name}={before}}}, or another {{state}}"
            raise InputError(f"{state} has {before}, not {value}", argument=name, cure=cure)
    return monitor


def _calibration(guard: Guard | Calibration) -> Calibration:
    calibration = guard.calibration if isinstance(guard, Guard) else guard
    if calibration is None:
        raise NotReadyError("no threshold yet", argument="guard", cure="call calibrate with held-out samples first")
    if not isinstance(calibration, Calibration):
        raise InputError(f"expected a Guard or its Calibration, got {type(guard).__name__}", argument="guard")
    return calibration


def _fingerprint(calibration: Calibration) -> str:
    about = {name: getattr(calibration, name) for name in ("tpr", "guarantee", "confidence")}
    return digest(about, {"scores": calibration.scores.cpu()})


def _numpy(values: Any) -> NDArray[Any]:
    return np.asarray(values.detach().cpu() if isinstance(values, torch.Tensor) else values)
