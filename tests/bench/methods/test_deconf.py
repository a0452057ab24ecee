"""DeConf-C: the head is the formula, the score is the largest cosine, and the step is chosen without OOD samples."""

import pytest
import torch
from torch import nn

import igeood
from igeood.bench.methods.deconf import EPSILONS, mean_scores
from igeood.bench.networks.catalog import DeConfHead


@pytest.fixture(scope="module")
def net(model):
    """The small classifier with its head decomposed: the weights of h are the linear head's."""
    torch.manual_seed(0)
    *body, linear = model
    head = DeConfHead(64, 4)
    head.h.weight.data = linear.weight.data.clone()
    return nn.Sequential(*body, head).eval()


def test_the_head_is_the_formula():
    torch.manual_seed(1)
    head = DeConfHead(6, 3).double().eval()
    z = torch.randn(5, 6, dtype=torch.float64)
    head.g[1].running_mean += 0.3
    w, v = head.h.weight, head.g[0]
    cosine = torch.stack([row @ w.T / ((row.norm() + 1e-4) * (w.norm(dim=1) + 1e-4)) for row in z])
    g = torch.sigmoid((z @ v.weight[0] + v.bias - 0.3) / (1 + head.g[1].eps) ** 0.5)
    torch.testing.assert_close(head(z), {"logits": cosine / g[:, None], "h": cosine})


def test_mean_scores_are_those_of_samples_moved_up_the_cosines_slope(net, data):
    guard = igeood.white_box(net, method="deconf-c").fit(data.train)
    x = torch.cat([batch for batch, _ in data.held_out]).requires_grad_()
    (slope,) = torch.autograd.grad(net(x)["h"].amax(dim=1).sum(), x)
    with torch.no_grad():
        expected = {e: -float(net(x + e * slope.sign())["h"].amax(dim=1).mean()) for e in EPSILONS}
    means = mean_scores(guard, data.held_out)
    assert means == pytest.approx(expected, abs=1e-6)
    assert means[0.0025] < means[0.0]
