"""Statistics of feature maps, against plain float64 code; and the layers that they are read at."""

import pytest
import torch
from torch import nn

import igeood
from igeood.bench.networks.catalog import DenseNet, build
from igeood.errors import InputError
from igeood.model.batches import as_batch
from igeood.model.reader import choose_layers, extract
from igeood.model.statistics import gram, moments

IMAGES = torch.rand(4, 3, 32, 32, generator=torch.Generator().manual_seed(0))


def explicit_gram(maps):
    """By the matrices themselves, (N, k, S) → (N, 10 k)."""
    orders = []
    for p in range(1, 11):
        rows = (maps**p @ (maps**p).transpose(1, 2)).sum(dim=2)
        orders.append(rows.sign() * rows.abs() ** (1 / p))
    return torch.cat(orders, dim=1)


@pytest.mark.parametrize("scale", [1e-3, 1.0, 1e6])
def test_gram_sums_are_those_of_explicit_matrices_and_do_not_overflow(scale):
    generator = torch.Generator().manual_seed(0)
    x = scale * torch.randn(5, 3, 4, 6, generator=generator)
    x[0], x[1, 1] = 0.0, 0.0  # an empty map, and a dead channel
    for layout, maps in {"second": x.flatten(2), "last": x.flatten(1, 2).transpose(1, 2)}.items():
        expected = explicit_gram(maps.double())
        found = gram(nn.Identity(), x, layout)
        torch.testing.assert_close(found.double(), expected, rtol=1e-4, atol=1e-5 * scale**2)
        for row in range(5):  # whatever the batch
            torch.testing.assert_close(gram(nn.Identity(), x[row : row + 1], layout)[0], found[row])
    flat = x.flatten(1)
    expected = explicit_gram(flat[..., None].double())
    torch.testing.assert_close(gram(nn.Identity(), flat, "flat").double(), expected, rtol=1e-4, atol=1e-5 * scale**2)
    wide = x.clone().requires_grad_()
    (gradient,) = torch.autograd.grad(gram(nn.Identity(), wide, "second").sum(), wide)
    assert gradient.isfinite().all()


def test_gram_sums_of_channels_of_very_different_scales_do_not_vanish():
    x = torch.rand(3, 4, 25, generator=torch.Generator().manual_seed(1)) + 0.5
    x *= torch.tensor([1.0, 1e-3, 1e-6, 1e-9])[:, None]
    x[0, 0] = 0.0
    torch.testing.assert_close(gram(nn.Identity(), x, "second").double(), explicit_gram(x.double()), rtol=1e-5, atol=0)


def hand_made_norm(kind, k=3):
    norm = kind(k, eps=0.5).eval()
    norm.running_mean.copy_(torch.arange(k) - 1.0)
    norm.running_var.copy_(torch.arange(k) + 0.5)
    return norm


def test_moments_are_those_of_the_norms_input():
    norm, draw = hand_made_norm(nn.BatchNorm2d), torch.Generator().manual_seed(0)
    x = 3 + 2 * torch.randn(4, 3, 5, 7, generator=draw)
    x[0, 1] = 2.0  # a constant channel
    std = torch.sqrt(torch.tensor([1.0, 2.0, 3.0], dtype=torch.float64))
    maps = x.double().flatten(2)
    m = (maps.mean(dim=2) - torch.tensor([-1.0, 0.0, 1.0])) / std
    expected = torch.cat([m, maps.std(dim=2, correction=0) / std], dim=1)
    model = nn.Sequential(norm, nn.ReLU(inplace=True), nn.Flatten(), nn.Linear(105, 2)).eval()
    found = extract(model, x, "norms", statistic="moments").features["0|moments"]
    torch.testing.assert_close(found.double(), expected, rtol=1e-5, atol=1e-5)
    wide = x.clone().requires_grad_()
    (gradient,) = torch.autograd.grad(moments(norm, wide, "second").sum(), wide)
    assert gradient.isfinite().all()
    assert torch.equal(norm.running_mean, torch.tensor([-1.0, 0.0, 1.0]))  # in training mode the reader changes nothing
    extract(model.train(), x, "norms", statistic="moments")
    assert torch.equal(norm.running_mean, torch.tensor([-1.0, 0.0, 1.0]))


def test_a_single_position_has_no_deviation():
    norm, x = hand_made_norm(nn.BatchNorm1d), torch.randn(4, 3, generator=torch.Generator().manual_seed(0))
    m, s = moments(norm, x, "flat").chunk(2, dim=1)
    torch.testing.assert_close(m, (x - norm.running_mean) / torch.tensor([1.0, 2.0, 3.0]).sqrt())
    assert torch.equal(s, torch.ones(4, 3))


def test_places_of_densenet_and_resnet():
    batch, dense = as_batch(IMAGES), DenseNet().eval()
    places, norms = (choose_layers(dense, batch, kind) for kind in ("convolutions", "norms"))
    assert (len(places), len(norms)) == (101, 99)
    assert [name for name in places if "layer" not in name] == [
        "block1", "trans1.conv1", "block2", "trans2.conv1", "block3",
    ]  # fmt: skip
    widths = {kind: extract(dense, IMAGES[:2], kind).features for kind in ("convolutions", "norms")}
    channels = {kind: sum(value.shape[1] for value in features.values()) for kind, features in widths.items()}
    assert channels == {"convolutions": 3996, "norms": 11994}
    places = choose_layers(build("resnet-10-16"), batch, "convolutions")
    assert [name for name in places if "conv" not in name] == [
        "layer1", "layer2.0.shortcut.0", "layer2", "layer3.0.shortcut.0", "layer3", "layer4.0.shortcut.0", "layer4",
    ]  # fmt: skip
    assert sum("conv" in name for name in places) == 8


def test_models_that_lack_what_is_read_are_refused_with_the_cure():
    mlp = nn.Sequential(nn.Flatten(), nn.Linear(3072, 8), nn.LayerNorm(8), nn.ReLU(), nn.Linear(8, 3))
    norm = nn.BatchNorm2d(4, track_running_stats=False)
    untracked = nn.Sequential(nn.Conv2d(3, 4, 3), norm, nn.Flatten(), nn.Linear(3600, 3))
    for model in (mlp, untracked):
        guard = igeood.white_box(model, method="batch-norm")
        with pytest.raises(InputError, match=r"^layers: no batch norm with running .*; use another method"):
            guard.fit([(IMAGES, torch.tensor([0, 1, 2, 0]))])
        with pytest.raises(InputError, match=r"^layers: no convolution after a first one in this model; name layers"):
            igeood.white_box(model, method="gram").fit([(IMAGES, torch.tensor([0, 1, 2, 0]))])
    with pytest.raises(InputError, match="layers: LayerNorm keeps no running statistics; name batch norms"):
        extract(mlp, IMAGES, ["2"], statistic="moments")
