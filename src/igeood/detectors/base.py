"""What every detector is: it learns from a summary of in-distribution outputs, then scores outputs."""

from abc import ABC
from collections.abc import Mapping
from dataclasses import fields
from typing import Any, ClassVar

from torch import Tensor
from typing_extensions import Self

from igeood.detectors.options import checked_option, options
from igeood.errors import Finding, InputError, NotReadyError
from igeood.outputs import Array, ArrayLike, Outputs
from igeood.summary import Needs, Summary
from igeood.summary.needs import check_covers

StepScores = list[tuple[Tensor, tuple[str, ...] | None]]
_NO_STATE = ("n_classes_", "widths_", "findings_")


@options
class Detector(ABC):  # noqa: B024 (a subclass overrides score, or terms)
    """Scores samples: **the higher, the more out-of-distribution**, for every detector.

    A detector sees `Outputs`, never a model. A subclass says in `needs` what they must hold, and overrides `learn` and
    `score`, or `terms` where its score is a sum of parts. The class decorator `@igeood.options` makes options of its
    annotated attributes. Attributes that `learn` sets and that end in an underscore, tensors and dicts of tensors by
    layer, are saved and loaded.

    Attributes
    ----------
    n_classes_ : int
        C, the width of the logits.
    widths_ : dict of int
        Blocks of features that are read, in order, and their widths.
    findings_ : list of Finding
        What the user should know of this fit.
    """

    needs: ClassVar[Needs] = Needs()
    probabilities = False  # an option of some: the arrays hold probabilities, not logits

    def __post_init__(self) -> None:
        for option in fields(self):
            setattr(self, option.name, checked_option(option.name, getattr(self, option.name), option.type))

    def fit(self, outputs: Outputs | ArrayLike, labels: ArrayLike | None = None) -> Self:
        """Learn from in-distribution samples: `Outputs`, or logits (N, C) with their true classes (N,).

        A fit that fails leaves the detector as it was.
        """
        summary = Summary.of(self.read(outputs, labels), self.needs)
        self.__dict__ = vars(type(self)(**self.params()).learn(summary))
        return self

    def __call__(self, outputs: Outputs | ArrayLike) -> Array:
        """Scores (N,) of `Outputs` or of logits (N, C), in the kind of array that came in."""
        batch = self.read(outputs)
        batch.check_valid()
        self.check(batch)
        return batch.like(self.score(batch))

    def learn(self, summary: Summary) -> Self:
        """Learn from a summary of in-distribution samples; what was learnt before is forgotten."""
        check_covers(summary.described, self.needs.describe(), type(self).__name__)
        self._start(summary.n_classes, summary.widths)
        missing = (summary.counts == 0).nonzero()[:, 0].tolist() if self.needs.labels else []
        if missing:
            names = ", ".join(map(str, missing[:5])) + (", …" if len(missing) > 5 else "")
            message = f"labels: {len(missing)} of {len(summary.counts)} classes have no training row: {names}"
            cure = "add rows of them: no input counts as near to them"
            self.findings_.append(Finding("class-without-rows", "warning", message, cure))
        return self

    def _start(self, n_classes: int, widths: Mapping[str, int]) -> None:
        """Forget what was learnt, and read these classes and blocks."""
        self.__dict__ = vars(type(self)(**self.params()))
        self.n_classes_ = n_classes
        self.widths_ = {block: widths[block] for block in self.needs.blocks(widths)}
        self.findings_: list[Finding] = []

    def score(self, outputs: Outputs) -> Tensor:
        """Scores (N,) of outputs that have what the detector was fitted on; differentiable."""
        return self.terms(outputs).sum(dim=1)

    def terms(self, outputs: Outputs) -> Tensor:
        """The parts of the scores, (N, P), which add up to them."""
        return self.score(outputs)[:, None]

    @property
    def term_names(self) -> list[str]:
        """What the P terms are."""
        return ["output"]

    def explain(self, outputs: Outputs, top: int) -> dict[str, Any]:  # noqa: ARG002
        """Further reasons for the scores: fields of `igeood.guard.explain.Explanation`."""
        return {}

    def step_scores(self, outputs: Outputs) -> StepScores:
        """What one input step should lower: scores (N,), each with the layers that are read after its step.

        None means everything: the logits and all layers are those of the one stepped input.
        """
        return [(self.score(outputs), None)]

    @property
    def softmax(self) -> "Detector | None":
        """The detector whose temperature `tune` chooses: itself, a part of it, or none."""
        return self if "temperature" in self.params() else None

    def at_temperature(self, temperature: float, summary: Any, near: "Detector | None" = None) -> Self:  # noqa: ARG002
        """The same detector at another temperature; with one of a neighbouring temperature it may learn roughly."""
        other = type(self)(**{**self.params(), "temperature": temperature})
        if summary is None:  # a loaded detector that learns nothing from samples
            return other.load_state(self.state(), self.n_classes_, self.widths_)
        return other.learn(summary)

    def learn_weights(self, id_outputs: Outputs, ood_outputs: Outputs, **choices: Any) -> Any:
        """Learn from validation samples how to weight terms, in place; None for a detector without weights."""
        del id_outputs, ood_outputs, choices

    def read(self, outputs: Outputs | ArrayLike, labels: ArrayLike | None = None) -> Outputs:
        """Outputs whose logits are logits: where probabilities were declared, their logarithm."""
        batch = Outputs.of(outputs, labels)
        return batch.from_probabilities() if self.probabilities else batch

    def check(self, outputs: Outputs) -> None:
        """Raise unless the detector is fitted, and the outputs have what it was fitted on."""
        who = type(self).__name__
        if not hasattr(self, "n_classes_"):
            raise NotReadyError(f"{who} is not fitted yet", cure="call fit(logits, labels) first")
        if outputs.n_classes != self.n_classes_:
            problem = f"{outputs.n_classes} columns, {who} was fitted on {self.n_classes_}"
            raise InputError(problem, argument="logits", cure="give logits of the same model")
        for block, value in outputs.only(self.widths_).features.items():
            if value.shape[1] != self.widths_[block]:
                problem = f"{value.shape[1]} channels, {who} was fitted on {self.widths_[block]}"
                raise InputError(problem, argument=f"features[{block!r}]")

    def last_features(self, outputs: Outputs) -> Tensor:
        """Features of the last block that is read, (N, k)."""
        return outputs.features[next(reversed(self.widths_))]

    def params(self) -> dict[str, Any]:
        """Options by name."""
        return {option.name: getattr(self, option.name) for option in fields(self)}

    def state(self) -> dict[str, Tensor]:
        """Fitted tensors by name, those of a layer as `name:layer`; to save with `params`, classes and widths."""
        tensors: dict[str, Tensor] = {}
        for name, value in vars(self).items():
            if name.endswith("_") and name not in _NO_STATE:
                tensors |= {f"{name}:{k}": t for k, t in value.items()} if isinstance(value, dict) else {name: value}
        for name, value in tensors.items():
            if not isinstance(value, Tensor):
                raise InputError(f"{name} is {type(value).__name__}", argument="detector", cure="keep tensors by layer")
        return tensors

    def load_state(self, state: Mapping[str, Tensor], n_classes: int, widths: Mapping[str, int]) -> Self:
        """Take over what `state` returned, in place of `fit`."""
        self._start(n_classes, widths)
        for key, tensor in state.items():
            name, _, layer = key.partition(":")
            place = vars(self).setdefault(name, {}) if layer else vars(self)
            place[layer or name] = tensor
        return self
