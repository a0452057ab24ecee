"""The Fisher–Rao product and its probe beside plain loops, on degenerate rows, and with banks that cannot be."""

import math

import numpy as np
import pytest
import torch

import igeood
from igeood.detectors.logits_product import centred_energy
from igeood.detectors.product import Bank, signed_roots
from igeood.outputs import Outputs

LAYERS = {"first": 5, "before": 6, "last": 8}


def draw(seed, rows=400, classes=4, *, signed=True, is_ood=False):
    generator = torch.Generator().manual_seed(seed)
    labels = torch.arange(rows) % classes
    features = {}
    for layer, width in LAYERS.items():
        means = 3 * torch.rand(classes, width, generator=torch.Generator().manual_seed(width))
        z = (means.flip(1) if is_ood else means)[labels] + 0.5 * torch.randn(rows, width, generator=generator)
        features[layer] = z - 1 if signed else z.clamp(min=0)
    logits = torch.randn(rows, classes, generator=generator) + (2.0 if is_ood else 6.0) * torch.eye(classes)[labels]
    return Outputs(logits, features, labels)


def fisher_rao(z, w, power):
    """2 arccos Σ√(p q) of p ∝ |z|^a, positive and negative parts apart, for a row z and rows w."""
    p, q = (np.concatenate([np.maximum(rows, 0), np.maximum(-rows, 0)], axis=-1) ** power for rows in (z, w))
    return 2 * np.arccos(np.minimum(np.sqrt(p * q).sum(-1) / np.sqrt(p.sum(-1) * q.sum(-1)), 1))


def terms_of(train, per_class, k):
    """The five terms of a row, by plain loops."""
    labels, bank = train.labels.numpy(), bank_of(train, per_class)

    def nearest(layer, z):
        x = train.features[layer].double().numpy()
        means = [x[labels == c].mean(0) for c in range(4)]
        std = np.sqrt(sum(((x[labels == c] - means[c]) ** 2).sum(0) for c in range(4)) / len(x))
        rho = [2 * math.sqrt(2) * np.arcsinh(np.abs(z - m) / (2 * math.sqrt(2) * std)) for m in means]
        return min(math.sqrt((r**2).sum()) for r in rho)

    def neighbour(layer, z, power):
        return sorted(fisher_rao(z, train.features[layer].double().numpy()[bank], power))[k - 1]

    def of_row(outputs, i):
        before, last = (outputs.features[layer][i].double().numpy() for layer in ("before", "last"))
        f = outputs.logits[i].double().numpy()
        energy = math.log(np.exp(f - f.mean()).sum())
        distances = (nearest("before", before), nearest("last", last))
        near = (neighbour("before", before, 1), neighbour("last", last, 2))
        return [*(0.5 * math.log(d) for d in distances), *(math.log(d) for d in near), -math.log(energy)]

    return of_row


def bank_of(train, per_class):
    """Rows of each class with the smallest keys of what is read."""
    order = np.argsort(train.only(["before", "last"]).keys, kind="stable")
    return np.concatenate([order[train.labels.numpy()[order] == c][:per_class] for c in range(4)])


@pytest.mark.parametrize("signed", [True, False])
def test_terms_are_those_of_the_formula(signed):
    train, test = draw(0, signed=signed), draw(1, 12, signed=signed, is_ood=True)
    of_row = terms_of(train, 50, 4)
    expected = np.array([of_row(test, i) for i in range(len(test))])
    fitted = igeood.detector("fisher-rao-product", bank=200, k=4).fit(train)
    np.testing.assert_allclose(fitted.terms(test), expected, rtol=1e-6, atol=1e-6)
    usual = np.mean([of_row(train, i) for i in np.setdiff1d(np.arange(400), bank_of(train, 50))], axis=0)
    np.testing.assert_allclose(fitted.explain(test, 3)["usual"], usual, rtol=1e-6, atol=1e-6)


def test_the_bank_follows_its_rule(refused):
    few, many = draw(0, 400), draw(0, 3000)
    for bank, train, size, k in (("auto", few, 400, 10), (40, few, 40, 3), (7, few, 4, 1), ("auto", many, 1000, 10)):
        fitted = igeood.detector("fisher-rao-product", bank=bank).fit(train)
        assert (len(fitted.bank_["1"]), len(fitted.bank_["2"]), int(fitted.k_)) == (size, size, k)
    for option, value in (("bank", 401), ("bank", 3), ("k", 401), ("bank", -1), ("k", 0)):
        with refused(option):
            igeood.detector("fisher-rao-product", **{option: value}).fit(few)
    bare = igeood.detector("fisher-rao-product", bank=0).fit(few)  # no row is kept
    whole = igeood.detector("fisher-rao-product").fit(few)
    torch.testing.assert_close(bare.terms(many), whole.terms(many)[:, [0, 1, 4]])
    assert max(tensor.numel() for tensor in bare.state().values()) == 4 * max(LAYERS.values())


def test_degenerate_rows():
    rows = torch.tensor([[3.0, 4.0, 0.0], [0.0, 0.0, 0.0], [0.0, 0.0, 2.0], [-3.0, -4.0, 0.0]])
    for power in (1, 2):
        bank = Bank(signed_roots(rows[:1], power).float(), power)
        assert bank.distance(rows, 1).tolist() == pytest.approx([0.0, math.pi, math.pi, math.pi], abs=1e-6)
        nothing = Bank(signed_roots(rows[1:2], power).float(), power)
        assert nothing.distance(rows, 1).tolist() == pytest.approx([math.pi] * 4)
        assert bank.distance(rows * torch.tensor([[1e30], [1.0], [1e-30], [1e-300]]).double(), 1).isfinite().all()
    masked = torch.tensor([[1.0, 3.0, -torch.inf]])
    assert centred_energy(masked).item() == pytest.approx(math.log(math.exp(-1) + math.exp(1)))


def test_a_single_layer_is_used_for_both_and_logits_product_is_its_formula():
    train, test = draw(0), draw(1, 12)
    terms = igeood.detector("fisher-rao-product").fit(train.only(["last"])).terms(test)
    assert torch.equal(terms[:, 0], terms[:, 1])
    nearest = igeood.detector("igeood-logits-min", temperature=5.0).fit(train)(test)
    energy = [math.log(np.exp(f - f.mean()).sum()) for f in test.logits.double().numpy()]
    scores = igeood.detector("logits-product").fit(train)(test)
    np.testing.assert_allclose(scores, np.log(nearest.numpy()) - np.log(energy), rtol=1e-9)


def test_the_probe_is_the_product_until_it_is_tuned_and_then_learns_the_kind_it_is_shown():
    train, held_out, test = draw(0), draw(2, 300), draw(3, 300)
    ood = draw(4, 200, is_ood=True)
    probe = igeood.detector("probe").fit(train)
    torch.testing.assert_close(probe(test), igeood.detector("fisher-rao-product").fit(train)(test))
    search = probe.learn_weights(held_out, ood[:100])
    assert search.strength in probe.strengths
    assert igeood.metrics.auroc(probe(test), probe(ood[100:])) > 0.95
    loaded = igeood.detector("probe").load_state(probe.state(), 4, probe.widths_)
    assert torch.equal(loaded(test), probe(test))


def test_channels_that_wake_up_after_tuning_do_not_decide():
    def asleep(outputs):
        features = {k: torch.cat([v.clamp(min=0), 0 * v[:, :2]], 1) for k, v in outputs.features.items()}
        return outputs.replace(features=features)

    train, held_out, ood, test = (asleep(part) for part in (draw(0), draw(2), draw(4, is_ood=True), draw(3)))
    probe = igeood.detector("probe").fit(train)
    probe.learn_weights(held_out, ood)
    before = probe(test)
    for value in test.features.values():
        value[:, -1] = 0.5
    assert (probe(test) - before).abs().max() < 1e3  # it was 1e150, by a division by nearly nothing
