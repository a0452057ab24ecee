"""`on_error="refuse"`: a bad sample is refused with a reason, and the others get what they would get."""

import copy

import numpy as np
import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader

import igeood
from igeood.outputs import Outputs

FIELDS = ("is_ood", "score", "p_value", "label")


def reasons_of(verdict, expected, bad):
    """Check that the bad rows are refused and all others are as expected, to the last bit; the reasons."""
    rows = np.setdiff1d(np.arange(len(expected)), bad)
    for name in FIELDS:
        value, wanted = (np.asarray(getattr(each, name)) for each in (verdict, expected))
        np.testing.assert_array_equal(value[rows], wanted[rows])
    for row in bad:
        assert verdict[row][:4] == (True, float("inf"), pytest.approx(1 / 401), -1), row
    assert (verdict.reason is None) == (not bad)
    assert np.flatnonzero(~verdict.is_read).tolist() == sorted(bad)
    return [verdict.reason[row] for row in sorted(bad)]


@pytest.mark.parametrize("as_kind", [torch.Tensor.clone, lambda t: t.numpy().copy(), lambda t: list(t.split(70))])
def test_rows_of_arrays(known, as_kind, refused):
    guard, logits = igeood.black_box().fit(known.train.logits, known.train.labels), known.test.logits
    expected = guard.calibrate(known.held_out.logits).predict(as_kind(logits))
    assert reasons_of(guard.predict(as_kind(logits), on_error="refuse"), expected, []) == []
    bad = logits.clone()
    bad[3, 2], bad[80], bad[399, 0] = torch.nan, -torch.inf, torch.inf
    verdict = guard.predict(as_kind(bad), on_error="refuse")
    assert all("logits" in reason for reason in reasons_of(verdict, expected, [3, 80, 399]))
    assert type(verdict.score) is type(expected.score)
    assert np.isinf(np.asarray(guard.score(as_kind(bad), on_error="refuse"))).nonzero()[0].tolist() == [3, 80, 399]
    with refused("logits") as raised:
        guard.predict(as_kind(bad))
    assert "row 3" in str(raised.value)
    with refused("on_error"):
        guard.score(as_kind(logits), on_error="skip")
    with refused("logits"):
        guard.score(as_kind(logits[:, :9]), on_error="refuse")
    assert guard.predict(bad[80:81], on_error="refuse")[0].is_ood  # nothing but bad rows


def test_rows_of_features_and_rows_that_somebody_else_could_not_read(known, refused):
    guard = igeood.white_box().fit(known.train).calibrate(known.held_out)
    features = {layer: value.clone() for layer, value in known.test.features.items()}
    features["early"][2, 1] = torch.inf
    outputs = Outputs(known.test.logits, features, on_error="refuse", reasons={9: "a torn file"})
    early, torn = reasons_of(guard.predict(outputs, on_error="refuse"), guard.predict(known.test), [2, 9])
    assert ("early" in early, torn) == (True, "a torn file")
    for step in (guard.predict, guard.calibrate):
        with pytest.raises(igeood.errors.InputError, match="row 2"):
            step(outputs)


class Dark(nn.Module):
    """Returns NaN for dark samples."""

    def __init__(self, model):
        super().__init__()
        self.model = model

    def forward(self, x):
        return torch.where(x.mean((1, 2, 3))[:, None] < 0.01, torch.nan, self.model(x))


@pytest.mark.parametrize("access", ["black", "grey", "white"])
def test_samples_with_nan_before_or_after_the_model(access, model, data, left_as_found, refused):
    net, options = Dark(copy.deepcopy(model)).train(), {"epsilon": 0.001} if access == "grey" else {}
    guard = getattr(igeood, f"{access}_box")(net, **options).fit(data.train).calibrate(data.held_out)
    x, bad = data.test, data.test.clone()
    bad[4], bad[260] = 0.001, torch.nan
    with left_as_found(net):
        for wrap in (torch.Tensor.clone, lambda x: DataLoader(x, batch_size=50)):
            verdict = guard.predict(wrap(bad), on_error="refuse")
            dark, nan = reasons_of(verdict, guard.predict(wrap(x)), [4, 260])
            assert ("logits" in dark, "inputs" in nan) == (True, True)
        with refused("inputs"):
            guard.predict(bad[250:])
        with refused("logits"):
            guard.predict(bad[:9])


def test_an_exception_of_the_users_model_or_data_passes_through_and_keeps_no_modes(model, data, left_as_found):
    """In the middle of a generator that draws numbers, and while somebody keeps the exception."""

    def images():
        yield data.test[:50] + 0.0 * torch.rand(1)
        raise KeyError("seven")

    net = nn.Sequential(copy.deepcopy(model)).train()
    guard = igeood.white_box(net).fit(data.train).calibrate(data.held_out)
    with left_as_found(net):
        with pytest.raises(KeyError, match="seven") as kept:
            guard.predict(images(), on_error="refuse")
        with pytest.raises(RuntimeError, match="channels"):
            guard.predict(data.test[:, :2], on_error="refuse")
    assert kept.value.__traceback__ is not None
