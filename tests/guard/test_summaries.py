"""Fitting is adding: summaries of shards, whatever the batches; and detectors of the user's own."""

import logging
from functools import partial

import numpy as np
import pytest
import torch

import igeood
from igeood.errors import InputError
from igeood.outputs import HEAD

SAME = {"rtol": 0.0, "atol": 1e-4}  # a network's outputs differ in their last digits from batch to batch


@pytest.mark.parametrize(("method", "budget"), [("igeood-logits", 20_000), ("igeood", 40_000)])
@pytest.mark.parametrize("size", [1, 7, 64])
def test_batches_and_shards_give_one_guard(model, data, method, budget, size, tmp_path):
    """The sample is the same to the row, above the budget too; the scores are, up to rounding in the network."""
    build = partial(igeood.white_box if method == "igeood" else igeood.black_box, method=method)
    x, y = data.images(800, 1)
    whole = build(model).fit((x, y), budget=budget)
    batches = list(zip(x.split(size), y.split(size), strict=True))
    assert 0 < len(whole.summary.samples["logits"]) < 800
    plain = build(model).fit(batches, budget=budget)
    guard, at = build(model), len(batches) // 3
    shards = []
    for part in (batches[:at], batches[at:]):
        igeood.summarise(guard, part, budget=budget).save(tmp_path / "shard")
        shards.append(igeood.Summary.load(tmp_path / "shard"))
    with pytest.raises(igeood.errors.NotReadyError):
        guard.score(data.test)  # to summarise is not to fit
    for fitted in (plain, build(model).fit(shards[0] + shards[1]), build(model).fit(shards[1] + shards[0])):
        for kind, sample in whole.summary.samples.items():
            kept = (each.outputs()[0].keys for each in (fitted.summary.samples[kind], sample))
            assert np.array_equal(*kept)
        assert np.array_equal(fitted.fitted_on.keys, whole.fitted_on.keys)
        assert fitted.layers == whole.layers
        torch.testing.assert_close(fitted.score(data.test), whole.score(data.test), **SAME)
    tuned = [each.tune(data.held_out, data.ood).score(data.test) for each in (fitted, whole)]
    torch.testing.assert_close(*tuned, **SAME)


def test_summaries_that_do_not_fit(model, data, known):
    summary = igeood.summarise(igeood.white_box(model, method="igeood"), data.train)
    assert igeood.black_box(model).fit(summary).layers == []  # reads what it needs, and no more
    foreign = igeood.summarise(igeood.white_box(), known.train)
    for options, other, message in (
        ({"method": "mahalanobis"}, summary, "summary: MahalanobisLayers needs sums 'full'"),
        ({"layers": ["2"], "method": "igeood"}, summary, r"summary: has layers \['2', '6'\], this guard reads \['2'\]"),
        ({}, foreign, "summary: was made with model None"),
    ):
        with pytest.raises(InputError, match=f"^{message}"):
            igeood.white_box(model, **options).fit(other)


def test_the_log_says_when_the_sample_is_cut(model, data, caplog):
    with caplog.at_level(logging.WARNING, "igeood"):
        igeood.black_box(model).fit(data.train)
        assert caplog.text == ""
        igeood.black_box(model).fit(data.train, budget=20_000)
    assert "fit: the budget of 0.0191 MiB keeps 121 to 121 of 190 to 212 rows of a class, with logits" in caplog.text


class Nearest(igeood.Detector):
    """Distance to the nearest class mean, summed over the blocks that it needs."""

    def _learn(self, summary):
        self.means_ = {block: sums.mean for block, sums in summary.sums.items()}

    def _score(self, batch):
        return sum(torch.cdist(batch.features[b].double(), mean).amin(1) for b, mean in self.means_.items())


OWN = {"none": [HEAD], "last": [HEAD], "last two": ["2", HEAD], "all": ["2", "6", HEAD]}


@pytest.mark.parametrize("layers", OWN)
def test_a_detector_of_ones_own_reads_the_layers_that_it_needs(model, data, layers):
    needs = igeood.Needs(layers=layers, head=layers in ("none", "all"), labels=True, sums="mean")
    kind, names = type("NearestMean", (Nearest,), {"needs": needs}), OWN[layers]
    guard = igeood.white_box(model, method=kind()).fit(data.train)
    assert guard.layers == list(guard.detector.means_) == names
    assert guard.detector.means_[HEAD].shape == (4, 64)
    assert igeood.metrics.auroc(guard.score(data.test), guard.score(data.foreign)) > 0.7
    outputs = [igeood.extract(model, x, names[:-1], head=True) for x in (data.train, data.test)]
    arrays = igeood.white_box(method=kind()).fit(outputs[0])
    torch.testing.assert_close(arrays.score(outputs[1]), guard.score(data.test), **SAME)


def test_summaries_of_transformed_rows_add_from_files(model, data, tmp_path):
    guard, batches = igeood.white_box(model, method="mahalanobis++"), list(data.train)
    shards = []
    for part in (batches[:5], batches[5:]):
        igeood.summarise(guard, part).save(tmp_path / "shard")
        shards.append(igeood.Summary.load(tmp_path / "shard"))
    whole = igeood.white_box(model, method="mahalanobis++").fit(data.train)
    torch.testing.assert_close(guard.fit(shards[0] + shards[1]).score(data.test), whole.score(data.test), **SAME)


class Tokens(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.fc = torch.nn.Linear(6, 3)

    def forward(self, x, mask=1.0, **more):  # noqa: ARG002
        return self.fc(x * mask)


@pytest.mark.filterwarnings("ignore:ood. .*OOD samples are refused")  # the network is not trained
def test_a_mapping_of_the_models_keywords_is_one_kind_of_ood_samples():
    torch.manual_seed(0)
    x, y = torch.randn(400, 6), torch.arange(400) % 3
    model = Tokens()

    def batch(rows):
        return {"x": rows, "mask": torch.ones_like(rows)}

    for wrapped in (model, torch.nn.DataParallel(model)):
        guard = igeood.black_box(wrapped, method="energy").fit([{**batch(x[:200]), "labels": y[:200]}])
        assert guard.tune(batch(x[200:]), batch(3 * x[:50])).tuning.n_ood == 50
        assert guard.tune(batch(x[200:]), {k: v.numpy() for k, v in batch(3 * x[:50]).items()}).tuning.n_ood == 50
        for kinds in (
            {"far": [batch(3 * x[:50])], "near": [batch(x[:40] + 1)]},
            {"far": 3 * x[:50], "near": x[:40] + 1},
        ):
            assert guard.tune(batch(x[200:]), kinds).tuning.n_ood == 90


def test_a_loaded_guard_that_first_sees_an_empty_batch(tmp_path):
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(7, 5), torch.nn.ReLU(), torch.nn.Linear(5, 5))
    guard = igeood.white_box(model, method="knn").fit((torch.randn(60, 7), torch.arange(60) % 5))
    guard.save(tmp_path / "guard")
    loaded, x = igeood.load(tmp_path / "guard", model), torch.randn(4, 7)
    assert len(loaded.score(torch.empty(0, 7))) == 0
    assert torch.equal(loaded.score(x), guard.score(x))
