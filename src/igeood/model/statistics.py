"""Statistics of feature maps: what a reader keeps of a layer's features (N, k, ...), (N, m).

Each is a function of the module, the features and their layout: see `igeood.model.layers.Call`.
"""

from collections.abc import Callable

import torch
from torch import Tensor, nn

from igeood.errors import UnsuitedError
from igeood.geometry.precision import by_rows, wide

ORDERS = 10  # of Gram matrices


def mean(module: nn.Module, features: Tensor, layout: str) -> Tensor:
    """The mean over all axes but samples and channels, (N, k); of two axes a copy, since the model may go on in place.

    Examples
    --------
    >>> mean(nn.Identity(), torch.arange(6.0).reshape(1, 3, 2), "last")
    tensor([[2., 3.]])
    >>> mean(nn.Identity(), torch.arange(6.0).reshape(1, 3, 2), "second")
    tensor([[0.5000, 2.5000, 4.5000]])
    """
    del module
    if features.ndim == 2:
        return features.clone()
    channels = features.ndim - 1 if layout == "last" else 1
    return features.mean(dim=[axis for axis in range(1, features.ndim) if axis != channels])


def gram(module: nn.Module, features: Tensor, layout: str) -> Tensor:
    r"""Row sums of Gram matrices of the orders 1 to 10, (N, 10 k): those of order 1 first (Sastry & Oore, 2020).

    For a map F (k, S), :math:`g_i^p = \sqrt[p]{\sum_s F_{is}^p R_s}` with :math:`R_s = \sum_j F_{js}^p` and a root that
    keeps the sign: no matrix (k, k) is formed. Powers are those of F over its largest value in the sample, in float64,
    so that they neither overflow nor vanish.
    """
    del module
    return by_rows(lambda rows: _gram_rows(_maps(rows, layout)), features, features[:1].numel())


def _gram_rows(maps: Tensor) -> Tensor:
    tiny, wide_maps = torch.finfo(torch.float64).tiny, wide(maps)
    largest = wide_maps.detach().abs().amax(dim=(1, 2), keepdim=True).clamp(min=tiny)  # (n, 1, 1)
    unit = wide_maps / largest
    power, roots = torch.ones_like(unit), []
    for order in range(1, ORDERS + 1):
        power = power * unit
        total = (power.sum(dim=2)[:, None] @ power)[:, 0]  # (n, k)
        roots.append(total.sign() * total.abs().clamp(min=tiny) ** (1 / order))  # without the clamp 0 has no gradient
    return (torch.cat(roots, dim=1) * largest[:, 0].square()).to(maps.dtype)


def moments(module: nn.Module, features: Tensor, layout: str) -> Tensor:
    r"""Mean and deviation of a batch norm's input as its running statistics see them, (N, 2 k): all means first.

    For channel i, :math:`m_i = (\bar a_i - \mu_i)/\sqrt{v_i + \epsilon}` and
    :math:`s_i = \operatorname{std}(a_i)/\sqrt{v_i + \epsilon}` over positions (1/S). A single position, as after
    pooling, has no deviation: s is left out there by being 1, as the running statistics expect.
    """
    running = running_statistics(module)
    if running is None:
        raise UnsuitedError(f"layers: {type(module).__name__} keeps no running statistics; name batch norms that do")
    centre, scale = (value.to(features) for value in running)  # (k,)
    return by_rows(lambda rows: _moment_rows((_maps(rows, layout) - centre) / scale), features, features[:1].numel())


def _moment_rows(maps: Tensor) -> Tensor:
    middle = maps.mean(dim=1)
    # a vector norm: unlike std, its gradient at a constant channel is 0, not NaN
    spread = torch.linalg.vector_norm(maps - middle[:, None], dim=1) / maps.shape[1] ** 0.5
    return torch.cat([middle, spread if maps.shape[1] > 1 else torch.ones_like(spread)], dim=1)


def running_statistics(module: nn.Module) -> tuple[Tensor, Tensor] | None:
    """A batch norm's running mean and deviation, each (k,); None for a module that keeps none."""
    centre, variance = (getattr(module, name, None) for name in ("running_mean", "running_var"))
    if not isinstance(centre, Tensor) or not isinstance(variance, Tensor):
        return None
    return centre, (variance + float(getattr(module, "eps", 0.0))).sqrt()


def _maps(features: Tensor, layout: str) -> Tensor:
    """Features as (n, S, k), in whose memory channels stand side by side; of two axes S is 1."""
    if features.ndim == 2:
        return features[:, None]
    return (features if layout == "last" else features.movedim(1, -1)).flatten(1, -2).contiguous()


STATISTICS: dict[str, Callable[[nn.Module, Tensor, str], Tensor]] = {"mean": mean, "gram": gram, "moments": moments}
OF_INPUTS = ("moments",)  # statistics of what a layer is given; the others are of what it returns
