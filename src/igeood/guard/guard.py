"""The guard: a source of outputs, a detector and a calibration, from fit to predict."""

import copy
import json
import os
import warnings
from collections.abc import Iterable, Sequence
from dataclasses import replace
from typing import Any, Literal

import numpy as np
import torch
from torch import Tensor

from igeood.calibration import Calibration, Guarantee, needed_samples
from igeood.detectors import Detector, method_name
from igeood.detectors import detector as make_detector
from igeood.distributed import Group, Ranks
from igeood.errors import Finding, IgeoodWarning, InputError, NotReadyError, import_extra
from igeood.files import digest
from igeood.geometry.precision import precise
from igeood.guard import health
from igeood.guard.explain import Explanation, explain
from igeood.guard.identity import Seen, unseen
from igeood.guard.names import class_names
from igeood.guard.source import Source, is_numpy
from igeood.guard.training import add_up, learn, read_training, take_over_first
from igeood.guard.tune import Progress, Search, Tuning, Validation, sweep, tune_detector
from igeood.guard.verdict import Verdict
from igeood.model.reader import random_state_kept
from igeood.model.step import check_epsilon
from igeood.outputs import Array, OnError, Outputs, as_kind
from igeood.summary import BUDGET, Summary

Access = Literal["black box", "grey box", "white box"]
EPSILONS = tuple(round(0.0002 * i, 4) for i in range(21))  # the paper's 21 sizes of the input step


class Guard:
    """Tells which inputs a classifier was not made for. Build one with `black_box`, `grey_box` or `white_box`.

    In order: `fit` on training samples, `tune` if OOD samples are to help, `calibrate` on in-distribution samples kept
    apart, then `predict`. A step that fails leaves the guard as it was.

    A guard with a model takes what the model takes: a loader of batches `(x, y)`, a tensor, a mapping of keywords. One
    without takes logits: an array, an `Outputs`, or an iterable of them. Loaders should not augment at random.

    Parameters
    ----------
    detector : Detector
        What scores.
    source : Source
        What turns data into outputs.
    access : {"black box", "grey box", "white box"}
        What of the model is used: its logits, its gradients too, or its layers too.
    """

    def __init__(self, detector: Detector, source: Source | None = None, access: Access = "black box") -> None:
        self.detector = detector
        self.source = source or Source()
        self.source.probabilities = detector.probabilities
        self.access = access
        self.summary: Summary | None = None  # of the training samples; files do not keep it
        self.calibration: Calibration | None = None
        self.tuning: Tuning | None = None
        self.classes: tuple[str, ...] | None = None  # names
        self.preparation: dict[str, Any] | None = None  # how images become inputs, where the command line made them
        self.fitted_on = Seen()
        self.tuned_on: tuple[Seen, ...] = ()  # one for each time that `tune` was called
        self.calibrated_on = Seen()
        self.highest: float | None = None  # score of a training sample, where they were looked at
        self.findings: dict[str, list[Finding]] = {}  # by step, in their order
        self._first = (detector.params(), self.source.epsilon)  # what `fit` starts from, whatever `tune` has chosen

    @property
    def epsilon(self) -> float:
        """Size of the input step before scoring, in pixel units."""
        return self.source.epsilon

    @property
    def layers(self) -> list[str]:
        """The layers that are read."""
        return self.source.layers

    @property
    def columns(self) -> dict[str, Any] | None:
        """Columns of logits files: `logits`, their names in order, and `id`, a name; None for the default."""
        return self.source.columns

    @property
    def threshold(self) -> float:
        """`is_ood = score > threshold`; for classes that have none of their own (`Calibration.thresholds`)."""
        return self._calibrated("threshold").threshold

    @property
    def promise(self) -> str:
        """What the threshold promises, in a sentence."""
        return self._calibrated("promise").promise

    @property
    def health(self) -> list[Finding]:
        """What fit, tune, calibrate and use have found: useless or mistaken set-ups, each with a cure."""
        return [finding for findings in (*self.findings.values(), self.source.findings) for finding in findings]

    def _report(self, step: str, findings: Iterable[Finding]) -> "Guard":
        """Take over a step's findings in place of its own and later ones, and warn of them."""
        earlier = {name: self.findings.get(name, []) for name in health.STEPS[: health.STEPS.index(step)]}
        self.findings = {**earlier, step: list(findings)}
        for finding in (each for each in self.findings[step] if each.level == "warning"):
            warnings.warn(IgeoodWarning(finding), stacklevel=3)
        return self

    def fit(
        self,
        data: Any,
        labels: Any = None,
        *,
        ids: Any = None,
        classes: Sequence[str] | None = None,
        budget: int = BUDGET,
        group: Group = None,
    ) -> "Guard":
        """Learn the classes from training samples; an earlier tuning and calibration are undone.

        Parameters
        ----------
        data : loader, array of logits, or Summary
            Training samples: batches `(x, y)` for a guard with a model, read once; (N, C) logits for one without. Or
            what `igeood.summarise` returned.
        labels : array of int or str, optional
            (N,) true classes, where `data` is one array: columns' numbers, or names of `classes`.
        ids : sequence of names or numbers, optional
            (N,) by which `tune` and `calibrate` recognise samples, where `data` is one array. Inputs of a model are
            recognised by their content.
        classes : sequence of str, optional
            Names, in the order of the logits; default: `dataset.classes`, `config.id2label`, or the sorted labels.
        budget : int
            Bytes of training rows to keep; of more, a sample of each class.
        group : ProcessGroup or False, optional
            Where `torch.distributed` is initialised, each rank gives its own shard or its summary, and all get the
            same guard to the bit. By default the ranks of the default group; False is for a process that works alone.
        """
        fresh = self.with_options()
        detector, source = fresh.detector, fresh.source
        ranks = Ranks(group)
        ranks.check_same(json.dumps([type(detector).__name__, detector.params(), self.access], default=str), "method")
        summary = data if isinstance(data, Summary) else Summary(detector.needs, budget=budget)
        with ranks.agreed():
            if summary is not data:
                read_training(source, detector, summary, data, labels, ids, classes)
        has_read = summary is not data and summary.shape is not None
        summary = add_up(summary, ranks)
        with ranks.agreed(), precise():
            learn(source, detector, summary, has_read=has_read)
            fresh.classes = source.classes = class_names(classes, detector.n_classes_, summary, source.bare, self)
        if not ranks.alone:
            take_over_first(detector, ranks)
        fresh.summary = summary
        source.identified = summary.identified
        fresh.fitted_on = Seen(np.repeat(summary.keys, np.minimum(summary.key_counts, 2)), summary.identified)
        scores, fresh.highest = health.training_scores(detector, summary)
        vars(self).update(vars(fresh))
        return self._report("fit", health.of_fit(detector, summary, scores))

    def with_options(self, **options: Any) -> "Guard":
        """The guard with other options of its method, such as `centroid_temperature=1.0`; fit it."""
        if options:
            make_detector(method_name(self.detector), **options)  # raises for options that it does not have
        params, epsilon = self._first
        source = copy.copy(self.source)
        source.epsilon = epsilon
        other = Guard(type(self.detector)(**{**params, **options}), source, self.access)
        other.classes = self.classes
        other.preparation = self.preparation
        return other

    def tune(
        self,
        id_data: Any,
        ood: Any,
        *,
        share: float = 0.5,
        tpr: float = 0.95,
        search: Search | None = sweep,
        epsilons: Sequence[float] | None = None,
        seed: int = 0,
        progress: Progress | None = None,
        ids: Any = None,
        budget: int = BUDGET,
    ) -> "Guard":
        """Choose temperature, input step and weights that refuse most OOD samples at `tpr`; calibrate afterwards.

        Where everything is worse than before, the guard stays as it was. Give every rank the same samples.

        Parameters
        ----------
        id_data : loader, or array of logits
            In-distribution validation samples. A seeded `share` is used, which `calibrate` leaves out.
        ood : loader, or array of logits
            OOD validation samples.
        share, tpr : float
            Of `id_data`, 1 uses them all; and the operating point.
        search : callable, optional
            How the temperature is sought, such as `igeood.guard.tune.sweep`. None keeps it.
        epsilons : sequence of float, optional
            Sizes of the input step to try. By default 21 from 0 to 0.004 for a grey box, else the guard's own.
        seed : int
            Of the share and the folds.
        progress : callable, optional
            Called with the number of temperatures tried and their total.
        ids, budget
            As in `fit`, of `id_data` and of all validation samples' outputs.
        """
        self._check_fitted("tune")
        if self.summary is None and self.detector.needs.samples:
            raise NotReadyError("tune: a loaded guard has no training sample", cure="call fit again first")
        sizes = (EPSILONS if self.access == "grey box" else (self.epsilon,)) if epsilons is None else tuple(epsilons)
        if not sizes:
            raise InputError("empty", argument="epsilons", cure="give sizes of the input step, such as (0, 0.001)")
        for size in sizes:
            check_epsilon(size, "epsilons")
        self.source.check_weights(strict=True)
        validation = Validation(self.source, id_data, ood, ids, share=share, seed=seed, budget=budget // len(sizes))
        with random_state_kept(), torch.inference_mode(False), torch.no_grad():
            self.detector, self.tuning = tune_detector(
                self.detector,
                self.summary,
                validation.read,
                sizes,
                epsilon=self.epsilon,
                tpr=tpr,
                search=search,
                seed=seed,
                progress=progress,
            )
        self.source.epsilon = self.tuning.epsilon
        _, self.highest = health.training_scores(self.detector, self.summary)
        self.calibration = None
        self.tuned_on = (*self.tuned_on, validation.used)
        trained_on = int(self.fitted_on.among(validation.used.keys, validation.used.identified).sum())
        return self._report("tune", health.of_tune(self.tuning, tpr, trained_on, validation.halved))

    def calibrate(
        self,
        id_data: Any,
        tpr: float = 0.95,
        *,
        guarantee: Guarantee = "marginal",
        confidence: float = 0.95,
        per_class: bool = False,
        ids: Any = None,
        group: Group = None,
    ) -> "Guard":
        """Set the threshold from in-distribution samples, without those that training or `tune` has seen.

        Parameters
        ----------
        id_data : loader, or array of logits
            In-distribution samples kept apart from training. `guard.calibration.left_out` has the places of those that
            training or `tune` has seen nevertheless.
        tpr, guarantee, confidence
            As in `igeood.calibration.threshold`; `guard.promise` says what they promise.
        per_class : bool
            The promise holds for the inputs of each predicted class: a class has its own threshold and p-values.
            Those with too few samples share the threshold of all.
        ids, group
            As in `fit`: the threshold is of all ranks' samples together.
        """
        ranks = Ranks(group)
        rows: dict[str, Tensor] = {}
        with ranks.agreed():
            self._check_fitted("calibrate")
            needed = needed_samples(tpr, guarantee, confidence)  # raises for options that nothing can be promised with
            self.source.check_weights(strict=True)
            rows, _ = self._judge(id_data, ids=ids, name="id_data", keys=True)
        options = [self.epsilon, float(tpr), guarantee, float(confidence), bool(per_class), self.detector.params()]
        ranks.check_same(json.dumps(options, default=str), "option")
        if not ranks.alone:
            ranks.check_same(digest({}, {name: t.detach().cpu() for name, t in self.detector.state().items()}), "fit")
        rows = ranks.gather_rows(rows)
        offered = Seen(rows["key"].numpy().view(np.uint64), bool(rows["identified"].all()))
        is_used, n_tuned, trained_on = unseen(offered, self.fitted_on, self.tuned_on, needed)
        used = torch.from_numpy(is_used)
        self.calibration = Calibration(
            rows["score"][used],
            tpr,
            guarantee,
            confidence,
            labels=rows["label"][used],
            n_classes=self.detector.n_classes_,
            per_class=per_class,
            left_out=(~used).nonzero()[:, 0].numpy(),
            trained_on=trained_on,
            classes=self.classes,
        )
        self.calibrated_on = replace(offered, keys=np.sort(offered.keys[is_used]))
        found = health.of_calibration(self.calibration, offered, self.fitted_on, n_tuned, self.highest)
        return self._report("calibrate", found)

    def score(self, data: Any, *, on_error: OnError = "raise") -> Array:
        """Scores (N,) of a tensor, a loader, or logits: higher is more out-of-distribution.

        Arguments are as in `predict`; the score of a row that is not valid is infinite.
        """
        self._check_fitted("score")
        self.source.check_weights(strict=False)
        rows, _ = self._judge(data, on_error=on_error)
        return as_kind(rows["score"], is_numpy(data))

    def predict(self, data: Any, *, on_error: OnError = "raise") -> Verdict:
        """Judge a tensor, a loader, or logits; the guard must be calibrated.

        Parameters
        ----------
        data : loader, tensor, or array of logits
            Samples.
        on_error : {"raise", "refuse"}
            A row with NaN is an error; or it is refused with the smallest p-value, and `Verdict.reason` says why.
        """
        calibration = self._calibrated("predict")
        self.source.check_weights(strict=False)
        rows, reasons = self._judge(data, on_error=on_error)
        verdict = Verdict.of(rows["score"], rows["label"], calibration, reasons, to_numpy=is_numpy(data))
        return verdict if self.classes is None else replace(verdict, classes=self.classes)

    def _judge(self, data: Any, *, keys: bool = False, **reading: Any) -> tuple[dict[str, Tensor], dict[int, str]]:
        """Columns of N values: score (infinite if not valid), label, perhaps key; and why rows are not valid."""
        parts: list[dict[str, Tensor]] = []
        reasons: dict[int, str] = {}
        n = 0
        with self.source.reading(data):
            for outputs in self.source.batches(data, detector=self.detector, keys=keys, **reading):
                self.detector.check(outputs)
                with precise(), torch.no_grad():
                    score = self.detector.score(outputs)
                if outputs.reasons:
                    score = score.masked_fill(~outputs.valid, torch.inf)
                    reasons |= {n + row: reason for row, reason in outputs.reasons.items()}
                n += len(score)
                parts.append({"score": score, "label": outputs.predicted})
                if keys:
                    is_id = torch.full((len(outputs),), outputs.identified)
                    parts[-1] |= {"key": torch.from_numpy(outputs.keys.view(np.int64)), "identified": is_id}
        return {name: torch.cat([part[name] for part in parts]) for name in parts[0]}, reasons

    def explain(self, data: Any, *, top: int = 5) -> Explanation:
        """Say why: what each layer added to the score, the nearest or likeliest classes, the channels that stand out.

        `top` is the number of channels to name for each layer, and of likeliest classes.
        """
        self._check_fitted("explain")
        if top < 1:
            raise InputError(f"must be a number of channels, at least 1; got {top!r}", argument="top")
        self.source.check_weights(strict=False)
        with self.source.reading(data):
            whole = Outputs.concat(self.source.batches(data, detector=self.detector))
        self.detector.check(whole)
        with precise(), torch.no_grad():
            return explain(self.detector, whole, top, self.classes, self.calibration, to_numpy=is_numpy(data))

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write the guard to one safetensors file. The training sample stays out: `tune` needs `fit` after `load`."""
        from igeood.guard.file import save as save_guard  # noqa: PLC0415 (it builds guards)

        self._check_fitted("save")
        save_guard(self, path)

    def export(self, path: str | os.PathLike[str], example: Any = None) -> None:
        """Write model, score, p-value and verdict as one ONNX graph, which runs without torch (extra `onnx`).

        The file appears once onnxruntime has run the graph and agreed with `predict`. Rows that cannot be read are
        refused in it, with the label −1.

        Parameters
        ----------
        path : path
            The file; one that is there is replaced if it is such a graph.
        example : what `predict` takes
            Inputs, for their names and shapes; numbers of samples and of tokens stay free. Needed for a model.
        """
        self._calibrated("export")
        import_extra("igeood.export.writing", "onnx").export(self, path, example)

    def _check_fitted(self, step: str) -> None:
        if not hasattr(self.detector, "n_classes_"):
            how = "fit(logits, labels)" if self.source.model is None else "fit(train_loader)"
            raise NotReadyError(f"{step}: the guard is not fitted yet", cure=f"call {how} first")

    def _calibrated(self, step: str) -> Calibration:
        if self.calibration is None:
            self._check_fitted(step)
            raise NotReadyError(f"{step}: no threshold yet", cure="calibrate it with held-out samples first")
        return self.calibration

    def __repr__(self) -> str:
        step = f", epsilon={self.epsilon:g}" if self.access != "black box" else ""
        layers = f", layers={self.layers}" if self.layers else ""
        promise = self.calibration.promise if self.calibration else "not calibrated"
        return f"Guard({self.access}: {self.detector!r}{layers}{step}; {promise})"
