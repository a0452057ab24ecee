"""Every untuned method in one table: the same figures as guards give one by one, from one pass over the data."""

import pytest
import torch

import igeood
from igeood.errors import InputError
from igeood.metrics import evaluate

UNTUNED = {name for name, method in igeood.METHODS.items() if method.tunes != "only"} - {"deconf-c"}  # it needs a head


def test_figures_are_those_of_guards_from_one_reading(model, data):
    sets = {"ood": iter(data.ood), "foreign": iter([data.foreign])}  # a second reading would find nothing
    table = igeood.compare(model, iter(data.train), iter(data.held_out), sets)
    assert set(table.tnr) == set(table.auroc) == set(table.cost) == UNTUNED
    for method in ("fisher-rao-product", "vim", "she", "mahalanobis++", "igeood", "energy", "gram", "batch-norm"):
        box = igeood.white_box if igeood.METHODS[method].needs_layers else igeood.black_box
        guard = box(model, method=method).fit(data.train)
        for name in sets:
            rates = evaluate(guard.score(data.held_out), guard.score(getattr(data, name)))
            assert table.tnr[method][name] == pytest.approx(rates.tnr_at_tpr, abs=0.02)
            assert table.auroc[method][name] == pytest.approx(rates.auroc, abs=1e-3)
    assert table.forward > 0
    rows = table.to_dict()["methods"]
    assert [row["method"] for row in rows] == table.methods
    assert [row["tnr"] for row in rows] == sorted((row["tnr"] for row in rows), reverse=True)
    lines = repr(table).splitlines()
    assert len(lines) == 1 + len(UNTUNED)
    assert lines[0].split()[:3] == ["method", "ood", "foreign"]
    assert lines[1].split()[0] == table.methods[0]
    frame = pytest.importorskip("pandas") and table.to_pandas()
    assert list(frame.index) == table.methods


def test_arrays_and_methods_by_choice(known):
    wrapped = igeood.wrap(lambda f: -f.amax(dim=1), higher_is="ood")
    methods = ["max-logit", "knn", igeood.detector("knn", k=3), wrapped, wrapped, wrapped]
    table = igeood.compare(None, known.train, known.held_out, known.ood, methods=methods)
    assert set(table.tnr) == {"max-logit", "knn", "knn (2)", "<lambda>", "<lambda> (2)", "<lambda> (3)"}
    assert table.tnr["<lambda>"] == table.tnr["max-logit"]
    assert table.forward is None
    assert "µs a sample" in repr(table)
    logits = igeood.compare(None, (known.train.logits, known.train.labels), known.held_out.logits, known.ood.logits)
    assert set(logits.tnr) == {name for name in UNTUNED if not igeood.METHODS[name].needs_layers}


def test_what_cannot_be_compared(model, data):
    for arguments, message in (
        ((data.train, data.held_out, {}), "ood: empty; give at least one OOD set"),
        (([], data.held_out, data.ood), "train: "),
        ((data.train, [], data.ood), "held_out: "),
        ((torch.zeros(4, 3, 8, 8), data.held_out, data.ood), "labels: this method needs the class of each row"),
    ):
        with pytest.raises(InputError, match=f"^{message}"):
            igeood.compare(model, *arguments)
    with pytest.raises(InputError, match=r"^methods: empty"):
        igeood.compare(model, data.train, data.held_out, data.ood, methods=[])


class Cosine(torch.nn.Module):
    """A classifier without a linear head."""

    def __init__(self, inner):
        super().__init__()
        self.inner = inner

    def forward(self, x):
        return 8 * torch.nn.functional.normalize(self.inner(x), dim=1)


def test_methods_that_need_a_linear_head_are_left_out_where_there_is_none(model, data, caplog):
    with torch.inference_mode():
        table = igeood.compare(Cosine(model), data.train, data.held_out, {"held_out": data.ood})
    assert UNTUNED - set(table.tnr) == {"react", "ash", "scale", "vim", "fdbd"}
    assert "compare: react is left out: head: the logits are not linear" in caplog.text
    assert list(table.tnr["msp"]) == ["held_out"]  # a name like any other
    with pytest.raises(InputError, match=r"^head: the logits are not linear"):
        igeood.compare(Cosine(model), data.train, data.held_out, data.ood, methods=["react"])


def test_methods_that_need_other_layers_are_left_out_where_there_are_none(known, suited, caplog):
    mlp = torch.nn.Sequential(torch.nn.Linear(6, 8), torch.nn.ReLU(), torch.nn.Linear(8, 10)).eval()
    train, held_out, ood = (part.features["early"] for part in (known.train, known.held_out, known.ood))
    table = igeood.compare(mlp, (train, known.train.labels), held_out, ood)
    assert UNTUNED - set(table.tnr) == {"gram", "batch-norm"}
    assert "compare: gram is left out: layers: no convolution after a first one" in caplog.text
    assert "compare: batch-norm is left out: layers: no batch norm with running statistics" in caplog.text
    with pytest.raises(InputError, match="layers: no batch norm"):
        igeood.compare(mlp, (train, known.train.labels), held_out, ood, methods=["batch-norm"])
    arrays = [suited(part, igeood.METHODS["gram"].needs) for part in (known.train, known.held_out, known.ood)]
    logits = {name for name in UNTUNED if not igeood.METHODS[name].needs_layers}
    assert set(igeood.compare(None, *arrays).tnr) == logits | {"gram"}
