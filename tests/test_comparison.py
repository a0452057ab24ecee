"""Every untuned method in one table: the same figures as guards give one by one, from one pass over the data."""

import pytest
import torch

import igeood
from igeood.errors import InputError
from igeood.metrics import evaluate

LOGITS = {"msp", "odin", "energy", "igeood-logits", "igeood-logits-min", "max-logit"}


def test_figures_are_those_of_guards_from_one_reading(model, data):
    sets = {"ood": iter(data.ood), "foreign": iter([data.foreign])}  # a second reading would find nothing
    table = igeood.compare(model, iter(data.train), iter(data.held_out), sets)
    assert set(table.tnr) == set(table.auroc) == set(table.cost) >= LOGITS | {"knn", "vim", "mahalanobis"}
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
    with pytest.raises(InputError, match="methods"):
        igeood.compare(model, data.train, data.held_out, data.ood, methods=[])


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
    with pytest.raises(InputError):
        igeood.compare(Cosine(model), data.train, data.held_out, data.ood, methods=["react"])
