"""The guard: a detector with its inputs and its threshold, from fit to predict."""

import logging
import os
import warnings
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import asdict, dataclass
from typing import Any, Literal

import numpy as np
import torch
from torch import Tensor

from igeood import storage, validation
from igeood.batches import without_gradients
from igeood.calibration import Calibration, Guarantee, needed_samples
from igeood.detectors import Detector, Ensemble, method_name
from igeood.diagnostics import LayerDiagnostics, diagnose
from igeood.errors import IgeoodWarning, InputError, NotReadyError
from igeood.explanation import Explanation, explain
from igeood.extraction import random_state_kept
from igeood.inputs import ArrayInputs, ModelInputs, Seen, ValidationSamples, collect
from igeood.outputs import Array, Keys, Outputs, RowBuffer, as_kind
from igeood.perturbation import check_epsilon
from igeood.tuning import BAYES_TRIALS, Progress, Search, Tuning, tune_guard

log = logging.getLogger("igeood")

Access = Literal["black box", "grey box", "white box"]

CALIBRATION_FIELDS = ("tpr", "guarantee", "confidence", "left_out", "trained_on")
EPSILONS = tuple(round(0.0002 * i, 4) for i in range(21))  # the paper's 21 sizes of the input step


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
        (N,) the classifier's own answer, the largest logit of the clean input.
    """

    is_ood: Array
    score: Array
    p_value: Array
    label: Array

    def __len__(self) -> int:
        return len(self.is_ood)

    def __repr__(self) -> str:
        return f"Verdict({len(self)} judged, {int(self.is_ood.sum())} out-of-distribution)"


class Guard:
    """Tells which inputs a classifier was not made for. Build one with `black_box`, `grey_box` or `white_box`.

    In order: `fit` on training samples, `tune` if OOD samples (or adversarial ones) are to help, `calibrate` on
    in-distribution samples kept apart, then `predict`. A step that fails leaves the guard as it was.

    A guard with a model takes what the model takes: a loader of batches `(x, y)`, a tensor, a mapping of keywords.
    One without takes logits: an array, an `Outputs`, or an iterable of blocks of them. Samples are known again by
    their content: loaders should not augment at random.

    Parameters
    ----------
    detector : Detector
        What scores.
    inputs : ArrayInputs or ModelInputs
        How the inputs are seen.
    access : {"black box", "grey box", "white box"}
        What of the model is used: its logits, its gradients too, or its layers too.
    """

    def __init__(
        self, detector: Detector, inputs: ArrayInputs | ModelInputs | None = None, access: Access = "black box"
    ) -> None:
        self.detector = detector
        self.access = access
        self.inputs = inputs or ArrayInputs("auto" if isinstance(detector, Ensemble) else ())
        self.calibration: Calibration | None = None
        self.tuning: Tuning | None = None
        self.preparation: dict[str, Any] | None = None  # how images become inputs, where the command line made them
        self._first = (detector.params(), self.inputs.epsilon)  # what `fit` starts from, whatever `tune` has chosen
        self._first_tuned_on: Keys = np.empty(0, dtype=np.uint64)  # what a loaded guard was tuned on before
        self._train: Outputs | None = None
        self.fitted_on: Keys = np.empty(0, dtype=np.uint64)  # keys of the training samples, sorted, each once
        self._tuned_on: Keys = np.empty(0, dtype=np.uint64)

    @property
    def epsilon(self) -> float:
        """Size of the input step before scoring, in pixel units."""
        return self.inputs.epsilon

    @property
    def layers(self) -> list[str]:
        """The layers that are read."""
        return self.inputs.layers

    @property
    def threshold(self) -> float:
        """`is_ood = score > threshold`."""
        return self._calibrated("threshold").threshold

    @property
    def promise(self) -> str:
        """What the threshold promises, in a sentence."""
        return self._calibrated("promise").promise

    def fit(self, data: Any, labels: Any = None) -> "Guard":
        """Learn the classes from training samples; an earlier tuning and calibration are undone.

        Parameters
        ----------
        data : loader, or array of logits
            Training samples: batches `(x, y)` for a guard with a model, read once; (N, C) logits for one without.
        labels : array of int, optional
            (N,) true classes, where `data` is one array.
        """
        logits, classes, keys = RowBuffer(), RowBuffer(), RowBuffer()

        def clean(seen: Iterable[Seen]) -> Iterator[Outputs]:
            for part in seen:
                keys.append(torch.from_numpy(part.keys.view(np.int64)))
                logits.append(part.clean.logits.detach())
                if part.clean.labels is not None:
                    classes.append(part.clean.labels)
                yield part.clean

        params, epsilon = self._first
        fresh = type(self.detector)(**params)
        layers = self.inputs.layers
        with random_state_kept(), without_gradients():
            try:
                self.inputs.prepare()
                fresh.fit_batches(clean(self.inputs.see(data, fresh, labels=labels, fitting=True)))
            except BaseException:
                self.inputs.layers = layers
                raise
        for note in fresh.notes_:
            log.warning(note)
        self.inputs.settle()
        self.detector, self.inputs.epsilon = fresh, epsilon
        self._train = Outputs.checked(logits.rows, {}, classes.rows if len(classes) else None, False)
        self.tuning = self.calibration = None
        self.fitted_on, self._tuned_on = np.unique(keys.rows.numpy().view(np.uint64)), self._first_tuned_on
        return self

    def tune(
        self,
        id_data: Any,
        ood: Any,
        *,
        share: float = 0.5,
        tpr: float = 0.95,
        search: Search = "sweep",
        epsilons: Sequence[float] | None = None,
        attack: float = 0.05,
        seed: int = 0,
        trials: int = BAYES_TRIALS,
        progress: Progress | None = None,
    ) -> "Guard":
        """Choose temperature, input step and weights that refuse most OOD samples at `tpr`; calibrate afterwards.

        Where nothing that was tried is better than before, the guard stays as it was; `guard.tuning` tells both
        rates. A white box that is tuned on adversarial samples keeps its temperature: they are made to fool the output.

        Parameters
        ----------
        id_data : loader, or array of logits
            In-distribution validation samples. A seeded `share` of them is used and remembered: `calibrate` may get
            the same ones, and leaves those out.
        ood : loader, array of logits, or "fgsm"
            OOD validation samples; or adversarial ones, made of the in-distribution samples by the model's gradient.
        share : float
            Of `id_data`; 1 uses them all.
        tpr : float
            The operating point.
        search : {"sweep", "bayes"}
            How the temperature is sought: see `igeood.tuning.tune_temperature`.
        epsilons : sequence of float, optional
            Sizes of the input step to try. By default 21 from 0 to 0.004 for a grey box, else the guard's own.
        attack : float
            Size of the adversarial step, in pixel units.
        seed : int
            Of the share, the folds and the Bayesian search.
        trials : int
            Of the Bayesian search.
        progress : callable, optional
            Called with the number of temperatures tried and their total.
        """
        train = self._training_outputs()
        grid = self._grid(epsilons)
        check_epsilon(attack, "attack")
        samples = ValidationSamples(
            self.inputs, id_data, ood, lambda keys: validation.chosen(keys, share, seed), attack
        )
        with random_state_kept(), without_gradients():
            tuned, tuning = tune_guard(
                self.detector, train, samples.see, grid, epsilon=self.epsilon, tpr=tpr, search=search, seed=seed,
                trials=trials, progress=progress,
            )  # fmt: skip
        self.detector, self.tuning, self.calibration = tuned, tuning, None
        self.inputs.epsilon = tuning.epsilon
        self._tuned_on = validation.merge(self._tuned_on, samples.used)
        log.info("tune: used %d in-distribution samples of the seeded share %g", len(samples.used), share)
        if tuning.after <= tuning.before:
            log.warning("tune: no more OOD validation samples are refused than before, %.1f%%", 100 * tuning.before)
        return self

    def _grid(self, epsilons: Sequence[float] | None) -> tuple[float, ...]:
        if epsilons is None:
            return EPSILONS if self.access == "grey box" else (self.epsilon,)
        if isinstance(epsilons, (str, float, int)) or len(epsilons) == 0:
            raise InputError(
                f"epsilons: expected one or more sizes of the input step, such as (0, 0.001); got {epsilons!r}"
            )
        for epsilon in epsilons:
            check_epsilon(epsilon, "epsilons")
        return tuple(epsilons)

    def calibrate(
        self,
        id_data: Any,
        tpr: float = 0.95,
        *,
        guarantee: Guarantee = "marginal",
        confidence: float = 0.95,
    ) -> "Guard":
        """Set the threshold from in-distribution samples kept apart; those that `tune` used are left out.

        Parameters
        ----------
        id_data : loader, or array of logits
            In-distribution samples that training has not seen.
        tpr, guarantee, confidence
            As in `igeood.calibration.threshold`; `guard.promise` says in words what they promise.
        """
        self._check_fitted("calibrate")
        needed = needed_samples(tpr, guarantee, confidence)
        keys, scores, _, _ = self._judge(id_data, name="id_data", keyed=True)
        fresh = validation.unused(keys, self._tuned_on)
        kept, left_out = int(fresh.sum()), int((~fresh).sum())
        if kept < needed:
            used = f" ({left_out} more were used by tune)" if left_out else ""
            raise InputError(
                f"id_data: {kept} samples{used} cannot promise tpr={tpr:g}; at least {needed} are needed that neither "
                f"training nor tune has used"
            )
        seen_before = int(np.isin(keys[fresh.numpy()], self.fitted_on).sum())
        calibration = Calibration(scores.cpu()[fresh], tpr, guarantee, confidence, left_out, seen_before)
        if seen_before:
            warnings.warn(
                f"id_data: {seen_before} of {kept} samples are training samples; classifiers are surer of them than of "
                f"new ones, so the threshold's promise does not hold; calibrate on samples kept apart",
                IgeoodWarning,
                stacklevel=2,
            )
        self.calibration = calibration
        if left_out:
            log.warning("calibrate: left out %d of %d samples, which tune had used", left_out, len(keys))
        return self

    def score(self, data: Any) -> Array:
        """Scores (N,) of a tensor, a loader, or logits: higher is more out-of-distribution."""
        self._check_fitted("score")
        _, score, _, is_numpy = self._judge(data)
        return as_kind(score, is_numpy)

    def predict(self, data: Any) -> Verdict:
        """Judge a tensor, a loader, or logits; the guard must be calibrated."""
        self._check_fitted("predict")
        calibration = self._calibrated("predict")
        _, score, label, is_numpy = self._judge(data)
        p_value = torch.as_tensor(calibration.p_values(score))
        results = (score > calibration.threshold, score, p_value, label)
        return Verdict(*(as_kind(result, is_numpy) for result in results))

    def explain(self, data: Any, *, top: int = 5) -> Explanation:
        """Say why: what each layer added to the score, the nearest classes, and the channels that stand out.

        Parameters
        ----------
        data : tensor, loader, or array of logits
            Samples to explain.
        top : int
            Channels to name, for each layer.
        """
        self._check_fitted("explain")
        if isinstance(top, bool) or not isinstance(top, int) or top < 1:
            raise InputError(f"top: must be a whole number of channels, at least 1; got {top!r}")
        with random_state_kept():
            _, stepped = collect(self.inputs.see(data, self.detector, epsilons=(self.epsilon,)))
        if not stepped:
            raise InputError("data: no sample to explain")
        with torch.no_grad():
            return explain(self.detector, stepped[0], top, is_numpy=stepped[0].numpy or _is_numpy(data))

    def diagnose(self, data: Any, labels: Any = None) -> dict[str, LayerDiagnostics]:
        """Say how Gaussian the features of in-distribution samples are, for each layer: see `igeood.diagnose`.

        Parameters
        ----------
        data, labels
            As in `fit`.
        """
        self._check_fitted("diagnose")
        with random_state_kept():
            _, outputs = collect(self.inputs.see(data, self.detector, labels=labels, fitting=True))
        if not outputs:
            raise InputError("data: no sample to diagnose")
        return diagnose(outputs[0])

    def _judge(self, data: Any, name: str = "x", *, keyed: bool = False) -> tuple[Keys, Tensor, Tensor, bool]:
        """Keys if they are wanted, scores and the classifier's labels of all samples; and whether they go as NumPy."""
        keys: list[Keys] = []
        scores: list[Tensor] = []
        labels: list[Tensor] = []
        name = "logits" if name == "x" and self.inputs.model is None else name
        is_loader = not isinstance(data, (Tensor, np.ndarray, Mapping, Outputs))
        with random_state_kept() if is_loader else nullcontext(), without_gradients():
            for part in self.inputs.see(data, self.detector, name=name, epsilons=(self.epsilon,), keyed=keyed):
                keys.append(part.keys)
                scores.append(torch.as_tensor(self.detector.score(_as_tensors(part.stepped[0]))))
                labels.append(part.clean.logits.argmax(dim=1))
        if not keys:
            raise InputError(f"{name}: no batch in the loader; is it a generator that was read already?")
        is_numpy = part.clean.numpy or _is_numpy(data)
        return np.concatenate(keys), torch.cat(scores), torch.cat(labels), is_numpy

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write the guard to one safetensors file. The training outputs stay out: `tune` needs `fit` after `load`."""
        self._check_fitted("save")
        tensors = {f"detector.{name}": value for name, value in self.detector.state().items()}
        for name, keys in (("fitted_on", self.fitted_on), ("tuned_on", self._tuned_on)):
            tensors[name] = torch.from_numpy(keys.view(np.int64).copy())
        record: dict[str, Any] = {
            "access": self.access,
            "method": method_name(self.detector),
            "params": self.detector.params(),
            "n_classes": self.detector.n_classes_,
            "layers": self.layers,
            "epsilon": self.epsilon,
            "mean": getattr(self.inputs, "mean", None),
            "std": getattr(self.inputs, "std", 1.0),
            "fold": getattr(self.inputs, "fold", False),
            "model": self.inputs.fingerprint,
            "preparation": self.preparation,
            "tuning": None if self.tuning is None else asdict(self.tuning),
            "calibration": None,
        }
        if self.calibration is not None:
            tensors["calibration.scores"] = self.calibration.scores
            promised = {name: getattr(self.calibration, name) for name in CALIBRATION_FIELDS}
            record["calibration"] = {"n": len(self.calibration.scores), "threshold": self.threshold, **promised}
        storage.write(path, record, tensors)

    def _check_fitted(self, what: str) -> None:
        if not hasattr(self.detector, "n_classes_"):
            how = "fit(logits, labels)" if self.inputs.model is None else "fit(train_loader)"
            raise NotReadyError(f"{what}: the guard is not fitted yet; call {how} first")

    def _training_outputs(self) -> Outputs:
        self._check_fitted("tune")
        if self._train is None:
            raise NotReadyError("tune: a loaded guard has no training outputs; call fit again first")
        return self._train

    def _calibrated(self, what: str) -> Calibration:
        if self.calibration is None:
            raise NotReadyError(f"{what}: no threshold yet; call calibrate with held-out samples first")
        return self.calibration

    def __repr__(self) -> str:
        step = f", epsilon={self.epsilon:g}" if self.access != "black box" else ""
        layers = f", layers={self.layers}" if self.layers else ""
        promise = self.calibration.promise if self.calibration else "not calibrated"
        return f"Guard({self.access}: {self.detector!r}{layers}{step}; {promise})"


def _is_numpy(data: Any) -> bool:
    """Whether results go back as NumPy arrays: for arrays, lists of numbers, and outputs made of them."""
    if isinstance(data, Outputs):
        return data.numpy
    if isinstance(data, (list, tuple)):
        return bool(data) and not any(isinstance(item, (Tensor, dict, tuple, Outputs)) for item in data)
    return hasattr(data, "__array__") and not isinstance(data, Tensor)


def _as_tensors(batch: Outputs) -> Outputs:
    return Outputs.checked(batch.logits, batch.features, batch.labels, False)
