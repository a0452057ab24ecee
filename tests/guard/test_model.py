"""Guards of a model: from a loader to a verdict, with reasons."""

import copy
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
import torch
from scipy.stats import shapiro
from torch import nn

import igeood
from igeood.bench.diagnose import diagnose
from igeood.errors import IgeoodWarning, InputError

BUILDS = {
    "black": igeood.black_box,
    "grey": lambda m: igeood.grey_box(m, epsilon=0.001),
    "white": igeood.white_box,
    "plus": lambda m: igeood.white_box(m, method="igeood+"),
    "mahalanobis": lambda m: igeood.white_box(m, method="mahalanobis", epsilon=0.0005),
}


@pytest.mark.parametrize("kind", BUILDS)
def test_the_whole_way(model, data, kind, tmp_path, caplog):
    guard = BUILDS[kind](model).fit(data.train)
    assert igeood.metrics.auroc(guard.score(data.test), guard.score(data.foreign)) > 0.9  # before any OOD sample
    guard.tune(data.held_out, data.ood, epsilons=(guard.epsilon,)).calibrate(data.held_out)
    assert guard.tuning.after >= guard.tuning.before
    assert f"left out {guard.tuning.n_id} of 400 samples" in caplog.text
    assert len(guard.calibration.scores) == 400 - guard.tuning.n_id
    verdict = guard.predict(data.test)
    assert verdict.is_ood.double().mean() < 0.13
    assert guard.predict(data.foreign).is_ood.double().mean() > 0.8
    assert torch.equal(verdict.label, model(data.test).argmax(1))  # of the clean input
    reasons = guard.explain(data.test).contributions.sum(1)  # of the input that was scored
    torch.testing.assert_close(reasons, verdict.score, rtol=1e-9, atol=1e-9)
    guard.save(tmp_path / "guard.safetensors")
    loaded = igeood.load(tmp_path / "guard.safetensors", model)
    again = loaded.predict(data.test)
    for name in ("is_ood", "score", "p_value", "label"):
        assert torch.equal(getattr(again, name), getattr(verdict, name))
    assert loaded.tuning == guard.tuning
    assert repr(loaded) == repr(guard)
    assert loaded.calibrate(data.held_out).calibration.left_out == guard.tuning.n_id


def test_diagnostics(model, data):
    outputs = igeood.extract(model, data.train, ["0", "5"])
    for layer, d in diagnose(outputs).items():
        x, labels = outputs.features[layer].double().numpy(), outputs.labels.numpy()
        residual = x - np.stack([x[labels == c].mean(0) for c in range(4)])[labels]
        covariance = residual.T @ residual / len(x)
        diagonal = np.diag(covariance)
        assert d.condition_full == pytest.approx(np.linalg.cond(covariance), rel=1e-6)
        assert d.condition_infinity == pytest.approx(np.linalg.cond(covariance, np.inf), rel=1e-6)
        for norm in (2, np.inf):  # of a diagonal they are the same
            assert d.condition_diagonal == pytest.approx(np.linalg.cond(np.diag(diagonal), norm), rel=1e-9)
        others = [np.abs(np.delete(row, i)).sum() for i, row in enumerate(covariance)]
        assert d.dominant == pytest.approx(np.mean(diagonal > others))
        w = [shapiro(x[labels == c][:, j]).statistic for c in range(4) for j in range(x.shape[1])]
        assert d.shapiro_w == pytest.approx(np.mean(w), rel=1e-9)
    x = torch.tensor([[1.0, 2.0], [-1.0, 2.5], [3.0, -2.0], [0.0, 1.0], [0.0, 1.0]])  # 2 rows of class 1: no W
    (d,) = diagnose(igeood.Outputs(torch.zeros(5, 2), {"a": x}, torch.tensor([0, 0, 0, 1, 1]))).values()
    assert (d.dominant, d.dominant_signed, d.dead) == (0.5, 1.0, 0)  # the scatter is (8, −9; −9, 12.17)
    assert d.shapiro_w == pytest.approx(np.mean([shapiro(x[:3, j].double().numpy()).statistic for j in range(2)]))
    dead = igeood.Outputs(torch.zeros(50, 2), {"dead": torch.ones(50, 2)}, torch.arange(50) % 2)
    assert [getattr(diagnose(dead)["dead"], n) for n in ("dead", "condition_infinity")] == [2, float("inf")]
    with pytest.raises(InputError, match="need features and labels"):
        diagnose(igeood.Outputs(torch.zeros(5, 2)))


class Refilled(list):
    """A loader that fills the same tensors again and again."""

    def __iter__(self):
        x, y = torch.empty(64, 3, 8, 8), torch.empty(64, dtype=torch.int64)
        for batch, labels in super().__iter__():
            n = len(batch)
            x[:n], y[:n] = batch, labels
            yield x[:n], y[:n]


def test_generators_and_loaders_that_reuse_their_memory(model, data):
    expected = igeood.white_box(model).fit(data.train).calibrate(data.held_out)
    for wrap in (iter, Refilled):
        guard = igeood.white_box(model).fit(wrap(data.train)).calibrate(wrap(data.held_out))
        assert torch.equal(guard.calibration.scores, expected.calibration.scores)
        assert torch.equal(guard.score(wrap(data.held_out)), expected.score(data.held_out))
    tuned = [g.tune(wrap(data.held_out), wrap(data.ood)) for g, wrap in ((guard, Refilled), (expected, list))]
    assert torch.equal(tuned[0].score(data.test), tuned[1].score(data.test))
    read = iter(data.held_out)
    list(read)
    with pytest.raises(InputError, match="x: empty: no batch in the loader; give a new one if it was a generator"):
        guard.score(read)


def test_numpy_in_numpy_out(model, data):
    x, y = data.images(200, 1)
    guard = igeood.white_box(model, layers="2").fit(x.numpy(), y.numpy()).calibrate(data.test.numpy())
    assert guard.layers == ["2"]
    results = guard.score(x.numpy()), guard.predict(x.numpy()).label, guard.score(x)
    assert list(map(type, results)) == [np.ndarray, np.ndarray, torch.Tensor]
    assert len(guard.predict(x[:0])) == 0


class Text(nn.Module):
    """Takes tokens by keyword and returns a mapping, as Hugging Face's models do."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.embed, self.encode, self.head = nn.Embedding(60, 16), nn.Linear(16, 12), nn.Linear(12, 3)

    def forward(self, input_ids, attention_mask):
        tokens = self.encode(self.embed(input_ids)).relu() * attention_mask[..., None]
        return {"logits": self.head(tokens.sum(1) / attention_mask.sum(1, keepdim=True)), "loss": torch.zeros(())}


@pytest.mark.filterwarnings("ignore:ood. ")  # the network is not trained
@pytest.mark.parametrize("build", [igeood.black_box, igeood.white_box])
def test_mapping_batches_of_tokens(build):
    ids = torch.randint(20, (90, 6), generator=torch.Generator().manual_seed(0))
    batch = {"input_ids": ids, "attention_mask": torch.ones_like(ids), "labels": torch.arange(90) % 3}
    held_out, foreign = ({**batch, "input_ids": other} for other in (ids.flip(1) + 1, ids + 30))
    guard = build(Text()).fit([batch]).tune([held_out], [foreign]).calibrate([held_out])
    assert guard.calibration.left_out == guard.tuning.n_id
    assert guard.predict(foreign).score.isfinite().all()
    assert guard.explain(batch).score.shape == (90,)
    for step in (lambda: guard.tune([held_out], "fgsm"), lambda: igeood.grey_box(Text()).fit([batch])):
        with pytest.raises(InputError, match=r"x: .* got torch.int64; token ids cannot be perturbed"):
            step()


@pytest.mark.parametrize("kind", ["grey", "white"])
def test_many_threads_predict_the_same(model, data, kind):
    guard = BUILDS[kind](model).fit(data.train).calibrate(data.held_out)
    alone = guard.predict(data.test).score
    with ThreadPoolExecutor(8) as pool:
        assert all(torch.equal(v.score, alone) for v in pool.map(guard.predict, [data.test] * 16))


@pytest.mark.parametrize("kind", ["grey", "white"])
def test_the_model_is_left_as_found(model, data, kind):
    mine = copy.deepcopy(model).train()
    mine[1].eval()
    state, modes = copy.deepcopy(mine.state_dict()), [m.training for m in mine.modules()]
    random = torch.get_rng_state()
    guard = BUILDS[kind](mine).fit(data.train).tune(data.held_out, data.ood, epsilons=(0.0, 0.001))
    guard.calibrate(data.held_out).predict(data.test)
    guard.explain(data.test[:2])
    with pytest.raises(RuntimeError, match="channels"):  # the model's own error passes
        guard.score(data.test[:, :2])
    assert [m.training for m in mine.modules()] == modes
    assert all(torch.equal(value, state[name]) for name, value in mine.state_dict().items())
    assert not any(m._forward_hooks or m._forward_pre_hooks for m in mine.modules())
    assert all(p.grad is None and p.requires_grad for p in mine.parameters())
    assert torch.equal(torch.get_rng_state(), random)


def test_weights_that_change(model, data):
    mine = copy.deepcopy(model)
    guard = igeood.white_box(mine).fit(data.train).calibrate(data.held_out)
    with torch.no_grad():
        mine[0].weight += 0.0  # written to, but the same
    before = guard.predict(data.test)
    with torch.no_grad():
        mine[0].weight[0, 0, 0, 0] += 1e-3
    with pytest.warns(IgeoodWarning, match="its weights have changed"):
        guard.predict(data.test)
    guard.predict(data.test)  # warns once
    for step in (guard.calibrate, guard.save, lambda inside: guard.tune(inside, data.ood)):
        with pytest.raises(InputError, match="model: its weights have changed since the guard was fitted"):
            step(data.held_out)
    guard.fit(data.train).calibrate(data.held_out)
    assert not torch.equal(guard.predict(data.test).score, before.score)


class HuggingFace(list):
    column_names = ("pixel_values", "label")


def test_bad_input(model, data):
    multi_hot = r"data: batch 0: labels: .* got torch.float32 of shape \(256, 4\); .*argmax\(1\) of one-hot rows"
    for step, message in (
        (lambda: igeood.white_box(model).fit((data.test, torch.full((300,), 4))), "data: batch 0: labels: "),
        (lambda: igeood.white_box(model).fit([data.test, torch.eye(4)[[0] * 300]]), multi_hot),
        (lambda: igeood.white_box(model).fit(HuggingFace()), "data: .* got HuggingFace; wrap a data set: DataLoader"),
        (lambda: igeood.white_box(model).fit(data.train.dataset), "data: .* got TensorDataset; wrap a data set: Data"),
        (lambda: igeood.white_box(model, mean="x"), "mean: expected a finite number, or one for each channel"),
        (lambda: igeood.grey_box(model, std=(0.2, -0.1, 0.3)), "std: expected a finite, positive number"),
        (lambda: igeood.grey_box(model, epsilon=-1), "epsilon: must be a finite number ≥ 0"),
    ):
        with pytest.raises(InputError, match=f"^{message}"):
            step()


def test_probabilities_of_a_model_are_a_warning_and_inference_mode_is_none_of_ours(model, data):
    with pytest.warns(IgeoodWarning, match="are these probabilities"):
        igeood.black_box(nn.Sequential(model, nn.Softmax(dim=1))).fit(data.train)
    guard = igeood.grey_box(model)
    with torch.inference_mode():
        guard.fit(data.train)
    assert guard.calibrate(data.held_out).predict(data.test[:2]).score.shape == (2,)
