"""One signed-gradient step."""

import pytest
import torch
from torch import nn

import igeood
from igeood.batches import as_batch
from igeood.errors import InputError
from igeood.extraction import reading
from igeood.inputs import ModelInputs
from igeood.perturbation import fgsm, input_gradients, signed_step


def test_the_step_is_in_pixel_units():
    """ε/std for each channel: after un-normalising, every pixel has moved by ε, up to the sign of its gradient."""
    std = (0.2, 0.5, 1.0)
    x, gradient = torch.zeros(2, 3, 4, 4), torch.randn(2, 3, 4, 4, generator=torch.Generator().manual_seed(0))
    gradient[0, 0] = 0.0
    stepped = signed_step(x, gradient, 0.01, std)
    pixels = stepped * torch.tensor(std)[:, None, None]
    torch.testing.assert_close(pixels, 0.01 * gradient.sign())
    assert (stepped[0, 0] == 0).all()


def test_gradients_are_those_of_autograd_and_touch_no_parameter():
    net = nn.Sequential(nn.Flatten(), nn.Linear(12, 5), nn.Tanh(), nn.Linear(5, 3))
    x = torch.randn(4, 3, 2, 2, generator=torch.Generator().manual_seed(1))
    first, second = input_gradients(lambda z: [net(z)[:, 0], net(z).square().sum(1)], x)
    leaf = x.clone().requires_grad_()
    torch.testing.assert_close(first, torch.autograd.grad(net(leaf)[:, 0].sum(), leaf)[0])
    torch.testing.assert_close(second, torch.autograd.grad(net(leaf).square().sum(), leaf)[0])
    assert all(p.grad is None for p in net.parameters())
    with torch.inference_mode():
        torch.testing.assert_close(input_gradients(lambda z: [net(z)[:, 0]], x * 1.0)[0], first)


def test_only_the_inputs_gradient_is_computed():
    """The weights' gradients are as costly as the input's: autograd must not be asked for them."""
    asked = []

    class Watch(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x, weight):
            ctx.save_for_backward(weight)
            return x * weight

        @staticmethod
        def backward(ctx, gradient):
            asked.append(ctx.needs_input_grad)
            return gradient * ctx.saved_tensors[0], None

    weight = torch.ones(3, requires_grad=True)
    input_gradients(lambda z: [Watch.apply(z, weight).sum(1)], torch.ones(2, 3))
    assert len(asked) == 1
    assert weight.grad is None


def trained(seed=0):
    """A small classifier of four prototypes, and its data in [0, 1]."""
    generator = torch.Generator().manual_seed(seed)
    prototypes = torch.rand(4, 3, 6, 6, generator=generator)
    labels = torch.arange(400) % 4
    noise = 0.15 * torch.randn(400, 3, 6, 6, generator=generator)
    x = (0.2 + 0.6 * prototypes[labels] + noise).clamp(0, 1)
    torch.manual_seed(seed)
    net = nn.Sequential(nn.Conv2d(3, 8, 3), nn.ReLU(), nn.AdaptiveAvgPool2d(2), nn.Flatten(), nn.Linear(32, 4))
    optimizer = torch.optim.Adam(net.parameters(), 0.02)
    for _ in range(60):
        optimizer.zero_grad()
        nn.functional.cross_entropy(net(x), labels).backward()
        optimizer.step()
    return net.eval(), x, labels


def test_the_grey_box_raises_fr0():
    """Eq. 6 adds the sign of FR₀'s gradient: −FR₀, the score, goes down, and more so in-distribution."""
    net, x, labels = trained()
    black = igeood.black_box(net).fit((x, labels))
    grey = igeood.grey_box(net, epsilon=0.002).fit((x, labels))
    noise = torch.rand(100, 3, 6, 6, generator=torch.Generator().manual_seed(5))
    drop, drop_ood = (black.score(v) - grey.score(v) for v in (x, noise))
    assert (drop >= -1e-9).all()
    assert drop.mean() > 0
    assert drop_ood.mean() > 0
    assert igeood.grey_box(net, epsilon=0.0).fit((x, labels)).score(x).equal(black.score(x))


@pytest.mark.parametrize("method", ["odin", "energy", "msp", "kl-min", "igeood-logits-min"])
def test_every_method_steps_down_its_own_score(method):
    net, x, labels = trained()
    black = igeood.black_box(net, method=method).fit((x, labels))
    grey = igeood.grey_box(net, method=method, epsilon=1e-4).fit((x, labels))
    assert (black.score(x) - grey.score(x)).mean() > 0


def test_the_step_by_hand():
    net, x, labels = trained()
    std = (0.2, 0.3, 0.4)
    guard = igeood.grey_box(net, epsilon=0.01, std=std).fit((x, labels))
    leaf = x[:20].clone().requires_grad_()
    (gradient,) = torch.autograd.grad(guard.detector.score(net(leaf)).sum(), leaf)
    moved = x[:20] - 0.01 / torch.tensor(std)[:, None, None] * gradient.sign()
    torch.testing.assert_close(guard.score(x[:20]), guard.detector.score(net(moved)).detach())
    assert torch.equal(guard.calibrate(x.flip(-1)).predict(x[:20]).label, net(x[:20]).argmax(1))


def test_mahalanobis_has_a_step_of_its_own_for_each_layer():
    net, x, labels = trained()
    layers = ["1", "2"]
    guard = igeood.white_box(net, layers=layers, method="mahalanobis", epsilon=0.01).fit((x, labels))
    features = guard.detector.features_
    expected = []
    for i, layer in enumerate(layers):
        leaf = x[:10].clone().requires_grad_()
        with reading(net, layers) as reader:
            outputs = reader(as_batch(leaf))
            (gradient,) = torch.autograd.grad(features.layer_scores(outputs)[:, i].sum(), leaf)
            moved = reader(as_batch(x[:10] - 0.01 * gradient.sign()))
            expected.append(features.layer_scores(moved)[:, i].detach())
        assert layer in guard.layers
    seen = next(guard.inputs.see(x[:10], guard.detector, epsilons=(0.01,)))
    torch.testing.assert_close(features.layer_scores(seen.stepped[0]), torch.stack(expected, 1), rtol=1e-6, atol=1e-6)


def test_a_grid_shares_one_gradient():
    net, x, labels = trained()
    guard = igeood.grey_box(net).fit((x, labels))
    forwards = []
    net.register_forward_hook(lambda *_: forwards.append(torch.is_grad_enabled()))
    list(guard.inputs.see(x[:50], guard.detector, epsilons=tuple(0.001 * i for i in range(21))))
    assert forwards.count(True) == 1
    assert len(forwards) == 1 + 20  # no step is the clean pass itself


def test_a_batch_stays_whole():
    """A model may depend on its batch: nobody but the user cuts it."""
    net, x, labels = trained()
    guard = igeood.grey_box(net, epsilon=0.002).fit((x, labels))
    sizes = []
    net.register_forward_hook(lambda _, inputs, __: sizes.append(len(inputs[0])))
    guard.score(x[:150])
    assert set(sizes) == {150}


def test_fgsm_lowers_the_accuracy_and_stays_in_range():
    net, x, labels = trained()
    adversarial = fgsm(net, x, labels, 0.1)
    assert (adversarial >= 0).all()
    assert (adversarial <= 1).all()
    assert (adversarial - x).abs().max() <= 0.1 + 1e-6
    assert (net(adversarial).argmax(1) == labels).double().mean() < (net(x).argmax(1) == labels).double().mean()


@pytest.mark.parametrize("mean", [None, (0.5, 0.4, 0.3)])
def test_fgsm_on_normalised_inputs_is_the_same_in_pixels(mean):
    net, x, labels = trained()
    std, centre = torch.tensor([0.2, 0.3, 0.4])[:, None, None], torch.tensor([0.5, 0.4, 0.3])[:, None, None]

    class Normalised(nn.Module):
        def __init__(self):
            super().__init__()
            self.net = net

        def forward(self, z):
            return self.net(z * std + centre)

    plain = fgsm(net, x, labels, 0.05)
    inputs = ModelInputs(Normalised().eval(), ["net.1"], mean=mean, std=(0.2, 0.3, 0.4))
    detector = igeood.detector("igeood").fit(igeood.extract(inputs.model, ((x - centre) / std, labels), ["net.1"]))
    (found,), attack = inputs.attack(((x - centre) / std, labels), detector, 0.05)
    assert attack.samples == 400
    assert attack.linf == pytest.approx(0.05 / 0.2, rel=1e-3)
    one_by_one = [(((v - centre) / std)[None], y[None]) for v, y in zip(x[:20], labels[:20], strict=True)]
    assert inputs.attack(one_by_one, detector, 0.05)[1].linf == pytest.approx(0.25, rel=1e-3)
    right = (net(plain).argmax(1) == labels).double().mean().item()
    assert attack.accuracy == pytest.approx(right, abs=0.02)
    if mean is not None:
        torch.testing.assert_close(found.logits, net(plain).detach(), rtol=1e-3, atol=1e-3)


@pytest.mark.parametrize("epsilon", [-0.1, float("nan"), float("inf"), "big", True])
def test_steps_that_are_none(epsilon):
    net = nn.Linear(3, 2)
    for build in (igeood.grey_box, igeood.white_box):
        with pytest.raises(InputError, match=r"^epsilon: must be a finite number ≥ 0"):
            build(net, epsilon=epsilon)


def test_token_ids_cannot_be_perturbed():
    model = nn.Sequential(nn.Embedding(10, 6), nn.Flatten(), nn.Linear(24, 3))
    ids = torch.randint(10, (30, 4), generator=torch.Generator().manual_seed(0))
    guard = igeood.grey_box(model).fit((ids, torch.arange(30) % 3))
    with pytest.raises(InputError, match="token ids cannot be perturbed"):
        guard.score(ids)
    other = torch.randint(10, (80, 4), generator=torch.Generator().manual_seed(1))
    for build in (igeood.black_box, igeood.white_box):
        with pytest.raises(InputError, match="token ids cannot be perturbed"):
            build(model).fit((ids, torch.arange(30) % 3)).tune((other, torch.arange(80) % 3), "fgsm")


def test_deviations_that_do_not_fit_the_channels():
    net, x, labels = trained()
    with pytest.raises(InputError, match=r"std: expected one number, or one for each of 3 channels"):
        igeood.grey_box(net, std=(0.1, 0.2)).fit((x, labels)).score(x)


def test_a_model_without_gradient():
    class Hard(nn.Module):
        def forward(self, x):
            return (x.flatten(1)[:, :3] > 0.5).float()

    x = torch.rand(30, 1, 2, 2, generator=torch.Generator().manual_seed(0))
    guard = igeood.grey_box(Hard(), method="energy").fit(x)
    with pytest.raises(InputError, match="no gradient in the input"):
        guard.score(x)
