"""The probe: a regression on all that the network says, for users who have OOD samples."""

import copy
from dataclasses import replace
from functools import cached_property

import numpy as np
import torch
from torch import Tensor
from typing_extensions import Self

from igeood.detectors.base import Detector
from igeood.detectors.evidence import Evidence
from igeood.detectors.gaussians import IgeoodFeatures
from igeood.detectors.logits import IgeoodLogits
from igeood.detectors.registry import register
from igeood.detectors.weighted import Weighted
from igeood.errors import UnsuitedError
from igeood.geometry.precision import wide
from igeood.metrics import Evaluation
from igeood.outputs import Outputs
from igeood.summary import Needs, Summary

TINY = 1e-300


def signed_roots(z: Tensor) -> Tensor:
    r"""Signed roots :math:`\operatorname{sign}(z_j)\sqrt{|z_j|/\sum_i|z_i|}`, (N, k); a row of zeros stays as it is."""
    z = wide(z)
    z = torch.where(z == 0, 0.0, z.abs().clamp(min=TINY).sqrt().copysign(z))  # at 0 the root has no gradient
    length: Tensor = torch.linalg.vector_norm(z, dim=1, keepdim=True)
    return z / length.clamp(min=TINY**0.5)


class LogitColumns(Detector):
    """Each logit as a column."""

    @property
    def term_names(self) -> list[str]:
        """What the columns are."""
        return [f"logit {i}" for i in range(self.n_classes_)]

    def terms(self, outputs: Outputs) -> Tensor:
        """The logits."""
        return outputs.logits.double().clamp(min=-1e4, max=1e4)  # a masked class is far, not infinitely far


class RootColumns(Detector):
    r"""Each layer's features as columns, :math:`\operatorname{sign}(z_j)\sqrt{|z_j|/\sum_i|z_i|}`.

    Those of layers with negative entries are two columns each: the positive and the negative part.
    """

    needs = Needs(layers="all", samples=("features",))

    def learn(self, summary: Summary) -> Self:
        """See which layers have negative entries."""
        super().learn(summary)
        if not self.widths_:
            raise UnsuitedError("the model has none but its head", argument="layers", cure="use 'evidence'")
        self.signed_ = {layer: torch.tensor(False) for layer in self.widths_}
        for rows, _ in summary.samples["features"].batches():
            self.signed_ = {layer: known | (rows.features[layer] < 0).any() for layer, known in self.signed_.items()}
        return self

    @cached_property
    def _is_signed(self) -> dict[str, bool]:
        return {layer: bool(signed) for layer, signed in self.signed_.items()}

    @property
    def term_names(self) -> list[str]:
        """What the columns are."""
        parts = {layer: ("+", "-") if self._is_signed[layer] else ("",) for layer in self.widths_}
        return [f"{layer}[{i}]{sign}" for layer, k in self.widths_.items() for sign in parts[layer] for i in range(k)]

    def terms(self, outputs: Outputs) -> Tensor:
        """The roots of the features' shares."""
        roots = {layer: signed_roots(outputs.features[layer]) for layer in self.widths_}
        parts = [(r.clamp(min=0), -r.clamp(max=0)) if self._is_signed[layer] else (r,) for layer, r in roots.items()]
        return torch.cat([part for pair in parts for part in pair], dim=1)


class LayerColumns(IgeoodFeatures):
    """FR_ℓ of the rows that the evidence learns from."""

    needs = replace(Evidence.needs, layers="all", samples=())

    def learn(self, summary: Summary) -> Self:
        """Take over class means and pooled deviations of these rows (Eq. 8)."""
        raw = copy.copy(summary)
        raw.sums = {layer: sums.raw for layer, sums in summary.sums.items()}
        return super().learn(raw)


@register("probe", title="Probe", style=("#D55E00", "-", "X"), tunes="only")
class Probe(Weighted):
    """Logistic regression on the terms of the evidence, FR₀, FR_ℓ, the logits and every layer's features.

    Before `learn_weights` it is the evidence. It learns the kind of OOD sample that it is shown, and knows other kinds
    less well.
    """

    needs = replace(Evidence.needs, layers="all", samples=("logits", "features"))
    strengths = tuple(float(c) for c in np.logspace(-4, -1, 7))

    def make_parts(self) -> dict[str, Detector]:
        """The columns' detectors."""
        parts = {"output": IgeoodLogits(), "layers": LayerColumns(), "logits": LogitColumns(), "roots": RootColumns()}
        return {"evidence": Evidence(), **parts}

    @property
    def softmax(self) -> Detector | None:
        """None: FR₀ is one column among many, and keeps its temperature."""
        return None

    def standardise(self, summary: Summary) -> None:
        """The evidence as it is: its terms have their own scale."""
        del summary
        terms = len(self.parts["evidence"].term_names)
        columns = len(self.term_names)
        self.weights_ = (torch.arange(columns) < terms).double()
        self.centre_ = torch.zeros(columns).double()
        self.scale_ = torch.ones(columns).double()

    def quality(self, rates: Evaluation) -> float:
        """AUROC: by it strengths are chosen."""
        return rates.auroc
