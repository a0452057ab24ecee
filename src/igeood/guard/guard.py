"""The guard: a detector with its inputs and its threshold, from fit to predict."""

import copy
import json
import logging
import os
from collections.abc import Callable, Iterable, Sequence
from contextlib import nullcontext, suppress
from typing import Any, Literal, TypeVar

import numpy as np
import torch
from torch import Tensor

from igeood.calibration import Calibration, Guarantee, needed_samples
from igeood.detectors import Detector, method_name
from igeood.detectors import detector as make_detector
from igeood.errors import InputError, NotReadyError
from igeood.files import digest
from igeood.guard import health
from igeood.guard.explain import Explanation, explain
from igeood.guard.health import STEPS, Finding
from igeood.guard.inputs import ArrayInputs, ModelInputs, OnError, check_lost, collector, is_numpy
from igeood.guard.known import Known
from igeood.guard.learning import learn
from igeood.guard.names import class_names
from igeood.guard.ranks import Group, Ranks
from igeood.guard.tuning import Progress, Search, Tuning, Validation, tune_detector, tune_on_id
from igeood.guard.verdict import Verdict
from igeood.model.batches import CHUNK, is_batch, sampled_places, unpadded
from igeood.model.failing import LostError
from igeood.model.reader import random_state_kept
from igeood.model.step import check_epsilon
from igeood.outputs import NO_KEYS, Array, Keys, Outputs, Refused, as_kind
from igeood.summary import BUDGET, Summary

log = logging.getLogger("igeood")

T = TypeVar("T")
Access = Literal["black box", "grey box", "white box"]

_NOTHING = torch.empty(0, dtype=torch.float64), torch.empty(0, dtype=torch.int64), NO_KEYS  # judged of no sample
EPSILONS = tuple(round(0.0002 * i, 4) for i in range(21))  # the paper's 21 sizes of the input step


class Guard:
    """Tells which inputs a classifier was not made for. Build one with `black_box`, `grey_box` or `white_box`.

    In order: `fit` on training samples, `tune` if OOD samples (or adversarial ones) are to help, `calibrate` on
    in-distribution samples kept apart, then `predict`. A step that fails leaves the guard as it was.

    A guard with a model takes what the model takes: a loader of batches `(x, y)`, a tensor, a mapping of keywords.
    One without takes logits: an array, an `Outputs`, or an iterable of blocks of them. Samples are recognised by
    their content: loaders should not augment at random.

    Parameters
    ----------
    detector : Detector
        What scores.
    inputs : ArrayInputs or ModelInputs
        How the inputs are read.
    access : {"black box", "grey box", "white box"}
        What of the model is used: its logits, its gradients too, or its layers too.
    """

    def __init__(
        self, detector: Detector, inputs: ArrayInputs | ModelInputs | None = None, access: Access = "black box"
    ) -> None:
        self.detector, self.inputs, self.access = detector, inputs or ArrayInputs(), access
        self.summary: Summary | None = None  # of the training samples; files do not keep it
        self.calibration: Calibration | None = None
        self.tuning: Tuning | None = None
        self.classes: tuple[str, ...] | None = None  # their names, where they are known
        self.preparation: dict[str, Any] | None = None  # how images become inputs, where the command line made them
        self.fitted_on = Known()  # the training samples, up to a million keys
        self._first = (detector.params(), self.inputs.epsilon)  # what `fit` starts from, whatever `tune` has chosen
        self._first_tuned_on = Known()  # what a loaded guard was tuned on before
        self._tuned_on = Known()
        self._findings: dict[str, list[Finding]] = {}  # by step, in their order
        self._training_scores = torch.empty(0)  # of a part of the training sample, where it can be scored

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

    @property
    def health(self) -> list[Finding]:
        """What fit, tune and calibrate have found: useless or mistaken set-ups, each with a cure."""
        return [finding for findings in self._findings.values() for finding in findings]

    def _report(self, step: str, findings: Iterable[Finding]) -> "Guard":
        """Take over a step's findings in place of its own and later ones, and warn of them."""
        earlier = {name: self._findings.get(name, []) for name in STEPS[: STEPS.index(step)]}
        self._findings = {**earlier, step: list(findings)}
        health.warn(self._findings[step], stacklevel=4)
        return self

    def fit(
        self, data: Any, labels: Any = None, *, ids: Any = None, classes: Sequence[str] | None = None,
        budget: int = BUDGET, group: Group = None,
    ) -> "Guard":  # fmt: skip
        """Learn the classes from training samples; an earlier tuning and calibration are undone.

        Parameters
        ----------
        data : loader, array of logits, or Summary
            Training samples: batches `(x, y)` for a guard with a model, read once; (N, C) logits for one without. Or
            what `igeood.summarise` returned.
        labels : array of int, optional
            (N,) true classes, where `data` is one array.
        ids : sequence of names or numbers, optional
            (N,) by which `tune` and `calibrate` know samples again, where `data` is one array. Else of arrays equal
            rows are counted, and compared with what chance explains; inputs of a model are known by their content.
        classes : sequence of str, optional
            Names of the classes, for verdicts. By default those of the loader's `dataset.classes`, or of a Hugging
            Face model's `config.id2label`, if they are as many as the columns of logits.
        budget : int
            Bytes of training rows to keep; above it, a sample of each class is kept.
        group : ProcessGroup or False, optional
            Where `torch.distributed` is initialised, each rank gives its own shard (of which a `DistributedSampler`'s
            repeated samples are left out) or its summary, and all get the same guard to the bit. By default the ranks
            of the default group; False is for a process that works alone.
        """
        params, epsilon = self._first
        fresh, ranks = type(self.detector)(**params), Ranks(group)
        plain = json.dumps([type(fresh).__name__, params, self.access], default=lambda value: type(value).__name__)
        ranks.check_same(plain, "method and options")
        inputs, summary = learn(self.inputs, fresh, ranks, (data, labels, ids), budget)
        inputs.epsilon, names, scores = epsilon, None, torch.empty(0)
        with ranks.agreed():
            names = class_names(classes, fresh.n_classes_, summary, inputs.bare, self)
            scores = self._sample_scores(fresh, summary, epsilon)
        names = tuple(ranks.first(names) or ()) or None
        self.detector, self.inputs, self.summary, self.classes = fresh, inputs, summary, names
        self.tuning = self.calibration = None
        self.fitted_on, self._tuned_on = Known.of_summary(summary), self._first_tuned_on
        self._training_scores = next(ranks.each(scores))
        return self._report("fit", health.of_fit(fresh, summary, self._training_scores))

    @staticmethod
    def _sample_scores(detector: Detector, summary: Summary | None, epsilon: float) -> Tensor:
        """For `calibrate` to compare; with an input step there is nothing to compare."""
        return health.training_scores(detector, None if epsilon else summary)

    def _identity(self, *options: Any) -> str:
        """A fingerprint of what must be the same on all ranks: the detector and all it has learnt, and options."""
        detector = self.detector
        about = {"kind": type(detector).__name__, "params": detector.params(), "options": (self.access, *options)}
        plain = json.loads(json.dumps(about, default=lambda value: type(value).__name__))
        tensors = {"used": torch.from_numpy(self._tuned_on.keys.view(np.int64))}
        with suppress(InputError):  # a wrapped detector has no state of its own
            tensors |= {name: value.detach().cpu().contiguous() for name, value in detector.state().items()}
        return digest(plain, tensors)

    def with_options(self, **options: Any) -> "Guard":
        """The guard with other options of its method, such as `solver="sgd"`; fit it."""
        make_detector(method_name(self.detector), **options)  # raises for options that it does not have
        other, (params, epsilon) = copy.copy(self), self._first
        other.detector = type(self.detector)(**{**params, **options})
        other._first = other.detector.params(), epsilon
        other.summary = other.tuning = other.calibration = None
        other._findings = {}
        return other

    def tune(  # noqa: PLR0913 (each is one of the user's choices)
        self, id_data: Any, ood: Any = None, *, share: float = 0.5, tpr: float = 0.95, search: Search = "sweep",
        epsilons: Sequence[float] | None = None, attack: float = 0.05, seed: int = 0,
        progress: Progress | None = None, ids: Any = None, distinct: bool = False, budget: int = BUDGET,
    ) -> "Guard":  # fmt: skip
        """Choose temperature, input step and weights that refuse most OOD samples at `tpr`; calibrate afterwards.

        Where everything that was tried is worse than before, the guard stays as it was; `guard.tuning` has both rates.
        A white box that is tuned on adversarial samples keeps its temperature: they are made to fool the output.
        Under `torch.distributed` it works alone: give every rank the same samples, and each gets the same result.

        Parameters
        ----------
        id_data : loader, or array of logits
            In-distribution validation samples. A seeded `share` of them is used and remembered: `calibrate` may get
            the same ones, and leaves those out.
        ood : loader, array of logits, mapping of str to these, or "fgsm"
            OOD validation samples; several kinds by name, of which `guard.tuning.left_out` then says how each is
            refused unseen; or adversarial ones, made of the in-distribution samples by the model's gradient. None
            for a method that chooses its input step by the scores of in-distribution samples (`deconf-c`).
        share : float
            Of `id_data`; 1 uses them all.
        tpr : float
            The operating point.
        search : {"sweep", "bayes"}
            How the temperature is sought: see `igeood.guard.tuning.tune_temperature`.
        epsilons : sequence of float, optional
            Sizes of the input step to try. By default 21 from 0 to 0.004 for a grey box, or without OOD samples those
            of the method; else the guard's own.
        attack : float
            Size of the adversarial step, in pixel units.
        seed : int
            Of the share, the folds and the Bayesian search.
        progress : callable, optional
            Called with the number of temperatures tried and their total.
        ids : sequence of names or numbers, optional
            (N,) of `id_data`, as in `fit`; OOD samples have theirs in `Outputs(logits, ids=...)`.
        distinct : bool
            Declares that training, in-distribution and OOD samples are different ones, however equal: nothing is
            compared.
        budget : int
            Bytes of validation samples' outputs to hold; of more samples a seeded part is used.
        """
        self._check_fitted("tune")
        if self.summary is None and self.detector.needs.samples:
            raise NotReadyError("tune: a loaded guard has no training sample; call fit again first")
        epsilons = self._step_sizes(ood, epsilons)
        check_epsilon(attack, "attack")
        self.inputs.check_weights(strict=True)
        id_data = self.inputs.named(id_data, ids, "id_data")
        validation = Validation(self.inputs, id_data, ood, share, seed, attack, distinct, budget // len(epsilons))
        samples = {} if self.summary is None else self.summary.samples
        with random_state_kept(), torch.inference_mode(False), torch.no_grad():
            if ood is None:
                tuned, tuning = self.detector, tune_on_id(self.detector, validation.see, epsilons, self.epsilon)
            else:
                tuned, tuning = tune_detector(
                    self.detector, samples, validation.see, epsilons, epsilon=self.epsilon, tpr=tpr, search=search,
                    seed=seed, progress=progress, kinds=validation.kinds,
                )  # fmt: skip
        self.detector, self.tuning, self.calibration = tuned, tuning, None
        self.inputs.epsilon = tuning.epsilon
        unlike = [] if distinct else [*health.of_kinds(self.fitted_on, self._tuned_on, validation.used.identified)]
        self._tuned_on = self._tuned_on.joined(validation.used)
        self._training_scores = self._sample_scores(tuned, self.summary, self.epsilon)
        if tuning.n_ood and tuning.after <= tuning.before:
            log.warning("tune: no more OOD validation samples are refused than before, %.1f%%", 100 * tuning.before)
        worse = [kind for kind, rates in tuning.left_out.items() if rates["tnr"] < rates["before"]]
        if worse:
            log.warning("tune: of %s, left out in turn, fewer are refused than before tuning", ", ".join(worse))
        trained_on = None if distinct else self.fitted_on.shared(validation.used)
        return self._report("tune", [*health.of_tune(tuning, tpr, trained_on), *unlike])

    def _step_sizes(self, ood: Any, epsilons: Sequence[float] | None) -> Sequence[float]:
        """Sizes of the input step that `tune` tries, once it can."""
        if ood is None and not self.detector.id_steps:
            problem = f"{type(self.detector).__name__} needs OOD samples to tune on"
            raise InputError(f"ood: {problem}; give some, or ood='fgsm' for adversarial ones")
        if epsilons is None:
            sizes = self.detector.id_steps if ood is None else EPSILONS
            epsilons = sizes if self.access == "grey box" else (self.epsilon,)
        if len(epsilons) == 0:
            raise InputError("epsilons: empty; give sizes of the input step, such as (0, 0.001)")
        for epsilon in epsilons:
            check_epsilon(epsilon, "epsilons")
        return epsilons

    def calibrate(
        self, id_data: Any, tpr: float = 0.95, *, guarantee: Guarantee = "marginal", confidence: float = 0.95,
        ids: Any = None, distinct: bool = False, group: Group = None,
    ) -> "Guard":  # fmt: skip
        """Set the threshold from in-distribution samples kept apart; those that `tune` used are left out.

        Parameters
        ----------
        id_data : loader, or array of logits
            In-distribution samples that training has not seen.
        tpr, guarantee, confidence
            As in `igeood.calibration.threshold`; `guard.promise` says in words what they promise.
        ids : sequence of names or numbers, optional
            (N,) as in `fit`.
        distinct : bool
            Declares that neither training nor `tune` has seen these samples, however equal: none is left out.
        group : ProcessGroup or False, optional
            As in `fit`: the threshold is of all ranks' samples together.
        """
        ranks, (scores, _, keys), identified, identity = Ranks(group), _NOTHING, list[bool](), ""
        with ranks.agreed():
            self._check_fitted("calibrate")
            needed_samples(tpr, guarantee, confidence)  # raises for options that nothing can be promised with
            self.inputs.check_weights(strict=True)
            given = unpadded(self.inputs.named(id_data, ids, "id_data"), "id_data")
            scores, _, keys = self._judge(given, "id_data", identified=identified)
        with ranks.agreed():
            options = (self.epsilon, tpr, guarantee, confidence, distinct)
            identity = "" if ranks.alone else self._identity(*options)
        ranks.check_same(identity, "guards or options")
        scores = ranks.joined(scores.cpu().double())
        keys = ranks.joined(torch.from_numpy(keys.view(np.int64))).numpy().view(np.uint64)
        is_identified = bool(ranks.joined(torch.tensor([all(identified)])).all())
        fresh = (Known() if distinct else self._tuned_on).unused(keys, is_identified)
        kept, left_out = int(fresh.sum()), int((~fresh).sum())
        if kept < (needed := needed_samples(tpr, guarantee, confidence)):
            used = f" ({left_out} more were used by tune)" if left_out else ""
            cure = f"at least {needed} are needed that neither training nor tune has used"
            raise InputError(f"id_data: {kept} samples{used} cannot promise tpr={tpr:g}; {cure}")
        known = Known.of(keys[fresh.numpy()], is_identified)
        trained_on = None if distinct else self.fitted_on.shared(known)
        seen = 0 if trained_on is None else trained_on.count
        self.calibration = Calibration(scores[fresh], tpr, guarantee, confidence, left_out, seen)
        if left_out:
            log.warning("calibrate: left out %d of %d samples, which tune had used", left_out, len(keys))
        findings = [*health.of_calibration(self.calibration.scores, self._training_scores, trained_on)]
        findings += [] if distinct else health.of_kinds(self.fitted_on, self._tuned_on, known.identified)
        counts, n_classes = np.unique(keys, return_counts=True)[1], self.detector.n_classes_
        copies = health.of_counts(counts, n_classes, known.identified, "id_data")
        contents = len(counts) if self.inputs.model is not None or not known.identified else 0  # ids say nothing of it
        if 0 < contents <= n_classes:  # answers; that a method ties all scores is seen by fit
            findings += health.of_scores(self.calibration.scores, contents, n_classes, "calibration")
        return self._report("calibrate", [*findings, *copies])

    def score(self, data: Any, *, on_error: OnError = "raise", group: Group = None) -> Array:
        """Scores (N,) of a tensor, a loader, or logits: higher is more out-of-distribution.

        Parameters
        ----------
        data, on_error
            As in `predict`.
        group : ProcessGroup or False, optional
            As in `fit`: every rank gets the scores of all, rank after rank; of loaders that have a
            `DistributedSampler` in the order of the data set.
        """
        ranks, (scores, _, _), places = Ranks(group), _NOTHING, torch.empty(0, dtype=torch.int64)
        identity = ""
        with ranks.agreed():
            self._check_fitted("score")
            self.inputs.check_weights(strict=False)
            mine = data if ranks.alone else unpadded(data, "x")
            scores, _, _ = self._judge(mine, refused=collector(on_error))
            places = places if ranks.alone else sampled_places(data)[: len(scores)]
        with ranks.agreed():
            identity = "" if ranks.alone else self._identity(self.epsilon)
        ranks.check_same(identity, "guards")
        scores, places = ranks.joined(scores if ranks.alone else scores.double()), ranks.joined(places)
        if len(places) == len(scores):
            scores = scores[places.argsort(stable=True).to(scores.device)]
        return as_kind(scores, is_numpy(data))

    def predict(self, data: Any, *, on_error: OnError = "raise") -> Verdict:
        """Judge a tensor, a loader, or logits; the guard must be calibrated.

        Parameters
        ----------
        data : loader, tensor, or array of logits
            Samples to judge.
        on_error : {"raise", "refuse"}
            A row with NaN, and a sample on which the loader's data set or the model fails, are an error; or they are
            refused with the smallest p-value, and `Verdict.reason` says why. What concerns all samples is an error.
        """
        self._check_fitted("predict")
        calibration, refused = self._calibrated("predict"), collector(on_error)
        self.inputs.check_weights(strict=False)
        score, label, _ = self._judge(data, refused=refused)
        return Verdict.of(score, label, calibration, refused, self.classes, to_numpy=is_numpy(data))

    def explain(self, data: Any, *, top: int = 5) -> Explanation:
        """Say why: what each layer added to the score, the nearest or likeliest classes, the channels that stand out.

        Parameters
        ----------
        data : tensor, loader, or array of logits
            Samples to explain.
        top : int
            Channels to name, for each layer; and likeliest classes.
        """
        self._check_fitted("explain")
        if top < 1:
            raise InputError(f"top: must be a number of channels, at least 1; got {top!r}")
        self.inputs.check_weights(strict=False)
        whole = Outputs.concat(self._each(data, "x", lambda _, outputs, __: outputs))  # type: ignore[arg-type]
        with torch.no_grad():
            return explain(self.detector, whole, top, to_numpy=is_numpy(data), classes=self.classes)

    def _each(
        self, data: Any, name: str, take: Callable[[Outputs, Outputs, Any], T], refused: Refused | None = None,
        *, all_lost: bool = False,
    ) -> list[T | LostError]:  # fmt: skip
        """What `take` returns for each batch, of its clean outputs, those to score, and the batch itself.

        That no sample can be read is an error, unless `all_lost` says that it may be so.
        """
        is_loader = not (isinstance(data, Outputs) or is_batch(data))  # it may draw random numbers
        results: list[T | LostError] = []
        with random_state_kept() if is_loader else nullcontext(), torch.no_grad():
            for number, batch in enumerate(self.inputs.batches(data, name, refused=refused)):
                try:
                    with self.inputs.at(name, number):
                        clean, (outputs,) = self.inputs.stepped(batch, self.detector, (self.epsilon,))
                        results.append(take(clean, outputs, batch))
                except LostError as lost:  # noqa: PERF203 (a batch is much work)
                    results.append(lost)
                    if not all_lost:
                        check_lost(results, name, refused, CHUNK)
        if not all_lost:
            check_lost(results, name, refused, 2)
        return results

    def _judge(
        self, data: Any, name: str = "x", *, identified: list[bool] | None = None, refused: Refused | None = None,
        all_lost: bool = False,
    ) -> tuple[Tensor, Tensor, Keys]:  # fmt: skip
        """Scores and labels of all samples; with a list, their keys, and whether ids made them; `refused` is filled."""

        def judge(clean: Outputs, outputs: Outputs, batch: Any) -> tuple[Tensor, Tensor, Keys]:
            score = self.detector._score(self.detector._scorable(outputs))
            if identified is None:
                return score, clean.logits.argmax(dim=1), NO_KEYS
            identified.append(batch.identified or not len(batch))
            return score, clean.logits.argmax(dim=1), self.inputs.keys(batch)

        parts = self._each(data, name, judge, refused, all_lost=all_lost)
        some = next((part for part in parts if not isinstance(part, LostError)), _NOTHING)
        whole = [(*(t.new_empty(len(p)) for t in some[:2]), NO_KEYS) if isinstance(p, LostError) else p for p in parts]
        scores, labels, keys = zip(*whole, strict=True)
        score, label = torch.cat(scores), torch.cat(labels)
        if refused:
            rows = torch.tensor(list(refused), device=score.device)
            score[rows], label[rows] = torch.inf, -1
        return score, label, np.concatenate(keys)

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write the guard to one safetensors file. The training sample stays out: `tune` needs `fit` after `load`."""
        from igeood.guard.file import save  # noqa: PLC0415 (it builds guards)

        self._check_fitted("save")
        save(self, path)

    def export(self, path: str | os.PathLike[str], example: Any = None) -> None:
        """Write model, score, p-value and verdict as one ONNX graph, which runs without torch (extra `onnx`).

        The file appears once onnxruntime has run the graph on the example, and on 1 and 3 of its samples, and agreed
        with `predict`. Rows that cannot be read are refused in it, with the label −1.

        Parameters
        ----------
        path : path
            The file; one that is there is replaced if it is such a graph.
        example : what `predict` takes
            Inputs, for their names and shapes; the number of samples stays free, and of token ids that of tokens too.
            A guard without a model can do without.
        """
        from igeood.guard.export import export  # noqa: PLC0415 (it reads guards)

        self._check_fitted("export")
        self._calibrated("export")
        export(self, path, example)

    def _check_fitted(self, what: str) -> None:
        if not hasattr(self.detector, "n_classes_"):
            how = "fit(logits, labels)" if self.inputs.model is None else "fit(train_loader)"
            raise NotReadyError(f"{what}: the guard is not fitted yet; call {how} first")

    def _calibrated(self, what: str) -> Calibration:
        if self.calibration is None:
            raise NotReadyError(f"{what}: no threshold yet; call calibrate with held-out samples first")
        return self.calibration

    def __repr__(self) -> str:
        step = f", epsilon={self.epsilon:g}" if self.access != "black box" else ""
        layers = f", layers={self.layers}" if self.layers else ""
        promise = self.calibration.promise if self.calibration else "not calibrated"
        return f"Guard({self.access}: {self.detector!r}{layers}{step}; {promise})"
