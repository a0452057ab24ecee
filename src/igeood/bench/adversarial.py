"""Adversarial samples by the fast gradient sign method, which stand for OOD samples where there are none."""

import math
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

from igeood.model.batch import Batch, batches
from igeood.model.reader import Reader
from igeood.model.step import Channels, check_channels, check_epsilon, input_gradients, per_channel, signed_step


class Fgsm:
    """Adversarial samples by one step that raises the cross entropy: for `Guard.tune(id_data, ood=…)`.

    Each iteration makes them anew, batch by batch. They are clamped to pixels of [0, 1] if the normalisation's mean is
    known, or if the inputs lie there themselves.

    Parameters
    ----------
    model : Module
        The classifier.
    loader : iterable of batches
        Clean samples; without labels, the classifier's answers stand for them.
    epsilon : float
        Size of the step, in pixel units.
    mean, std : float or one for each channel
        Of the input's normalisation.

    Attributes
    ----------
    samples : int
        How many the last whole pass gave.
    linf : float
        Their mean L∞ distance from the clean ones, in the input's units.
    accuracy : float
        The classifier's accuracy on them.
    """

    def __init__(
        self, model: nn.Module, loader: Any, epsilon: float = 0.05, mean: Channels | None = None, std: Channels = 1.0
    ) -> None:
        check_epsilon(epsilon)
        self.reader = Reader(model)
        self.loader = loader
        self.epsilon = epsilon
        self.mean = None if mean is None else check_channels(mean, "mean")
        self.std = check_channels(std, "std", positive=True)
        self.samples = 0
        self.linf = math.nan
        self.accuracy = math.nan

    def __iter__(self) -> Iterator[Batch]:
        sizes = []
        is_right = []
        for clean in batches(self.loader, "loader"):
            batch = self.reader.place(clean)
            with torch.no_grad():
                outputs = self.reader(batch, labels=True)
            labels = outputs.predicted if outputs.labels is None else outputs.labels.to(outputs.logits.device)
            moved = batch.with_x(self._moved(batch, labels))
            with torch.no_grad():
                is_right.append(self.reader(moved).predicted == labels)
            sizes.append((moved.x - batch.x).abs().flatten(1).amax(dim=1))
            yield moved
        self.samples = sum(map(len, sizes))
        self.linf = float(torch.cat(sizes).double().mean())
        self.accuracy = float(torch.cat(is_right).double().mean())

    def _moved(self, batch: Batch, labels: Tensor) -> Tensor:
        """Inputs after a step that raises the cross entropy."""

        def objectives(x: Tensor) -> list[Tensor]:
            return [cross_entropy(self.reader(batch.with_x(x)).logits, labels.clone(), reduction="none")]

        x = batch.x
        (gradient,) = input_gradients(objectives, x)
        moved = signed_step(x, gradient, self.epsilon, self.std)
        is_image = self.std == 1.0 and len(x) > 0 and float(x.min()) >= 0.0 and float(x.max()) <= 1.0
        if self.mean is None and not is_image:
            return moved
        shift = per_channel(0.0 if self.mean is None else self.mean, x, "mean")
        scale = per_channel(self.std, x, "std")
        return torch.maximum(torch.minimum(moved, (1.0 - shift) / scale), -shift / scale)


fgsm = Fgsm
