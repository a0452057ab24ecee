"""Every untuned method in one table: the same figures as guards give one by one, from one pass over the data."""

import io
import sys

import numpy as np
import pytest
import torch

import igeood
from igeood.errors import InputError
from igeood.metrics import evaluate, tnr_at_tpr

LOGITS = {"msp", "odin", "energy", "igeood-logits", "igeood-logits-min", "max-logit"}


def test_figures_are_those_of_guards_from_one_reading(model, data):
    sets = {"ood": iter(data.ood), "foreign": iter([data.foreign])}  # a second reading would find nothing
    table = igeood.compare(model, iter(data.train), iter(data.held_out), sets)
    assert set(table.tnr) == set(table.auroc) == set(table.cost) >= LOGITS | {"knn", "vim", "mahalanobis"}
    assert set(table.tnr) == set(table.errors) == set(table.seconds)
    laboratory = {name for name, method in igeood.METHODS.items() if method.kind.__module__.startswith("igeood.bench")}
    assert laboratory  # the tests' set-up imports it
    assert not laboratory & {*table.tnr, *table.left_out}
    for method in ("evidence", "evidence (logits)", "vim", "she", "mahalanobis++", "igeood", "energy"):
        name = method.split()[0]
        is_white = igeood.METHODS[name].needs_layers or method == "evidence"
        guard = (igeood.white_box if is_white else igeood.black_box)(model, method=name).fit(data.train)
        for name in sets:
            rates = evaluate(guard.score(data.held_out), guard.score(getattr(data, name)))
            assert table.tnr[method][name] == pytest.approx(rates.tnr_at_tpr, abs=0.02)
            assert table.auroc[method][name] == pytest.approx(rates.auroc, abs=1e-3)
    assert table.forward > 0
    rows = table.to_dict()["methods"]
    assert [row["method"] for row in rows] == table.methods
    assert [row["tnr"] for row in rows] == sorted((row["tnr"] for row in rows), reverse=True)
    lines = repr(table).splitlines()
    assert [line.split("  ")[0] for line in lines[1 : 1 + len(rows)]] == table.methods
    assert lines[-1] == table.advice == table.to_dict()["advice"]
    assert list(pytest.importorskip("pandas") and table.to_pandas().index) == table.methods


def test_arrays_and_methods_by_choice(known):
    wrapped = igeood.wrap(lambda f: -f.amax(dim=1), higher_is="ood")
    methods = ["max-logit", "knn", igeood.detector("knn", k=3), wrapped, wrapped, wrapped]
    table = igeood.compare(None, known.train, known.held_out, known.ood, methods=methods)
    assert set(table.tnr) == {"max-logit", "knn", "knn (2)", "<lambda>", "<lambda> (2)", "<lambda> (3)"}
    assert table.tnr["<lambda>"] == table.tnr["max-logit"]
    assert table.forward is None
    logits = igeood.compare(None, (known.train.logits, known.train.labels), known.held_out.logits, known.ood.logits)
    assert set(logits.tnr) >= LOGITS
    assert not any(igeood.METHODS[name].needs_layers for name in logits.tnr)


def test_training_data_are_those_of_fit(known, model, data, tmp_path):
    logits, labels = known.train.logits, known.train.labels
    names = np.array(list("abcdefghij"))[labels]
    sets = {"held_out": known.held_out.logits, "ood": (known.ood.logits, np.full(len(known.ood), "emu"))}
    expected = igeood.compare(None, (logits, labels), **sets, methods=["igeood-logits"]).auroc
    for number, each in enumerate((labels.numpy(), labels.numpy().astype(str), names)):
        np.savez(tmp_path / f"{number}.npz", logits=logits, labels=each)
        for train in (igeood.read_logits(tmp_path / f"{number}.npz"), (logits, each)):
            assert igeood.compare(None, train, **sets, methods=["igeood-logits"]).auroc == expected
    x, y = data.images(300, 1)
    tables = [igeood.compare(model, (x, each), x, data.ood) for each in (y, np.array(list("abcd"))[y])]
    assert tables[0].auroc == tables[1].auroc
    with pytest.raises(InputError) as caught:
        igeood.compare(model, [(x, list("abcd") * 75)], x, data.ood)
    assert caught.value.argument == "labels"


def test_what_cannot_be_compared(model, data):
    for arguments, argument in (
        ((data.train, data.held_out, {}), "ood"),
        (([], data.held_out, data.ood), "train"),
        ((data.train, [], data.ood), "held_out"),
    ):
        with pytest.raises(InputError, match=f"^{argument}"):
            igeood.compare(model, *arguments)
    with pytest.raises(InputError, match="labels"):
        igeood.compare(model, torch.zeros(4, 3, 8, 8), data.held_out, data.ood)
    for options, argument in (({"methods": []}, "methods"), ({"exclude": ["nearest"]}, "exclude")):
        with pytest.raises(InputError) as error:
            igeood.compare(model, data.train, data.held_out, data.ood, **options)
        assert error.value.argument == argument


class Cosine(torch.nn.Module):
    """A classifier without a linear head."""

    def __init__(self, inner):
        super().__init__()
        self.inner = inner

    def forward(self, x):
        return 8 * torch.nn.functional.normalize(self.inner(x), dim=1)


def test_methods_that_need_a_linear_head_are_left_out_where_there_is_none(model, data):
    with torch.inference_mode():
        table = igeood.compare(Cosine(model), data.train, data.held_out, {"held_out": data.ood})
    assert {*table.left_out} >= {"react", "ash", "scale", "vim", "fdbd"}
    assert not {*table.left_out} & {*table.tnr}
    assert list(table.tnr["msp"]) == ["held_out"]  # a name like any other
    named = igeood.compare(Cosine(model), data.train, data.held_out, data.ood, methods=["react", "msp"])
    assert ({*named.left_out}, {*named.tnr}) == ({"react"}, {"msp"})
    with pytest.raises(InputError) as error:
        igeood.compare(Cosine(model), data.train, data.held_out, data.ood, methods=["react"])
    assert error.value.argument == "methods"
    assert "react" in str(error.value)


class Bare(torch.nn.Module):
    """A classifier without modules to read."""

    def __init__(self, network):
        super().__init__()
        self.network = [network]  # no child

    def forward(self, x):
        return self.network[0](x)


@pytest.mark.parametrize("layers", ["auto", ()])
def test_methods_of_layers_are_left_out_where_there_are_none(model, data, layers):
    network = Bare(model) if layers else model
    table = igeood.compare(
        network, data.train, data.held_out, data.ood, layers=layers, methods=["evidence", "knn", "msp"]
    )
    assert {*table.tnr} == {"evidence", "msp"}
    assert {*table.left_out} == {"knn"}


def test_probabilities_are_for_the_methods_that_take_them(known):
    train, held_out, ood = (part.logits.softmax(dim=1) for part in (known.train, known.held_out, known.ood))
    blocks = [(train, known.train.labels)]
    table = igeood.compare(None, blocks, held_out, ood, probabilities=True, exclude=["odin"])
    assert {*table.tnr} >= {"msp", "evidence", "igeood-logits"}
    assert {*table.left_out} >= {"energy", "max-logit", "knn"}
    assert "odin" not in {*table.tnr, *table.left_out}
    guard = igeood.black_box(probabilities=True).fit(train, known.train.labels)
    assert table.tnr["evidence"]["ood"] == pytest.approx(tnr_at_tpr(guard.score(held_out), guard.score(ood)), abs=0.01)
    declared = igeood.detector("msp", probabilities=True)
    mixed = igeood.compare(None, blocks, held_out, ood, methods=[declared, "max-logit"])
    assert ({*mixed.tnr}, {*mixed.left_out}) == ({"msp"}, {"max-logit"})


def scorer(values):
    """A detector whose score of (N, 2) logits is a function of their difference."""
    return igeood.wrap(lambda logits: values(logits[:, 1] - logits[:, 0]), higher_is="ood")


def test_errors_are_those_of_new_samples_and_equal_methods_are_not_told_apart():
    random = np.random.default_rng(0)

    def draw(n, shift):
        return np.stack([np.zeros(n), random.normal(shift, 1.0, n)], axis=1)

    methods = [scorer(torch.Tensor.double), scorer(torch.Tensor.exp), scorer(torch.Tensor.neg)]
    train = [(draw(20, 0), np.arange(20) % 2)]
    tables = []
    for _ in range(60):
        held_out, ood = draw(300, 0), draw(200, 2)
        tables.append(igeood.compare(None, train, held_out, ood, methods=methods))
    spread = np.std([table.tnr["<lambda>"]["ood"] for table in tables], ddof=1)
    assert np.mean([table.errors["<lambda>"] for table in tables]) == pytest.approx(spread, rel=0.35)
    for table in tables:
        assert table.leaders == ["<lambda>", "<lambda> (2)"]  # the same order, so the same verdicts
        assert table.advice.count("<lambda>") >= 2
    same, other = (igeood.compare(None, train, held_out, ood, methods=methods, seed=seed) for seed in (0, 1))
    assert tables[-1].errors == same.errors != other.errors


def test_bars_are_for_terminals(known, monkeypatch, capsys):
    logits = (known.train.logits, known.train.labels), known.held_out.logits, known.ood.logits
    igeood.compare(None, *logits, methods=["msp"])
    assert capsys.readouterr() == ("", "")
    terminal = io.StringIO()
    terminal.isatty = lambda: True
    monkeypatch.setattr(sys, "stderr", terminal)
    igeood.compare(None, *logits, methods=["msp"])
    assert "held_out" in terminal.getvalue()
