"""The Fisher–Rao product and its probe beside plain loops, on degenerate rows, and with banks that cannot be."""

import math

import numpy as np
import pytest
import torch

import igeood
from igeood.detectors.logits_product import centred_energy
from igeood.detectors.product import Bank, signed_roots
from igeood.errors import InputError
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


@pytest.mark.parametrize("signed", [True, False])
def test_scores_are_those_of_the_formula(signed):
    train, test = draw(0, signed=signed), draw(1, 12, signed=signed, is_ood=True)
    of_row = terms_of(train, 50, 4)
    expected = np.array([of_row(test, i) for i in range(len(test))])
    guard = igeood.white_box(method=igeood.detector("fisher-rao-product", bank=200, k=4)).fit(train)
    told = guard.explain(test)
    np.testing.assert_allclose(told.contributions.numpy(), expected, rtol=1e-6, atol=1e-6)
    np.testing.assert_allclose(guard.score(test).numpy(), expected.sum(1), rtol=1e-6, atol=1e-6)
    usual = np.mean([of_row(train, i) for i in np.setdiff1d(np.arange(400), bank_of(train, 50))], axis=0)
    np.testing.assert_allclose(told.usual.numpy(), usual, rtol=1e-6, atol=1e-6)
    assert told.columns == [
        "before: classes", "last: classes", "before: neighbours", "last: neighbours", "output: energy",
    ]  # fmt: skip
    assert f"is usual) {max(zip(told.contributions[0] - told.usual, told.columns, strict=True))[1]}" in str(told)


def bank_of(train, per_class):
    """Rows of each class with the smallest keys of what is read."""
    order = np.argsort(train.only(["before", "last"]).keys, kind="stable")
    return np.concatenate([order[train.labels.numpy()[order] == c][:per_class] for c in range(4)])


def test_the_bank_follows_its_rule():
    few, many = draw(0, 400), draw(0, 3000)
    rows = {"auto": (few, 400, 10), 40: (few, 40, 3), 7: (few, 4, 1)}
    for bank, (train, size, k) in rows.items():
        fitted = igeood.detector("fisher-rao-product", bank=bank).fit(train)
        assert (len(fitted.bank_["1"]), len(fitted.bank_["2"]), int(fitted.k_)) == (size, size, k)
    assert len(igeood.detector("fisher-rao-product").fit(many).bank_["1"]) == 1000  # 250 of each of 4 classes
    for options, message in (
        ({"bank": 401}, "bank: 401 rows, but the training sample has 400; give at most that many, fit on more rows"),
        ({"bank": 3}, "bank: 3 rows for 4 classes; give at least one a class, or 0 for no bank"),
        ({"bank": 40, "k": 41}, "k: 41 neighbours, but the bank has 40 rows; give more rows, or a smaller k"),
        ({"k": 401}, "k: 401 neighbours, but the bank has 400 rows; give more"),
        ({"bank": -1}, "bank: expected a whole number, at least 1 or 'auto' or 0, got -1"),
        ({"k": 0}, "k: expected a whole number, at least 1 or 'auto', got 0"),
    ):
        with pytest.raises(InputError, match=f"^{message}"):
            igeood.detector("fisher-rao-product", **options).fit(few)


def test_without_a_bank_no_row_is_kept(tmp_path):
    train, test = draw(0), draw(1, 12, is_ood=True)
    guard = igeood.white_box(method=igeood.detector("fisher-rao-product", bank=0)).fit(train)
    assert guard.summary.samples == {}
    full = igeood.white_box().fit(train).explain(test).contributions[:, [0, 1, 4]]
    torch.testing.assert_close(guard.explain(test).contributions, full)
    guard.calibrate(draw(2)).save(tmp_path / "guard")
    loaded = igeood.load(tmp_path / "guard")
    assert torch.equal(loaded.score(test), guard.score(test))
    assert loaded.explain(test).usual is None
    assert max(tensor.numel() for tensor in loaded.detector.state().values()) == 4 * max(LAYERS.values())


def test_degenerate_rows():
    rows = torch.tensor([[3.0, 4.0, 0.0], [0.0, 0.0, 0.0], [0.0, 0.0, 2.0], [-3.0, -4.0, 0.0]])
    for power in (1, 2):
        bank = Bank(signed_roots(rows[:1], power).float(), power)
        same, zero, apart, opposite = bank.distance(rows, 1).tolist()
        assert same < 1e-6
        assert [zero, apart, opposite] == pytest.approx([math.pi] * 3)
        nothing = Bank(signed_roots(rows[1:2], power).float(), power)
        assert nothing.distance(rows, 1).tolist() == pytest.approx([math.pi] * 4)
        huge = bank.distance(rows * torch.tensor([[1e30], [1.0], [1e-30], [1e-300]]).double(), 1)
        assert huge.isfinite().all()
    near = torch.tensor([[1.0, 1e-4]], dtype=torch.float64)
    bank = Bank(signed_roots(torch.tensor([[1.0, 0.0]]).double(), 2), 2)
    assert bank.distance(near, 1).item() == pytest.approx(2e-4, rel=1e-7)  # 2 atan 1e-4
    masked = torch.tensor([[1.0, 3.0, -torch.inf]])
    assert centred_energy(masked).item() == pytest.approx(math.log(math.exp(-1) + math.exp(1)))
    shifted = centred_energy(torch.tensor([[1.0, 2.0]]).double() + 1e6)
    assert shifted.item() == pytest.approx(centred_energy(torch.tensor([[1.0, 2.0]])).item(), abs=1e-9)


def test_a_single_layer_is_used_for_both():
    train = draw(0).only(["last"])
    fitted = igeood.detector("fisher-rao-product").fit(train)
    assert fitted.columns_[:2] == ["last (as the block before): classes", "last: classes"]
    columns = fitted.contributions(draw(1, 9).only(["last"]))
    assert torch.equal(columns[:, 0], columns[:, 1])


def test_logits_product_is_its_formula():
    train, test = draw(0), draw(1, 12)
    fitted = igeood.detector("logits-product").fit(train)
    nearest = igeood.detector("igeood-logits-min", temperature=5.0).fit(train).score(test)
    energy = [math.log(np.exp(f - f.mean()).sum()) for f in test.logits.double().numpy()]
    np.testing.assert_allclose(fitted.score(test), np.log(nearest.numpy()) - np.log(energy), rtol=1e-9)


def test_the_probe_is_the_product_until_it_is_tuned_and_then_learns_the_kind_it_is_shown(tmp_path):
    train, held_out, test = draw(0), draw(2, 300), draw(3, 300)
    flipped, other = draw(4, 200, is_ood=True), draw(5, 200)
    other.features = {layer: value.roll(1, dims=1) for layer, value in other.features.items()}
    probe = igeood.white_box(method="probe").fit(train)
    torch.testing.assert_close(probe.score(test), igeood.white_box().fit(train).score(test))
    probe.tune(held_out, {"flipped": flipped[:100], "rolled": other[:100]}, share=1.0)
    tuning = probe.tuning
    assert tuning.after > max(0.9, tuning.before)
    assert tuning.strength in probe.detector.strengths
    assert set(tuning.left_out) == {"flipped", "rolled"}
    assert all(0 <= rates["tnr"] <= 1 and 0 <= rates["auroc"] <= 1 for rates in tuning.left_out.values())
    assert "of flipped unseen" in repr(tuning)
    for kind in (flipped[100:], other[100:]):
        assert igeood.metrics.auroc(probe.score(test), probe.score(kind)) > 0.95
    alone = igeood.white_box(method="probe").fit(train).tune(held_out, other[:100], share=1.0)
    assert alone.tuning.left_out == {}
    probe.save(tmp_path / "guard")
    loaded = igeood.load(tmp_path / "guard")
    assert torch.equal(loaded.score(test), probe.score(test))
    assert loaded.tuning == tuning
    assert len(str(loaded.explain(test[:1]))) < 400  # of hundreds of columns the largest


def test_left_out_kinds_are_judged_by_weights_that_have_not_seen_them_and_have_any_name():
    train, held_out = draw(0), draw(2, 300)
    kinds = {"it's": draw(4, 120, is_ood=True), 3: draw(6, 120)}  # the second is no OOD at all
    for method in ("probe", "igeood"):
        rates = igeood.white_box(method=method).fit(train).tune(held_out, kinds, share=1.0).tuning.left_out
        assert rates["3"]["auroc"] < 0.75 < rates["it's"]["auroc"] + 0.5
        assert rates["3"]["tnr"] < 0.3
    known = {"a": draw(6, 120), "b": draw(7, 120)}  # nothing to learn from: it stays as it was
    tuning = igeood.white_box(method="igeood").fit(train).tune(held_out, known, share=1.0).tuning
    assert (tuning.strength is None) == (tuning.left_out == {})
    with pytest.raises(InputError, match=r"^ood\['x'\]: expected samples, got 'fgsm'"):
        igeood.white_box(method="igeood").fit(train).tune(held_out, {"x": "fgsm"})


def test_channels_that_wake_up_after_tuning_do_not_decide():
    def asleep(outputs):
        features = {k: torch.cat([v.clamp(min=0), 0 * v[:, :2]], 1) for k, v in outputs.features.items()}
        return outputs.replace(features=features)

    train, held_out, ood, test = (asleep(part) for part in (draw(0), draw(2), draw(4, is_ood=True), draw(3)))
    probe = igeood.white_box(method="probe").fit(train).tune(held_out, ood, share=1.0)
    before = probe.score(test)
    for value in test.features.values():
        value[:, -1] = 0.5
    assert (probe.score(test) - before).abs().max() < 1e3  # it was 1e150, by a division by nearly nothing
