"""Guards of a model: from a loader to a verdict, with reasons."""

import copy
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from torch import nn

import igeood
from igeood.errors import IgeoodWarning

BUILDS = {
    "black": igeood.black_box,
    "grey": lambda m: igeood.grey_box(m, epsilon=0.001),
    "white": igeood.white_box,
    "plus": lambda m: igeood.white_box(m, method="igeood+"),
    "mahalanobis": lambda m: igeood.white_box(m, method="mahalanobis", epsilon=0.0005),
}


@pytest.mark.parametrize("name", BUILDS)
def test_the_whole_way(model, data, name, tmp_path):
    guard = BUILDS[name](model).fit(data.train)
    assert igeood.metrics.auroc(guard.score(data.test), guard.score(data.foreign)) > 0.85  # before any OOD sample
    guard.tune(data.held_out, data.ood, epsilons=(guard.epsilon,)).calibrate(data.held_out)
    assert guard.tuning.after >= guard.tuning.before
    assert len(guard.calibration.left_out) == guard.tuning.n_id == 400 - len(guard.calibration.scores)
    verdict = guard.predict(data.test)
    assert verdict.is_ood.double().mean() < 0.15
    assert guard.predict(data.foreign).is_ood.double().mean() > 0.6
    assert torch.equal(verdict.label, model(data.test).argmax(1))  # of the clean input
    reasons = guard.explain(data.test).contributions.sum(1)  # of the input that was scored
    torch.testing.assert_close(reasons, verdict.score, rtol=1e-9, atol=1e-9)
    guard.save(tmp_path / "guard.safetensors")
    loaded = igeood.load(tmp_path / "guard.safetensors", model)
    torch.testing.assert_close(vars(loaded.predict(data.test)), vars(verdict), rtol=0, atol=0)
    assert (loaded.tuning, repr(loaded)) == (guard.tuning, repr(guard))
    assert len(loaded.calibrate(data.held_out).calibration.left_out) == guard.tuning.n_id


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
@pytest.mark.parametrize("wrap", [lambda model: model, nn.DataParallel])
@pytest.mark.parametrize("build", [igeood.black_box, igeood.white_box])
def test_mapping_batches_of_tokens(build, wrap, refused):
    ids = torch.randint(20, (90, 6), generator=torch.Generator().manual_seed(0))
    batch = {"input_ids": ids, "attention_mask": torch.ones_like(ids), "labels": torch.arange(90) % 3}
    held_out, foreign = ({**batch, "input_ids": other} for other in (ids.flip(1) + 1, ids + 30))
    guard = build(wrap(Text())).fit([batch]).tune([held_out], foreign).calibrate([held_out])
    assert (len(guard.calibration.left_out), guard.tuning.n_ood) == (guard.tuning.n_id, 90)
    arrays = {name: value.numpy() for name, value in foreign.items()}
    assert torch.equal(guard.predict(foreign).score, torch.as_tensor(guard.predict([arrays]).score))
    padded = {name: nn.functional.pad(value, (0, 4)) for name, value in foreign.items() if name != "labels"}
    torch.testing.assert_close(guard.score(padded), guard.score(foreign), rtol=1e-4, atol=1e-4)
    assert guard.explain(batch).score.shape == (90,)
    with refused("x"):
        igeood.grey_box(Text()).fit([batch])  # token ids cannot be perturbed


@pytest.mark.parametrize("name", ["grey", "white"])
def test_threads_that_share_a_guard_get_the_same_scores_and_leave_the_model_as_found(model, data, name, left_as_found):
    mine = copy.deepcopy(model).train()
    mine[1].eval()
    with left_as_found(mine):
        guard = BUILDS[name](mine).fit(data.train).tune(data.held_out, data.ood, epsilons=(0.0, 0.001))
        guard.calibrate(data.held_out)
        alone = guard.predict(data.test).score
        guard.explain(data.test[:2])
        with ThreadPoolExecutor(8) as pool:
            assert all(torch.equal(v.score, alone) for v in pool.map(guard.predict, [data.test] * 16))


def test_weights_that_change(model, data, refused):
    mine = copy.deepcopy(model)
    guard = igeood.white_box(mine).fit(data.train).calibrate(data.held_out)
    with torch.no_grad():
        mine[0].weight += 0.0  # written to, but the same
    before = guard.predict(data.test)
    with torch.no_grad():
        mine[0].weight[0, 0, 0, 0] += 0.1
    with pytest.warns(IgeoodWarning) as caught:
        guard.predict(data.test)
    assert caught[0].filename == __file__  # where the user called
    guard.score(data.test)  # warns once, or this would be an error
    for step in (guard.calibrate, guard.save, lambda inside: guard.tune(inside, data.ood)):
        with refused("model"):
            step(data.held_out)
    guard.fit(data.train).calibrate(data.held_out)
    assert not torch.equal(guard.predict(data.test).score, before.score)


@pytest.mark.parametrize("method", ["evidence", "knn"])
def test_another_autocast_than_in_fit_is_a_finding(model, data, tmp_path, method):
    def autocast():
        return torch.autocast("cpu", dtype=torch.bfloat16)

    with autocast():
        guard = igeood.white_box(model, method=method).fit(data.train).calibrate(data.held_out)
        inside = guard.score(data.test)
    guard.save(tmp_path / "guard")  # which no autocast changes
    loaded = igeood.load(tmp_path / "guard", model)
    assert (loaded.source.fitted_device, loaded.source.fitted_autocast) == ("cpu", "bfloat16")
    summed = igeood.white_box(model, method=method).fit(guard.summary)
    with autocast():
        for each in (guard, loaded, summed):
            assert torch.equal(each.score(data.test), inside)
    for each in (guard, loaded, summed):
        with pytest.warns(IgeoodWarning) as caught:
            outside = each.score(data.test)
        assert caught[0].filename == __file__
        each.score(data.test[:1])  # warns once, or this would be an error
        assert [finding.code for finding in each.health] == ["other-autocast"]
        assert not torch.equal(outside, inside)
    plain = igeood.white_box(model, method=method).fit(data.train)
    assert plain.health == []
    with autocast(), pytest.warns(IgeoodWarning):
        plain.calibrate(data.held_out)
    assert [finding.code for finding in plain.health] == ["other-autocast"]
    assert [finding.code for finding in plain.fit(data.train).health] == []


class Exact(nn.Module):
    """A classifier that no autocast changes."""

    def __init__(self, inner):
        super().__init__()
        self.inner = inner

    def forward(self, x):
        with torch.autocast("cpu", enabled=False):
            return self.inner(x)


@pytest.mark.parametrize("method", ["evidence", "knn", "nnguide", "igeood-logits"])
def test_autocast_is_for_the_model_alone(model, data, tmp_path, method):
    def figures():
        build = igeood.grey_box if method == "igeood-logits" else igeood.white_box
        guard = build(Exact(model), method=method, epsilon=0.01).fit(data.train)
        before = guard.highest, guard.score(data.test)
        guard.tune(data.held_out, data.ood, epsilons=(0.001,)).calibrate(data.held_out).save(tmp_path / "guard")
        loaded = igeood.load(tmp_path / "guard", Exact(model))
        table = igeood.compare(Exact(model), data.train, data.held_out, data.ood, methods=[method])
        after = guard.tuning, loaded.score(data.test), loaded.explain(data.test[:9]).contributions
        return [*before, *after, table.auroc]

    with torch.autocast("cpu", dtype=torch.bfloat16):
        inside = figures()
    for within, outside in zip(inside, figures(), strict=True):
        assert torch.equal(within, outside) if isinstance(within, torch.Tensor) else within == outside


def exported(net, x):
    return torch.export.export(net, (x,), dynamic_shapes=({0: torch.export.Dim("batch", min=1, max=4096)},)).module()


GRAPHS = {
    "scripted": lambda net, _: torch.jit.script(net),
    "traced": torch.jit.trace,
    "frozen": lambda net, _: torch.jit.freeze(torch.jit.script(net)),
    "exported": exported,
    "compiled": lambda net, _: torch.compile(net, backend="eager"),
}


@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore:The .grad attribute:UserWarning")
@pytest.mark.parametrize("graph", GRAPHS)
def test_graphs_have_logits_and_gradients_but_no_layers(model, data, refused, tmp_path, graph):
    network = GRAPHS[graph](model, data.test[:2])
    for build in (igeood.black_box, lambda net: igeood.grey_box(net, epsilon=0.01)):
        eager = build(model).fit(data.train).score(data.test)
        guard = build(network).fit(data.train).calibrate(data.held_out)
        torch.testing.assert_close(guard.score(data.test), eager, rtol=1e-3, atol=1e-3)
        guard.save(tmp_path / "guard")
        assert torch.equal(igeood.load(tmp_path / "guard", network).predict(data.test).score, guard.score(data.test))
    other = copy.deepcopy(model)
    other[8].weight.data += 0.01
    with refused("model"):
        igeood.load(tmp_path / "guard", GRAPHS[graph](other, data.test[:2]))
    if graph == "compiled":
        assert igeood.white_box(network).fit(data.train).layers
        return
    for options in ({}, {"method": "knn"}):
        with refused("model"):
            igeood.white_box(network, **options).fit(data.train)
    table = igeood.compare(network, data.train, data.held_out, data.ood, methods=["knn", "evidence"])
    assert ({*table.tnr}, {*table.left_out}) == ({"evidence"}, {"knn"})


def test_labels_and_data_that_cannot_be_used(model, data, refused):
    too_large = data.test, torch.full((300,), 4)
    for wrong, argument, place in ((too_large, "labels", "data: batch 0"), (data.train.dataset, "data", None)):
        with refused(argument, place):
            igeood.white_box(model).fit(wrong)
    for option in ({"std": (0.2, -0.1, 0.3)}, {"epsilon": -1}):
        with refused(*option):
            igeood.grey_box(model, **option)
