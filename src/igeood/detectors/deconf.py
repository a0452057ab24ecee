"""DeConf-C, "generalized ODIN": the cosine that a network with a decomposed head returns beside its logits."""

from typing import ClassVar

from torch import Tensor

from igeood.detectors.base import Detector
from igeood.detectors.registry import register
from igeood.errors import UnsuitedError
from igeood.geometry.precision import wide
from igeood.outputs import Outputs
from igeood.summary import Needs, Summary


@register("deconf-c", title="DeConf-C", style=("#CC79A7", "--", "h"), tunes=False)
class DeConfC(Detector):
    r""":math:`-\max_i h_i(x)` of a classifier whose logits are :math:`h_i(x) / g(x)` (Hsu et al., 2020).

    The model returns `{"logits": f, "h": h}`, as one that `igeood train --head deconf-c` has trained; arrays are
    `Outputs(f, {"|h": h})`. In a grey box `tune(id_data)` chooses the input step: the size after which the mean of
    :math:`\max_i h_i` over in-distribution samples is largest. No OOD sample is needed.
    """

    needs = Needs(returns=("h",))
    id_steps: ClassVar[tuple[float, ...]] = (0.0, 0.0025, 0.005, 0.01, 0.02, 0.04, 0.08)  # the paper's

    def _learn(self, summary: Summary) -> None:  # noqa: ARG002
        if not self.widths_:
            have = "give a model that returns 'h' beside its logits (igeood train --head deconf-c), or arrays with '|h'"
            raise UnsuitedError(f"outputs: no features to learn from; {have}")

    def _score(self, batch: Outputs) -> Tensor:
        return -wide(self._last_features(batch)).amax(dim=1)
