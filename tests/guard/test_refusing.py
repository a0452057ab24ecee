"""`on_error="refuse"`: a bad sample is refused with a reason, and the others get what they would get."""

import copy
import errno

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader

import igeood
from igeood.errors import InputError
from igeood.tables import read_logits

FIELDS = ("is_ood", "score", "p_value", "label")


def same(verdict, expected, bad=()):
    """Whether all but the bad rows are as expected, to the last bit, and the bad ones are refused; their reasons."""
    rows = np.setdiff1d(np.arange(len(expected)), list(bad))
    for name in FIELDS:
        value, wanted = (np.asarray(getattr(each, name)) for each in (verdict, expected))
        np.testing.assert_array_equal(value[rows], wanted[rows])
    for row in bad:
        assert verdict[row][:4] == (True, float("inf"), pytest.approx(1 / 401), -1), row
    assert (verdict.reason is None) == (not bad)
    assert bad == () or [row for row, why in enumerate(verdict.reason) if why is not None] == sorted(bad)
    return [] if verdict.reason is None else [verdict.reason[row] for row in sorted(bad)]


@pytest.fixture(scope="module")
def guards(known, classifier):
    shares = [getattr(classifier, name).softmax(1) for name in ("train", "held_out")]
    return {
        "logits": igeood.black_box().fit(known.train.logits, known.train.labels).calibrate(known.held_out.logits),
        "layers": igeood.white_box().fit(known.train).calibrate(known.held_out),
        "shares": igeood.black_box(probabilities=True).fit(shares[0], classifier.labels).calibrate(shares[1]),
    }


@pytest.mark.parametrize("as_kind", [torch.Tensor.clone, lambda t: t.numpy().copy(), lambda t: list(t.split(70))])
def test_rows_of_arrays(guards, known, as_kind):
    guard, logits = guards["logits"], known.test.logits
    expected = guard.predict(as_kind(logits))
    assert same(guard.predict(as_kind(logits), on_error="refuse"), expected) == []
    bad = logits.clone()
    bad[3, 2], bad[80], bad[399, 0] = torch.nan, -torch.inf, torch.inf
    verdict = guard.predict(as_kind(bad), on_error="refuse")
    assert set(same(verdict, expected, (3, 80, 399))) == {"logits: NaN, +inf or nothing but −inf"}
    assert type(verdict.score) is type(expected.score)
    assert np.isinf(np.asarray(guard.score(as_kind(bad), on_error="refuse"))).nonzero()[0].tolist() == [3, 80, 399]
    with pytest.raises(InputError, match="logits: row 3 has NaN"):
        guard.predict(as_kind(bad))
    with pytest.raises(InputError, match="on_error: no 'skip'; there are raise, refuse"):
        guard.score(logits, on_error="skip")
    with pytest.raises(InputError, match="9 columns, but IgeoodLogits was fitted on 10"):
        guard.score(as_kind(logits[:, :9]), on_error="refuse")
    assert guard.predict(bad[80:81], on_error="refuse")[0].is_ood  # nothing but bad rows


def test_rows_of_probabilities_and_features(guards, classifier, known, tmp_path):
    shares = classifier.test.softmax(1)
    bad = shares.clone()
    bad[5] *= 2
    bad[7, 0] = torch.nan
    verdict = guards["shares"].predict(bad, on_error="refuse")
    said = same(verdict, guards["shares"].predict(shares), (5, 7))
    assert [why.split(":")[0] for why in said] == ["probabilities", "logits"]

    features = {layer: value.tolist() for layer, value in known.test.features.items()}
    logits = known.test.logits.tolist()
    features["early"][2][1], features["block.late"][9], logits[0], logits[4] = None, [1.0], None, [1.0] * 11
    columns = {"logits": logits, **{f"feature.{layer}": rows for layer, rows in features.items()}}
    pq.write_table(pa.table(columns), tmp_path / "bad.parquet", row_group_size=90)
    file, expected = read_logits(tmp_path / "bad.parquet"), guards["layers"].predict(known.test)
    verdict = guards["layers"].predict(file, on_error="refuse")
    first, early, wide, late = same(verdict, expected, (0, 2, 4, 9))
    assert (first, wide) == ("logits: 0 values, expected 10", "logits: 11 values, expected 10")
    assert early.startswith("features['early']: NaN")
    assert late == "feature.block.late: 1 values, expected 9"
    for use in (guards["layers"].predict, guards["layers"].calibrate):
        with pytest.raises(InputError, match="row 0 has 0 values, expected 10; fix that row"):
            use(file)
    file.on_error = "refuse"  # its blocks have bad rows: a guard that takes none says so
    with pytest.raises(InputError, match="logits: 0 values, expected 10; remove that row, or use on_error='refuse'"):
        guards["layers"].predict(file)


class Images(list):
    """A data set whose samples may be exceptions."""

    def __getitem__(self, index):
        item = super().__getitem__(index)
        if isinstance(item, Exception):
            raise item
        return item


class Fussy(nn.Module):
    """Fails on samples that are all zeros, and returns NaN for dark ones."""

    def __init__(self, model):
        super().__init__()
        self.model = model

    def forward(self, x):
        if not x.flatten(1).any(dim=1).all():
            raise ZeroDivisionError("a sample of\nzeros")
        return torch.where(x.mean((1, 2, 3), keepdim=True)[:, :, 0, 0] < 0.01, torch.nan, self.model(x))


@pytest.fixture(scope="module", params=["black", "grey", "white"])
def fussy(request, model, data):
    net, options = Fussy(copy.deepcopy(model)).train(), {"epsilon": 0.001} if request.param == "grey" else {}
    return getattr(igeood, f"{request.param}_box")(net, **options).fit(data.train).calibrate(data.held_out)


def test_samples_on_which_the_model_or_the_data_set_fails(fussy, data, left_as_found):
    net, x = fussy.inputs.model, data.test
    loader = DataLoader(x, batch_size=50)
    with left_as_found(net):
        expected = fussy.predict(loader)
        assert same(fussy.predict(loader, on_error="refuse"), expected) == []
        bad = x.clone()
        bad[3], bad[4], bad[260], bad[299] = 0.0, 0.001, torch.nan, 0.0
        zero, dark, nan, last = same(fussy.predict(bad, on_error="refuse"), fussy.predict(x), (3, 4, 260, 299))
        assert zero == last == "model: ZeroDivisionError: a sample of zeros"
        assert (nan, "NaN" in dark) == ("inputs: NaN or infinity", True)
        samples = Images(bad)
        samples[7], samples[8] = ValueError("odd"), FileNotFoundError(errno.ENOENT, "gone", "8.png")
        samples[100:150] = [StopIteration()] * 50  # a whole batch
        for workers in (0, 1):
            verdict = fussy.predict(DataLoader(samples, batch_size=50, num_workers=workers), on_error="refuse")
            rows = (3, 4, 7, 8, *range(100, 150), 260, 299)
            said = same(verdict, expected, rows)
            assert (said[2], said[3]) == ("ValueError: odd", "FileNotFoundError: [Errno 2] gone: '8.png'")
        with pytest.raises(ValueError, match="odd"):
            fussy.predict(DataLoader(samples, batch_size=50))


def test_what_concerns_no_single_sample_is_an_error(fussy, model, data, left_as_found):
    net, x = fussy.inputs.model, data.test[:60]
    disk = Images(x)
    disk[5] = OSError(errno.EIO, "of the disk")
    memory = Images(x)
    memory[5] = MemoryError("of the memory")
    for source, error, message in (
        (DataLoader(disk, batch_size=20), OSError, "of the disk"),
        (DataLoader(memory, batch_size=20), MemoryError, "of the memory"),
        (DataLoader(Images([ValueError("odd")] * 9)), InputError, "x: none of 9 samples can be read; the first: Val"),
        (x[:, :2], InputError, "none of 60 samples can be read; the first: model: RuntimeError: Given groups=1"),
        (iter([x[:, :2]] * 99), InputError, "none of 300 samples"),  # it does not try them all
        (x.to(torch.uint8), InputError, "images of bytes"),
    ):
        with left_as_found(net), pytest.raises(error, match=message):
            fussy.predict(source, on_error="refuse")


def test_a_batch_that_fails_only_as_a_whole_is_an_error(model, data):
    class Small(nn.Module):
        def forward(self, x):
            if len(x) > 100:
                raise RuntimeError("too much at once")
            return model(x)

    guard = igeood.black_box(Small()).fit(data.train)
    with pytest.raises(RuntimeError, match="too much at once"):
        guard.score(data.test, on_error="refuse")
    assert torch.equal(guard.score(data.test.split(90), on_error="refuse"), guard.score(data.test.split(90)))


def test_iterable_data_sets_and_own_batches_are_read_as_they_are(fussy, data):
    class Stream(torch.utils.data.IterableDataset):
        def __iter__(self):
            return iter(data.test)

    for loader in (DataLoader(Stream(), batch_size=50), DataLoader(list(data.test.split(50)), batch_size=None)):
        assert same(fussy.predict(loader, on_error="refuse"), fussy.predict(loader)) == []
