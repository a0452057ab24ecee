"""The paper's recipe for centroids takes its path, and stops above the optimum."""

import torch

from igeood.bench.sgd import descend
from igeood.geometry import categorical


def test_it_takes_the_papers_path(make, monkeypatch):
    """100 steps of 0.1 from the identity, checked against a plain loop over the classes."""
    data = make(4, n=80, margin=2.0)
    centre = torch.eye(4, dtype=torch.float64)
    for _ in range(100):
        centre = centre.requires_grad_()
        own = [categorical.distance(data.train[data.labels == c].double() / 3, centre[c]).mean() for c in range(4)]
        centre = (centre - 0.1 * torch.autograd.grad(sum(own), centre)[0]).detach()
    for elements in (1 << 18, 30):
        monkeypatch.setattr("igeood.geometry.precision.CHUNK_ELEMENTS", elements)
        recipe = descend(lambda: [(data.train, data.labels, torch.ones(80))], 4, 3.0)
        torch.testing.assert_close(recipe, torch.log_softmax(centre, 1), rtol=1e-9, atol=1e-9)
    optimum = categorical.centroids(data.train, data.labels, 4, 3.0)
    ours, theirs = (categorical.distance(data.train.double() / 3, c[data.labels]).mean() for c in (optimum, recipe))
    assert ours < theirs
