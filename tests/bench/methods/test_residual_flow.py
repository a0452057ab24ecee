"""Residual flow: it starts as Mahalanobis, training raises the density of new rows, and is the same each time."""

import numpy as np
import pytest
import torch

import igeood
from igeood.bench.methods.residual_flow import COUPLINGS, FlowLayers, Flows, log_density
from igeood.outputs import Outputs

LOG_2_PI = float(np.log(2 * np.pi))


def bananas(n, seed, width=4, classes=2):
    """Two classes of curved clouds, far from Gaussian: the second channel is about the square of the first."""
    draw = np.random.default_rng(seed)
    labels = np.arange(n) % classes
    x = draw.normal(size=(n, width))
    x[:, 1] = 0.2 * x[:, 1] + x[:, 0] ** 2
    x[:, 0] += 9.0 * labels
    return Outputs(np.eye(classes)[labels] * 5, {"layer": x}, labels)


def test_without_training_it_is_mahalanobis(known):
    flow = FlowLayers(epochs=0).fit(known.train)
    scores = flow.terms(known.test)
    for column, (layer, rank) in enumerate((("early", 6), ("block.late", 8))):  # of 9, the least direction is left out
        x, means = known.train.features[layer].double(), flow.mean_[layer]
        apart = x - means[known.train.labels]
        values, vectors = torch.linalg.eigh(apart.T @ apart / len(x))
        kept = (vectors / values.sqrt())[:, -rank:]
        away = (known.test.features[layer].double()[:, None] - means) @ kept
        expected = away.square().sum(dim=2).amin(dim=1)
        torch.testing.assert_close(2 * scores[:, column] - rank * LOG_2_PI, expected, rtol=1e-10, atol=1e-10)


@pytest.mark.parametrize("shared", [False, True])
def test_training_raises_the_density_of_new_rows(shared):
    train, test = bananas(600, 0), bananas(1000, 1)
    before, after = (FlowLayers(epochs=n, rate=1e-2, shared=shared).fit(train) for n in (0, 20))
    assert after.gain_["layer"].shape == (COUPLINGS, 1 if shared else 2, 1, 2)
    assert before.score(test).mean() - after.score(test).mean() > 0.3  # nats a row


def test_densities_integrate_to_one():
    draw = torch.Generator().manual_seed(1)
    flows = Flows.identity(2, 2, draw)
    moved = [value.double() + 0.3 * torch.randn(value.shape, generator=draw) for value in flows[:-1]]
    flows = Flows(*moved, flows.order)
    axis = torch.linspace(-12, 12, 301, dtype=torch.float64)
    grid = torch.cartesian_prod(axis, axis).expand(2, -1, 2)
    mass = log_density(grid, flows).exp().sum(dim=1) * (axis[1] - axis[0]) ** 2
    torch.testing.assert_close(mass, torch.ones(2, dtype=torch.float64), rtol=2e-2, atol=0)


def test_classes_of_few_rows_and_layers_of_few_directions():
    train = bananas(1200, 0)
    few = train[(train.labels == 0) | (torch.arange(1200) < 100)]
    flow, plain = (FlowLayers(epochs=n, rate=3e-3, shared=False).fit(few) for n in (3, 0))
    assert [finding.code for finding in flow.findings_] == ["few-rows"]
    changed = flow.third_["layer"].ne(plain.third_["layer"]).flatten(2).any(dim=2).any(dim=0)
    assert changed.tolist() == [True, False]
    lines = {"line": train.features["layer"][:, :1].repeat(1, 2), "dead": torch.ones(1200, 3), **train.features}
    outputs = Outputs(train.logits, lines, train.labels)
    flat = igeood.detector("residual-flow", epochs=1).fit(outputs)
    assert [finding.code for finding in flat.findings_] == ["flat-layer", "flat-layer"]
    assert (flat.terms(outputs)[:, :2] == 0).all()
