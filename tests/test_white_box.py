"""Guards of a model: from a loader to a verdict, with reasons."""

import copy
import logging

import numpy as np
import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import igeood
from igeood.errors import IgeoodWarning, InputError, NotReadyError


def images(n, seed, *, flipped=False):
    """Noisy prototypes of four classes; flipped ones are out-of-distribution."""
    prototypes = torch.rand(4, 3, 8, 8, generator=torch.Generator().manual_seed(0))
    generator = torch.Generator().manual_seed(seed)
    labels = torch.randint(4, (n,), generator=generator)
    chosen = prototypes[labels].flip(-1) if flipped else prototypes[labels]
    return (0.2 + 0.6 * chosen + 0.15 * torch.randn(n, 3, 8, 8, generator=generator)).clamp(0, 1), labels


def loader(n, seed, **options):
    return DataLoader(TensorDataset(*images(n, seed, **options)), batch_size=64)


@pytest.fixture(scope="module")
def model():
    torch.manual_seed(0)
    net = nn.Sequential(
        nn.Conv2d(3, 12, 3, padding=1), nn.BatchNorm2d(12), nn.ReLU(),
        nn.Conv2d(12, 24, 3, 2, padding=1), nn.BatchNorm2d(24), nn.ReLU(),
        nn.AdaptiveAvgPool2d(2), nn.Flatten(), nn.Linear(96, 4),
    )  # fmt: skip
    x, y = images(800, 1)
    optimizer = torch.optim.Adam(net.parameters(), 0.01)
    for _ in range(40):
        optimizer.zero_grad()
        nn.functional.cross_entropy(net(x), y).backward()
        optimizer.step()
    return net.eval()


BUILDS = {
    "black": igeood.black_box,
    "grey": lambda m: igeood.grey_box(m, epsilon=0.001),
    "white": igeood.white_box,
    "plus": lambda m: igeood.white_box(m, plus=True),
    "mahalanobis": lambda m: igeood.white_box(m, method="mahalanobis", epsilon=0.0005),
}


@pytest.mark.parametrize("kind", BUILDS)
def test_the_whole_way(model, kind, tmp_path, caplog):
    guard = BUILDS[kind](model).fit(loader(800, 1))
    test, foreign = images(300, 3)[0], images(200, 4, flipped=True)[0]
    if kind != "grey":  # works before tune, with no OOD sample
        assert igeood.metrics.auroc(guard.score(test), guard.score(foreign)) > 0.8
    held_out = loader(400, 2)
    guard.tune(held_out, loader(200, 5, flipped=True))
    with caplog.at_level(logging.INFO, "igeood"):
        guard.calibrate(held_out)
    assert f"left out {guard.tuning.n_id} of 400 samples" in caplog.text
    assert len(guard.calibration.scores) == 400 - guard.tuning.n_id
    verdict = guard.predict(test)
    assert verdict.is_ood.double().mean() < 0.13
    assert guard.predict(foreign).is_ood.double().mean() > 0.7
    assert torch.equal(verdict.label, model(test).argmax(1))
    guard.save(tmp_path / "guard.safetensors")
    loaded = igeood.load(tmp_path / "guard.safetensors", model)
    again = loaded.predict(test)
    for name in ("is_ood", "score", "p_value", "label"):
        assert torch.equal(getattr(again, name), getattr(verdict, name))
    assert loaded.tuning == guard.tuning
    assert (loaded.layers, loaded.epsilon, loaded.access) == (guard.layers, guard.epsilon, guard.access)
    assert loaded.calibrate(held_out).calibration.left_out == guard.tuning.n_id


@pytest.mark.parametrize("kind", BUILDS)
def test_explanations_add_up_to_the_score(model, kind):
    guard = BUILDS[kind](model).fit(loader(800, 1))
    x = images(20, 3)[0]
    for _ in range(2):
        found = guard.explain(x, top=3)
        torch.testing.assert_close(found.contributions.sum(1), guard.score(x), rtol=1e-9, atol=1e-9)
        torch.testing.assert_close(found.score, guard.score(x), rtol=1e-9, atol=1e-9)
        assert len(found.columns) == found.contributions.shape[1]
        assert len(str(found).splitlines()) == 20
        for layer in guard.layers:
            assert found.nearest[layer].shape == (20,)
            assert found.channels[layer].shape == found.channel_shares[layer].shape == (20, 3)
            assert (found.channel_shares[layer].diff(dim=1) <= 0).all()
            if kind != "mahalanobis":
                assert (found.channel_shares[layer].sum(1) <= 1 + 1e-9).all()
        if kind == "mahalanobis":
            assert found.centroid_distance is None
        else:
            assert found.centroid_distance.shape == (20, 4)
        guard.tune(loader(400, 2), images(200, 5, flipped=True)[0], epsilons=(guard.epsilon,))


def test_the_nearest_class_at_the_output_is_the_classifiers(model):
    guard = igeood.white_box(model).fit(loader(800, 1))
    x = images(100, 3)[0]
    nearest = guard.explain(x).centroid_distance.argmin(1)
    assert (nearest == model(x).argmax(1)).double().mean() > 0.95


def test_tuning_on_adversarial_samples_needs_no_ood(model):
    guard = igeood.white_box(model, plus=True).fit(loader(800, 1)).tune(loader(400, 2), "fgsm", attack=0.1)
    attack = guard.tuning.attack
    assert guard.tuning.temperature is None
    assert guard.detector.temperature == 1.0
    assert attack.samples == guard.tuning.n_id == guard.tuning.n_ood
    assert attack.linf == pytest.approx(0.1, abs=1e-3)
    assert attack.accuracy < 0.9
    guard.calibrate(loader(400, 2))
    assert guard.predict(images(200, 4, flipped=True)[0]).is_ood.double().mean() > 0.5


def test_the_grey_box_chooses_its_step_on_the_papers_grid(model):
    guard = igeood.grey_box(model).fit(loader(800, 1)).tune(loader(400, 2), loader(200, 5, flipped=True))
    steps = guard.tuning.steps
    assert [s.epsilon for s in steps] == [round(0.0002 * i, 4) for i in range(21)]
    best = max(s.tnr for s in steps)
    assert guard.epsilon == min(s.epsilon for s in steps if s.tnr == best)
    fixed = igeood.grey_box(model, epsilon=guard.epsilon, temperature=guard.detector.temperature).fit(loader(800, 1))
    x = images(50, 3)[0]
    torch.testing.assert_close(fixed.score(x), guard.score(x), rtol=1e-9, atol=1e-9)


def test_a_white_box_can_try_steps_too(model):
    guard = igeood.white_box(model).fit(loader(800, 1))
    guard.tune(loader(400, 2), loader(200, 5, flipped=True), epsilons=(0.0, 0.001))
    assert len(guard.tuning.steps) == 2
    assert guard.epsilon in (0.0, 0.001)


def test_tuning_is_the_same_every_time(model):
    def run(seed):
        guard = igeood.white_box(model, plus=True).fit(loader(800, 1))
        return guard.tune(loader(400, 2), loader(200, 5, flipped=True), seed=seed).score(images(50, 3)[0])

    assert torch.equal(run(0), run(0))
    assert not torch.equal(run(0), run(1))


def test_another_model_is_refused_by_its_fingerprint(model, tmp_path):
    path = tmp_path / "guard.safetensors"
    guard = igeood.white_box(model).fit(loader(800, 1)).calibrate(loader(400, 2))
    guard.save(path)
    other = igeood.networks.ResNet((1, 1, 1, 1), classes=4, width=4)
    with pytest.raises(InputError, match=r"its fingerprint is [0-9a-f]{16}, .* made with [0-9a-f]{16}.*strict=False"):
        igeood.load(path, other)
    with pytest.raises(InputError, match="layers: the model has no '2'"):
        igeood.load(path, other, strict=False)
    with pytest.raises(InputError, match="needs its model"):
        igeood.load(path)
    changed = copy.deepcopy(model)
    with torch.no_grad():
        changed[0].weight[0, 0, 0, 0] += 1e-3
    with pytest.raises(InputError, match="fingerprint"):
        igeood.load(path, changed)
    assert igeood.load(path, changed, strict=False).score(images(5, 3)[0]).shape == (5,)
    igeood.black_box().fit(5 * np.eye(3), [0, 1, 2]).save(path)
    with pytest.raises(InputError, match="made without a model"):
        igeood.load(path, model)


def test_loaders_without_labels_or_with_wrong_ones(model):
    x, y = images(100, 1)
    guard = igeood.white_box(model)
    with pytest.raises(InputError, match=r"labels: .* needs the true class of each sample.*batches \(x, y\)"):
        guard.fit([x])
    with pytest.raises(InputError, match=r"x: batch 1: labels: 4 at position"):
        guard.fit([(x, y), (x, y + 1)])
    with pytest.raises(InputError, match="no sample of class 2"):
        guard.fit([(x[y != 2], y[y != 2])])
    with pytest.raises(NotReadyError):
        guard.score(x)


def test_a_generator_is_read_once(model):
    x, y = images(200, 1)
    guard = igeood.black_box(model).fit(batch for batch in [(x[:100], y[:100]), (x[100:], y[100:])])
    held_out = images(100, 2)[0]
    source = (part for part in [held_out[:50], held_out[50:]])
    guard.calibrate(source)
    with pytest.raises(InputError, match="no batch in the loader"):
        guard.score(source)
    layers_too = igeood.white_box(model).fit(iter([(x, y)]))
    assert torch.equal(layers_too.score(x), igeood.white_box(model).fit([(x, y)]).score(x))
    with pytest.raises(InputError, match="ood: is read more than once"):
        guard.tune(loader(400, 2), iter([x]))


def test_calibrating_on_training_samples_is_a_warning(model):
    guard = igeood.black_box(model).fit(loader(800, 1))
    with pytest.warns(IgeoodWarning, match="id_data: 300 of 400 samples are training samples"):
        guard.calibrate(torch.cat([images(800, 1)[0][:300], images(100, 2)[0]]))
    guard.calibrate(loader(400, 2))


def test_ood_samples_that_are_in_distribution_ones(model):
    guard = igeood.black_box(model).fit(loader(800, 1))
    with pytest.raises(InputError, match=r"ood: \d+ of 400 samples are among the in-distribution ones"):
        guard.tune(loader(400, 2), loader(400, 2))


def test_inputs_that_no_model_takes(model):
    guard = igeood.black_box(model).fit(loader(800, 1))
    x = images(100, 3)[0]
    broken = x.clone()
    broken[70, 0, 0, 0] = torch.nan
    with pytest.raises(InputError, match=r"x: batch 1: sample 6 has NaN or infinity \(1 of 36"):
        guard.score(list(broken.split(64)))
    with pytest.raises(InputError, match=r"images of bytes \(uint8\)"):
        guard.score((255 * x).to(torch.uint8))


@pytest.mark.parametrize("std", [0.0, (0.2, -0.1, 0.3), "x", (float("nan"),), None])
def test_deviations_that_are_none(model, std):
    with pytest.raises(InputError, match=r"^std: "):
        igeood.grey_box(model, std=std)


def test_the_repr_tells_what_was_chosen(model):
    guard = igeood.white_box(model, layers=["2"], epsilon=0.001)
    assert repr(guard).startswith("Guard(white box: Igeood(temperature=1.0)")
    assert "layers=['2'], epsilon=0.001; not calibrated" in repr(guard)


def test_few_ood_samples(model):
    guard = igeood.white_box(model).fit(loader(800, 1))
    with pytest.raises(InputError, match="ood: 9 samples; tuning needs at least 10"):
        guard.tune(loader(400, 2), images(9, 5, flipped=True)[0])


def test_methods_belong_to_their_access(model):
    with pytest.raises(InputError, match="'igeood' is not one for a black box; those are msp"):
        igeood.black_box(model, method="igeood")
    with pytest.raises(InputError, match="'energy' is not one for a white box; those are mahalanobis, igeood, igeood"):
        igeood.white_box(model, method="energy")
    for build, wrong in ((igeood.black_box, igeood.Igeood()), (igeood.white_box, igeood.IgeoodFeatures())):
        with pytest.raises(InputError, match=f"{type(wrong).__name__} is not a detector for a"):
            build(model, method=wrong)
    with pytest.raises(InputError, match=r"plus: means method='igeood\+'"):
        igeood.white_box(model, method="mahalanobis", plus=True)
    with pytest.raises(InputError, match=r"model: expected a torch.nn.Module, got str; did you mean method='energy'"):
        igeood.black_box("energy")
    with pytest.raises(InputError, match="layers: empty"):
        igeood.white_box(model, layers=[])
    with pytest.raises(InputError, match="layers: expected names"):
        igeood.white_box(model, layers=[9])
    with pytest.raises(InputError, match="the model has no 'fifth'"):
        igeood.white_box(model, layers=["fifth"])
    with pytest.raises(InputError, match="takes its inputs, not outputs"):
        igeood.black_box(model).fit(igeood.Outputs(torch.eye(4)))


def test_numpy_in_numpy_out(model):
    x, y = images(200, 1)
    guard = igeood.white_box(model, layers=["2"]).fit(x.numpy(), y.numpy()).calibrate(images(100, 2)[0].numpy())
    assert isinstance(guard.score(x.numpy()), np.ndarray)
    assert isinstance(guard.predict(x.numpy()).label, np.ndarray)
    assert isinstance(guard.score(x), torch.Tensor)
    assert len(guard.predict(x[:0])) == 0


def test_a_text_classifier():
    transformers = pytest.importorskip("transformers")
    torch.manual_seed(0)
    config = transformers.BertConfig(
        vocab_size=40, hidden_size=16, num_hidden_layers=2, num_attention_heads=2, intermediate_size=32, num_labels=3
    )
    bert = transformers.BertForSequenceClassification(config)
    ids = torch.randint(20, (90, 6), generator=torch.Generator().manual_seed(0))
    batch = {"input_ids": ids, "attention_mask": torch.ones_like(ids), "labels": torch.arange(90) % 3}
    other = {"input_ids": ids.flip(1), "attention_mask": torch.ones_like(ids)}
    guard = igeood.white_box(bert).fit([batch]).calibrate([other])
    verdict = guard.predict({"input_ids": ids + 20, "attention_mask": torch.ones_like(ids)})
    assert verdict.score.isfinite().all()
    assert guard.explain(batch).score.shape == (90,)
    with pytest.raises(InputError, match="token ids cannot be perturbed"):
        igeood.grey_box(bert).fit([batch]).score(batch)


def test_diagnostics(model):
    outputs = igeood.extract(model, loader(300, 1), ["0", "5"])
    found = igeood.diagnose(outputs)
    assert list(found) == ["0", "5"]
    assert igeood.white_box(model, layers=["0", "5"]).fit(loader(800, 1)).diagnose(loader(300, 1)) == found
    for layer, d in found.items():
        x = outputs.features[layer].double().numpy()
        labels = outputs.labels.numpy()
        residual = x - np.stack([x[labels == c].mean(0) for c in range(4)])[labels]
        covariance = residual.T @ residual / len(x)
        assert d.condition_full == pytest.approx(np.linalg.cond(covariance), rel=1e-6)
        diagonal = np.diag(covariance)
        assert d.condition_diagonal == pytest.approx(diagonal.max() / diagonal.min(), rel=1e-9)
        assert d.dominance == pytest.approx((diagonal / np.abs(covariance).sum(1)).mean(), rel=1e-9)
        assert 0.5 < d.shapiro_w <= 1.0
    gaussian = torch.randn(2000, 3, generator=torch.Generator().manual_seed(0))
    made = igeood.Outputs(torch.zeros(2000, 2), {"g": gaussian, "dead": torch.ones(2000, 2)}, torch.arange(2000) % 2)
    assert igeood.diagnose(made)["g"].shapiro_w > 0.995
    assert igeood.diagnose(made)["dead"].dead == 2
    assert igeood.diagnose(made)["dead"].condition_full == float("inf")
    with pytest.raises(InputError, match="need features and labels"):
        igeood.diagnose(igeood.Outputs(torch.zeros(5, 2)))
