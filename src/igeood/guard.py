"""The guard: a detector with its threshold, from fit to predict."""

import logging
import os
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from igeood import storage, validation
from igeood.calibration import Calibration, Guarantee, p_values
from igeood.detectors import METHODS, Detector, method_name
from igeood.detectors import detector as make_detector
from igeood.errors import GuardFileError, IgeoodError, InputError, NotReadyError
from igeood.outputs import Array, ArrayLike, Outputs
from igeood.tuning import BAYES_TRIALS, Progress, Search, Trial, Tuning, tune_temperature

log = logging.getLogger("igeood")


@dataclass(frozen=True, eq=False)
class Verdict:
    """What a guard says of N samples, in the kind of array that came in.

    Attributes
    ----------
    is_ood : array of bool
        (N,) whether the score is above the threshold.
    score : array
        (N,) higher is more out-of-distribution.
    p_value : array
        (N,) conformal p-value: small is out-of-distribution.
    label : array of int
        (N,) the classifier's own answer, the largest logit.
    """

    is_ood: Array
    score: Array
    p_value: Array
    label: Array


class Guard:
    """Tells which inputs a classifier was not made for. Build one with `igeood.black_box`.

    In order: `fit` on training outputs, `tune` if validation samples of both kinds are at hand, `calibrate` on
    in-distribution samples kept apart, then `predict`. A step that fails leaves the guard as it was.

    Parameters
    ----------
    detector : Detector
        What scores.
    """

    def __init__(self, detector: Detector) -> None:
        self.detector = detector
        self.calibration: Calibration | None = None
        self.tuning: Tuning | None = None
        self._train: Outputs | None = None
        self._tuned_on: validation.Keys = np.empty(0, dtype=np.uint64)

    def fit(self, logits: Outputs | ArrayLike, labels: ArrayLike | None = None) -> "Guard":
        """Learn the classes from training outputs; forgets an earlier tuning and calibration.

        Parameters
        ----------
        logits : Outputs or array
            (N, C) logits of training samples.
        labels : array of int, optional
            (N,) their true classes.
        """
        train = _copy(Outputs.of(logits, labels))
        self.detector.fit(train)
        for note in self.detector.notes_:
            log.warning(note)
        self._train, self.tuning, self.calibration = train, None, None
        self._tuned_on = np.empty(0, dtype=np.uint64)
        return self

    def tune(
        self,
        id_logits: Outputs | ArrayLike,
        ood: Outputs | ArrayLike,
        *,
        share: float = 0.5,
        tpr: float = 0.95,
        search: Search = "sweep",
        seed: int = 0,
        trials: int = BAYES_TRIALS,
        progress: Progress | None = None,
    ) -> "Guard":
        """Choose the temperature that refuses most OOD validation samples at `tpr`; calibrate again afterwards.

        Parameters
        ----------
        id_logits : Outputs or array
            (N, C) in-distribution validation logits. A seeded `share` of them is used and remembered: `calibrate`
            may get the same array, and leaves those samples out.
        ood : Outputs or array
            (M, C) OOD validation logits.
        share : float
            Of `id_logits`; 1 uses them all.
        tpr, search, seed, trials, progress
            As in `igeood.tuning.tune_temperature`; the seed draws the share too.
        """
        train = self._training_outputs()
        inside, outside = Outputs.of(id_logits), Outputs.of(ood)
        if len(inside) == 0:
            raise InputError("id_logits: empty; tuning needs validation samples of both kinds")
        rows, _ = validation.split(len(inside), share, seed)
        used = inside[rows.to(inside.logits.device)]
        with torch.no_grad():
            tuning = tune_temperature(
                self.detector, train, used, outside,
                tpr=tpr, search=search, seed=seed, trials=trials, progress=progress,
            )  # fmt: skip
            tuned = self.detector.at_temperature(tuning.best.temperature, train)
        self.detector, self.tuning, self.calibration = tuned, tuning, None
        self._tuned_on = validation.merge(self._tuned_on, validation.row_keys(used.logits))
        return self

    def calibrate(
        self,
        id_logits: Outputs | ArrayLike,
        tpr: float = 0.95,
        *,
        guarantee: Guarantee = "marginal",
        confidence: float = 0.95,
    ) -> "Guard":
        """Set the threshold from in-distribution samples kept apart; those that `tune` used are left out.

        Parameters
        ----------
        id_logits : Outputs or array
            (N, C) logits of in-distribution samples that training has not seen.
        tpr, guarantee, confidence
            As in `igeood.calibration.threshold`; `guard.calibration.promise` says in words what they promise.
        """
        self.detector.check_fitted()
        offered = Outputs.of(id_logits)
        fresh = validation.unused(validation.row_keys(offered.logits), self._tuned_on)
        left_out = int((~fresh).sum())
        if left_out == len(offered) and left_out:
            raise InputError(
                f"id_logits: tune has used all {left_out} of these samples; calibrate on others, or tune with share=0.5"
            )
        scores = self._scores(offered[fresh.to(offered.logits.device)])
        self.calibration = Calibration(scores.cpu(), tpr, guarantee, confidence, left_out)
        if left_out:
            log.warning("calibrate: left out %d of %d samples, which tune had used", left_out, len(offered))
        return self

    def score(self, logits: Outputs | ArrayLike) -> Array:
        """Scores (N,) of logits (N, C): higher is more out-of-distribution."""
        batch = Outputs.of(logits)
        return batch.like(self._scores(batch))

    def predict(self, logits: Outputs | ArrayLike) -> Verdict:
        """Judge logits (N, C); the guard must be calibrated."""
        self.detector.check_fitted()
        if self.calibration is None:
            raise NotReadyError("predict: no threshold yet; call calibrate(held_out_logits) first")
        batch = Outputs.of(logits)
        score = self._scores(batch)
        p_value = torch.as_tensor(p_values(self.calibration.scores, score))
        return Verdict(
            is_ood=batch.like(score > self.calibration.threshold),
            score=batch.like(score),
            p_value=batch.like(p_value),
            label=batch.like(batch.logits.argmax(dim=1)),
        )

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write the guard to one safetensors file, without the training outputs: `tune` needs `fit` after loading."""
        state = self.detector.state()
        tensors = {f"detector.{name}": value for name, value in state.items()}
        tensors["tuned_on"] = torch.from_numpy(self._tuned_on.view(np.int64).copy())
        record: dict[str, Any] = {
            "access": "black box",
            "method": method_name(self.detector),
            "params": self.detector.params(),
            "n_classes": self.detector.n_classes_,
            "tuning": None if self.tuning is None else asdict(self.tuning),
            "calibration": None,
        }
        if self.calibration is not None:
            tensors["calibration.scores"] = self.calibration.scores
            record["calibration"] = {
                "n": len(self.calibration.scores),
                "threshold": self.calibration.threshold,
                **{name: getattr(self.calibration, name) for name in _CALIBRATION_FIELDS},
            }
        storage.write(path, record, tensors)

    def _training_outputs(self) -> Outputs:
        self.detector.check_fitted()
        if self._train is None:
            raise NotReadyError("tune: a loaded guard has no training outputs; call fit(logits, labels) again first")
        return self._train

    def _scores(self, batch: Outputs) -> Tensor:
        tensors = Outputs._checked(batch.logits, batch.features, batch.labels, False)
        with torch.no_grad():
            return torch.as_tensor(self.detector.score(tensors))

    def __repr__(self) -> str:
        state = "not calibrated" if self.calibration is None else self.calibration.promise
        return f"Guard({self.detector!r}; {state})"


_CALIBRATION_FIELDS = ("tpr", "guarantee", "confidence", "left_out")


def black_box(
    *, method: str | Detector = "igeood-logits", temperature: float | None = None, probabilities: bool = False
) -> Guard:
    """Make a guard for whoever has logits only, from any framework.

    Parameters
    ----------
    method : str or Detector
        One of `igeood.METHODS`, or a detector of your own options.
    temperature : float, optional
        Of the softmax; each method has its own default.
    probabilities : bool
        The arrays hold probabilities, not logits.

    Examples
    --------
    >>> guard = black_box().fit([[4.0, 0, 0], [0, 5.0, 0], [0, 0, 3.0]], [0, 1, 2])
    >>> guard.score([[0.1, 0.2, 0.0]]).shape
    (1,)
    """
    if isinstance(method, Detector):
        if temperature is not None or probabilities:
            raise InputError("method: a detector has its own options; give temperature and probabilities to it")
        return Guard(method)
    options: dict[str, Any] = {} if temperature is None else {"temperature": temperature}
    return Guard(make_detector(method, probabilities=probabilities, **options))


def load(path: str | os.PathLike[str]) -> Guard:
    """Read a guard that `Guard.save` wrote. A damaged, foreign or newer file is an error, and nothing is executed."""
    record, tensors = storage.read(path)
    try:
        return _restore(record, tensors)
    except (KeyError, TypeError, AttributeError, IgeoodError) as error:
        raise GuardFileError(f"path: {path} does not describe a guard ({error})") from None


def _restore(record: dict[str, Any], tensors: dict[str, Tensor]) -> Guard:
    method = record["method"]
    options = {k: v for k, v in record["params"].items() if k not in METHODS[method].fixed}
    prefix = "detector."
    state = {name.removeprefix(prefix): value for name, value in tensors.items() if name.startswith(prefix)}
    guard = Guard(make_detector(method, **options).load_state(state, record["n_classes"]))
    guard._tuned_on = tensors["tuned_on"].numpy().view(np.uint64)
    if record["tuning"] is not None:
        trials = tuple(Trial(**trial) for trial in record["tuning"]["trials"])
        guard.tuning = Tuning(Trial(**record["tuning"]["best"]), trials)
    if record["calibration"] is not None:
        kept = {name: record["calibration"][name] for name in _CALIBRATION_FIELDS}
        guard.calibration = Calibration(tensors["calibration.scores"], **kept)
    return guard


def _copy(outputs: Outputs) -> Outputs:
    """Outputs whose logits and labels are the guard's own: the caller may reuse the arrays."""
    labels = None if outputs.labels is None else outputs.labels.clone()
    return Outputs._checked(outputs.logits.detach().clone(), outputs.features, labels, outputs.numpy)
