"""DeConf-C, "generalized ODIN": the cosine in the decomposed head of a network."""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

import igeood
from igeood.geometry.precision import wide
from igeood.model.layers import Call, Trace
from igeood.outputs import Outputs

EPSILONS = (0.0, 0.0025, 0.005, 0.01, 0.02, 0.04, 0.08)  # the paper's


def cosines(trace: Trace) -> list[str]:
    """The module `h` of the head, which returns one cosine for each class."""
    calls = {trace.names[module]: call for module, call in trace.calls.items()}
    return [
        name for name, call in calls.items() if f".{name}".endswith(".h") and call.output.shape == trace.logits.shape
    ]


def h(call: Call) -> Tensor:
    """What the module returned, (N, C)."""
    return call.output.clone()


@igeood.register("deconf-c", title="DeConf-C", style=("#CC79A7", "--", "h"), tunes=False)
class DeConfC(igeood.Detector):
    r""":math:`-\max_i h_i(x)` of a classifier whose logits are :math:`h_i(x) / g(x)` (Hsu et al., 2020).

    The model has a module `h` in its head, as one that `igeood train --head deconf-c` has trained; arrays are
    `Outputs(f, {"|h": h})`. `mean_scores` tells how large the input step should be.
    """

    needs = igeood.Needs(layers=cosines, pool=h)

    def score(self, outputs: Outputs) -> Tensor:
        """Minus the largest cosine."""
        return -wide(self.last_features(outputs)).amax(dim=1)


def mean_scores(guard: igeood.Guard, id_data: Any, epsilons: Sequence[float] = EPSILONS) -> dict[float, float]:
    """Mean score of in-distribution samples after each size of the input step: DeConf-C takes the size of the lowest.

    No OOD sample is needed, and the guard is not changed: make another one with that `epsilon`.

    Parameters
    ----------
    guard : Guard
        With a model, fitted.
    id_data
        In-distribution samples, as `Guard.predict` takes them: not those to calibrate on.
    epsilons : sequence of float
        Sizes to try, in pixel units.
    """
    total = torch.zeros(len(epsilons), dtype=torch.float64)
    n = 0
    for batch in guard.source.items(id_data, name="id_data"):
        outputs = guard.source.step(batch, guard.detector, epsilons)
        total += torch.stack([guard.detector.score(each).sum().cpu() for each in outputs])
        n += len(batch)
    return dict(zip(epsilons, (total / n).tolist(), strict=True))
