r"""Residual flow (Zisselman & Tamar, 2020): a normalising flow learns what the Gaussian of each class leaves over."""

import math
from functools import cached_property
from typing import Literal, NamedTuple

import torch
from torch import Tensor
from torch.nn import functional
from typing_extensions import Self

import igeood
from igeood.detectors import Weighted
from igeood.detectors.gaussians import LayerDetector, Whitened, whiten
from igeood.errors import Finding, InputError
from igeood.geometry.precision import by_rows, wide
from igeood.outputs import Outputs
from igeood.summary import Summary

COUPLINGS = 10
BATCH = 128  # rows of each flow a step
HELD_OUT = 5  # one row of so many chooses the epoch
PATIENCE = 5  # epochs without a better one in any class, after which training stops
FEW = 100  # rows of a flow, below which it stays a Gaussian: the rows held out could not choose an epoch
MOST = 50_000_000  # parameters of a layer's flows (200 MB), above which classes share one


class Flows(NamedTuple):
    """Parameters of F flows on r = 2h directions; a coupling has two networks, of the shift and of the scale.

    Attributes
    ----------
    first, second, third : Tensor
        (10, F, 2, h + 1, r), (10, F, 2, r + 1, r) and (10, F, 2, r + 1, h): the last row of a layer is its bias.
    gain : Tensor
        (10, F, 1, h) factors of the scale.
    order : Tensor
        (5, r) the permutation after each pair of couplings.
    """

    first: Tensor
    second: Tensor
    third: Tensor
    gain: Tensor
    order: Tensor

    @classmethod
    def identity(cls, n_flows: int, rank: int, draw: torch.Generator) -> "Flows":
        """Flows that leave everything as it is: the last layers are 0."""
        half = rank // 2

        def uniform(n: int) -> Tensor:
            draws = torch.rand(COUPLINGS, n_flows, 2, n + 1, rank, generator=draw, dtype=torch.float32)
            return (2.0 * draws - 1.0) / math.sqrt(max(1, n))

        first = uniform(half)
        second = uniform(rank)
        third = first.new_zeros(COUPLINGS, n_flows, 2, rank + 1, half)
        gain = first.new_ones(COUPLINGS, n_flows, 1, half)
        orders = [torch.randperm(rank, generator=draw) for _ in range(COUPLINGS // 2)]
        return cls(first, second, third, gain, torch.stack(orders))


def log_density(u: Tensor, flows: Flows) -> Tensor:
    r"""Log density (F, n) of rows u (F, n, r), each under its flow.

    :math:`\log N(u'; 0, I) + \sum \log|\det|`, where u′ is u after ten affine couplings (RealNVP): one half of the
    directions is scaled and shifted by functions of the other, the halves in turn; all are permuted after each pair.
    The functions are computed in the precision of their parameters, all else in that of u.
    """
    volume = u.new_zeros(u.shape[:2])
    couplings = zip(*(value.unbind() for value in flows[:-1]), strict=True)
    for i, (first, second, third, gain) in enumerate(couplings):
        kept, moved = u.chunk(2, dim=2)  # (F, n, h)
        hidden = kept[:, None].to(first.dtype)  # (F, 1, n, h): for both networks
        for layer in (first, second):
            hidden = functional.leaky_relu(_linear(hidden, layer), 0.01)
        shift, size = _linear(hidden, third).to(u.dtype).unbind(dim=1)  # (F, n, h)
        log_scale = size.tanh() * gain
        u = torch.cat([moved * log_scale.exp() + shift, kept], dim=2)
        u = u[:, :, flows.order[i // 2]] if i % 2 else u
        volume = volume + log_scale.sum(dim=2)
    return volume - 0.5 * u.square().sum(dim=2) - 0.5 * u.shape[2] * math.log(2.0 * math.pi)


def _linear(x: Tensor, layer: Tensor) -> Tensor:
    return functional.pad(x, (0, 1), value=1.0) @ layer


def train(
    flows: Flows, u: Tensor, weights: Tensor, members: list[Tensor], *, epochs: int, rate: float, draw: torch.Generator
) -> Flows:
    """Flows of the highest density (by Adam), each of the epoch that is best on its held-out rows.

    Parameters
    ----------
    flows : Flows
        Where to start; a flow of fewer than 100 rows stays there.
    u, weights : Tensor
        (n, r) whitened residuals and (n,) what each row counts.
    members : list of Tensor
        For each flow the numbers of its rows, by key: every fifth one is held out.
    epochs, rate, draw
        Passes over the rows of the largest class, at most; the learning rate; and what orders the rows.
    """
    train_rows = _table([rows[torch.arange(len(rows)) % HELD_OUT != 1] for rows in members])
    held_rows = _table([rows[1::HELD_OUT] if len(rows) > 1 else rows for rows in members])
    is_enough = torch.tensor([len(rows) >= FEW for rows in members])
    best = [value.clone() for value in flows[:-1]]
    parameters = [value.clone().requires_grad_() for value in flows[:-1]]
    adam = torch.optim.Adam(parameters, rate, fused=True)  # ten times as fast as one by one

    def density(rows: Tensor) -> Tensor:
        """Mean log density of each flow's rows, (F,)."""
        share = weights[rows] / weights[rows].sum(dim=1, keepdim=True)
        return (share * log_density(u[rows], Flows._make([*parameters, flows.order]))).sum(dim=1)

    highest = density(held_rows).detach()
    last_better = 0
    for epoch in range(1, epochs + 1):
        shuffled = train_rows[:, torch.randperm(train_rows.shape[1], generator=draw)]
        for rows in torch.split(shuffled, BATCH, dim=1):
            adam.zero_grad()
            with torch.enable_grad():
                density(rows).sum().neg().backward()  # type: ignore[no-untyped-call]
            adam.step()
        with torch.no_grad():
            reached = density(held_rows)
        is_better = is_enough & (reached > highest)
        highest = torch.where(is_better, reached, highest)
        last_better = epoch if bool(is_better.any()) else last_better
        for value, now in zip(best, parameters, strict=True):
            value[:, is_better] = now.detach()[:, is_better]
        if epoch - last_better >= PATIENCE:
            break
    return Flows._make([*best, flows.order])


def _table(members: list[Tensor]) -> Tensor:
    """Numbers of rows (F, n), where n are those of the largest: the others' come again from the start."""
    n = max(map(len, members))
    return torch.stack([rows[torch.arange(n) % len(rows)] for rows in members])


@igeood.options
class FlowOptions(igeood.Detector):
    """Options of both classes below."""

    needs = igeood.Needs(layers="all", labels=True, sums="full", samples=("features",))
    epochs: int | Literal[0] = 10
    rate: float = 1e-3
    shared: bool | Literal["auto"] = "auto"
    seed: int | Literal[0] = 0


class FlowLayers(FlowOptions, LayerDetector):
    r"""Minus the log density of the likeliest class on each layer, :math:`-\max_y \log p_y(f)`.

    :math:`p_y` is the flow's density of the whitened residual :math:`W^\top(f - \mu_y)`. Without training it is a
    Gaussian's: twice the score is the Mahalanobis distance, but for a constant.

    Parameters
    ----------
    epochs, rate, shared, seed
        As in `ResidualFlow`.

    Attributes
    ----------
    mean_, whitening_ : dict of Tensor
        For each layer (C, k) class means and (k, r) a root of the tied covariance's pseudo-inverse. r is even.
    first_, second_, third_, gain_, order_ : dict of Tensor
        For each layer the parameters of its flows: see `Flows`. F is C, or 1 for a flow that the classes share.
    """

    def learn(self, summary: Summary) -> Self:
        """Whiten by the pooled covariance, and train the flows on the summary's sample."""
        super().learn(summary)
        roots = {layer: whiten(summary.sums[layer].covariance) for layer in self.widths_}
        self.whitening_ = {layer: root[:, root.shape[1] % 2 :].contiguous() for layer, root in roots.items()}
        if not any(root.numel() for root in self.whitening_.values()):
            problem = "training rows move in fewer than two directions on every layer"
            raise InputError(problem, argument="data", cure="give more rows, or layers with more channels")
        sample, weights = summary.samples["features"].outputs()
        draw = torch.Generator().manual_seed(self.seed)
        trained = {layer: self._train(layer, sample, weights.float(), draw) for layer in self.widths_}
        for name in Flows._fields:
            setattr(self, f"{name}_", {layer: getattr(flows, name) for layer, flows in trained.items()})
        counts = torch.bincount(torch.as_tensor(sample.labels), minlength=self.n_classes_)
        few = (counts < FEW).nonzero()[:, 0].tolist()
        if self.epochs and few and self.shared is not True:
            message = f"class {few[0]} has fewer than {FEW} training rows in the sample ({len(few)} classes do)"
            cure = "give more, or share one flow: without, its density stays a Gaussian"
            self.findings_.append(Finding("few-rows", "info", message, cure))
        return self

    def _train(self, layer: str, sample: Outputs, weights: Tensor, draw: torch.Generator) -> Flows:
        """The flows of a layer, from training rows and what each counts."""
        labels = torch.searchsorted(self.classes_, torch.as_tensor(sample.labels))
        n_classes = len(self.classes_)
        rank = self.whitening_[layer].shape[1]
        if rank == 0:
            message = f"layer {layer!r}: training rows move in fewer than two directions"
            self.findings_.append(Finding("flat-layer", "info", message, "it adds nothing"))
        u = ((wide(sample.features[layer]) - self.mean_[layer][labels]) @ self.whitening_[layer]).float()
        is_shared = 4 * COUPLINGS * rank**2 * n_classes > MOST if self.shared == "auto" else self.shared
        groups = torch.zeros_like(labels) if is_shared else labels
        members = [(groups == group).nonzero()[:, 0] for group in range(1 if is_shared else n_classes)]
        flows = Flows.identity(len(members), rank, draw)
        if self.epochs == 0 or rank == 0 or max(map(len, members)) < FEW:
            return flows
        return train(flows, u, weights, members, epochs=self.epochs, rate=self.rate, draw=draw)

    @cached_property
    def _classes(self) -> dict[str, tuple[Tensor, ...]]:
        """Origin, whitening and whitened class means of each layer."""
        return {layer: Whitened(self.mean_[layer], self.whitening_[layer]).tensors[:3] for layer in self.widths_}

    def _log_densities(self, x: Tensor, layer: str) -> Tensor:
        """Log density (N, C) of x (N, k) under each class."""
        origin, whitening, centres = (tensor.to(x.device) for tensor in self._classes[layer])
        flows = Flows(*(getattr(self, f"{name}_")[layer].to(x.device) for name in Flows._fields))
        n_flows = flows.gain.shape[1]

        def of_rows(rows: Tensor) -> Tensor:
            u = (wide(rows) - origin) @ whitening - centres[:, None]  # (C, n, r)
            n = rows.shape[0]
            grouped = u.reshape(n_flows, len(centres) // n_flows * n, u.shape[2])  # a shared flow takes them all
            return log_density(grouped, flows).reshape(len(centres), n).T

        return by_rows(of_rows, x, centres.numel() // 16)  # a matmul wants many rows

    def layer_score(self, outputs: Outputs, layer: str) -> tuple[Tensor, Tensor]:
        """Minus the highest log density, and its class."""
        highest, nearest = self._log_densities(outputs.features[layer], layer).max(dim=1)
        return -highest, nearest

    def channel_parts(self, x: Tensor, nearest: Tensor, layer: str) -> Tensor:
        """As of the Gaussian that the flow starts from."""
        whitening = self.whitening_[layer].to(x.device)
        directions: Tensor = whitening / torch.linalg.vector_norm(whitening, dim=0)  # (k, r), orthonormal
        apart: Tensor = (wide(x) - self.mean_[layer].to(x.device)[nearest]) @ whitening @ directions.T
        return apart.square()


@igeood.register("residual-flow", title="Residual flow", style=("#0072B2", "--", "*"))
class ResidualFlow(FlowOptions, Weighted):
    """Residual flow (Zisselman & Tamar, 2020): log densities of all layers.

    They are summed once standardised, or weighted by `learn_weights`. For each layer and class a RealNVP of ten affine
    couplings starts as the class's Gaussian with tied covariance, and is trained on the residuals of the summary's
    sample; every fifth row is held out, and chooses the epoch. A coupling halves the directions: of an odd number the
    one that varies least is left out.

    Parameters
    ----------
    epochs : int
        Passes over the training rows, at most; 0 is the Mahalanobis detector.
    rate : float
        Adam's learning rate.
    shared : bool or "auto"
        One flow for the residuals of all classes, which takes C times less memory. "auto": where a layer's flows would
        have more than 50 million parameters, 40 k² for each class.
    seed : int
        Of the flows' first weights and the order of the rows.
    """

    standard_rows = 100  # to score them takes longer than anything else

    def make_parts(self) -> dict[str, igeood.Detector]:
        """The layers' densities."""
        return {"layers": FlowLayers(**self.params())}
