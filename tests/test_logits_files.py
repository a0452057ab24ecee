"""Files of logits: what is written comes back, in blocks that do not depend on the layout; bad files say where."""

import contextlib
import itertools
import pickle
import zipfile

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch

import igeood
from igeood.errors import InputError
from igeood.geometry.precision import chunk_rows
from igeood.outputs import Outputs, block_rows, recut


def lists(values, kind=None):
    return pa.array([list(map(float, row)) for row in values], pa.list_(kind or pa.float32()))


@pytest.mark.parametrize("suffix", [".parquet", ".npz"])
@pytest.mark.parametrize("ids", [None, [f"image {i}" for i in range(400)], np.arange(400) * 7])
def test_what_is_written_comes_back(known, tmp_path, suffix, ids):
    path = tmp_path / f"all{suffix}"
    igeood.write_logits(path, known.train, ids=ids)
    file = igeood.read_logits(path)
    assert (file.rows, file.layers) == (400, ["early", "block.late"])
    for _ in range(2):  # it can be read again
        whole = Outputs.concat(file)
        assert torch.equal(whole.logits, known.train.logits)
        assert torch.equal(whole.labels, known.train.labels)
        assert all(torch.equal(whole.features[layer], known.train.features[layer]) for layer in file.layers)
    found = [str(name) for _, names in file.blocks(ids=True) for name in names]
    assert found == list(map(str, range(400) if ids is None else ids))


@pytest.mark.parametrize("dtype", [np.float16, np.float32, np.float64, np.int32, np.uint8])
def test_numbers_of_any_type(tmp_path, dtype):
    values = np.arange(30).reshape(10, 3).astype(dtype)
    kind = pa.from_numpy_dtype(dtype)
    array = pa.FixedSizeListArray.from_arrays(pa.array(values.reshape(-1)), 3)
    pq.write_table(pa.table({"logits": array}), tmp_path / "fixed.parquet")
    pq.write_table(pa.table({"logits": array.cast(pa.list_(kind))}), tmp_path / "list.parquet")
    pq.write_table(pa.table({"logits": array.cast(pa.large_list(kind))}), tmp_path / "large.parquet")
    np.savez(tmp_path / "plain.npz", logits=values)
    np.savez_compressed(tmp_path / "small.npz", logits=values)
    for name in ("fixed.parquet", "list.parquet", "large.parquet", "plain.npz", "small.npz"):
        (block,) = igeood.read_logits(tmp_path / name)
        assert np.array_equal(block.logits.numpy(), values)
        assert block.numpy


def test_the_content_tells_the_format_not_the_name(tmp_path):
    igeood.write_logits(tmp_path / "a.npz", np.eye(3))
    (tmp_path / "a.npz").rename(tmp_path / "a.parquet")
    assert igeood.read_logits(tmp_path / "a.parquet").rows == 3


@pytest.mark.parametrize("group", [1, 7, 64, 1000])
def test_blocks_do_not_depend_on_row_groups(tmp_path, monkeypatch, group):
    monkeypatch.setattr("igeood.outputs.BLOCK_VALUES", 300)
    values = np.random.default_rng(0).normal(size=(1000, 3))
    pq.write_table(pa.table({"logits": lists(values)}), tmp_path / "a.parquet", row_group_size=group)
    np.savez(tmp_path / "a.npz", logits=values.astype(np.float32))
    for name in ("a.parquet", "a.npz"):
        blocks = list(igeood.read_logits(tmp_path / name))
        assert [len(block) for block in blocks] == [100] * 10
        assert np.array_equal(Outputs.concat(blocks).logits, values.astype(np.float32))


@pytest.mark.parametrize("cuts", [[], [1], [100], [1, 2, 3], [99, 101], [0, 250], [1000]])
def test_recut_keeps_all_samples_in_order(monkeypatch, cuts):
    monkeypatch.setattr("igeood.outputs.BLOCK_VALUES", 300)
    whole = Outputs(np.random.default_rng(0).normal(size=(1000, 3)))
    edges = [0, *cuts, 1000]
    blocks = list(recut(whole[a:b] for a, b in itertools.pairwise(edges)))
    assert [len(block) for block in blocks] == [100] * 10
    assert torch.equal(Outputs.concat(blocks).logits, whole.logits)
    assert [len(block) for block in recut([whole[:0]])] == [0]
    assert list(recut([])) == []


@pytest.mark.parametrize("n_classes", [2, 10, 1000, 3000, 6000, 50_000, 10**8])
def test_blocks_are_bounded_for_any_number_of_classes(n_classes):
    for features in (0, 500):
        rows = block_rows(n_classes, features)
        assert rows >= 1
        assert rows == 1 or rows * (n_classes + features) <= 8 << 20


def test_many_classes_give_the_same_scores_from_a_file_and_from_an_array(tmp_path, monkeypatch):
    """Where blocks are neither a round number of values, nor a row for each class."""
    monkeypatch.setattr("igeood.outputs.BLOCK_VALUES", 150)
    rng = np.random.default_rng(0)
    train, test = rng.normal(size=(400, 40)), rng.normal(size=(333, 40)).astype(np.float32)
    assert block_rows(40) == 30
    guard = igeood.black_box().fit(train, np.arange(400) % 40)
    igeood.write_logits(tmp_path / "a.parquet", test)
    expected = guard.score(test)
    assert np.array_equal(guard.score(igeood.read_logits(tmp_path / "a.parquet")), expected)
    assert np.array_equal(guard.score(iter(np.array_split(test, 7))), expected)


def test_a_guards_blocks_are_no_smaller_than_its_detectors_chunks():
    assert all(block_rows(width) >= chunk_rows(width) for width in (2, 10, 1000, 5000))


@pytest.mark.parametrize("suffix", [".parquet", ".npz"])
def test_guards_take_files(known, tmp_path, monkeypatch, suffix):
    monkeypatch.setattr("igeood.outputs.BLOCK_VALUES", 1000)  # a few blocks
    for name in ("train", "held_out", "test", "ood"):
        igeood.write_logits(tmp_path / f"{name}{suffix}", getattr(known, name))

    def file(name):
        return igeood.read_logits(tmp_path / f"{name}{suffix}")

    for make in (igeood.black_box, igeood.white_box, lambda: igeood.white_box(method="mahalanobis")):
        one = make().fit(file("train")).tune(file("held_out"), file("ood")).calibrate(file("held_out"))
        other = make().fit(known.train).tune(known.held_out, known.ood).calibrate(known.held_out)
        a, b = one.predict(file("test")), other.predict(known.test)
        assert isinstance(a.score, np.ndarray)
        for name in ("is_ood", "score", "p_value", "label"):
            assert np.array_equal(getattr(a, name), getattr(b, name))
        assert np.array_equal(one.score(file("test")), a.score)
        one.save(tmp_path / "guard.safetensors")
        loaded = igeood.load(tmp_path / "guard.safetensors")
        assert loaded.layers == one.layers
        assert np.array_equal(loaded.predict(file("test")).p_value, a.p_value)


def test_guards_take_blocks_of_any_kind(classifier):
    pairs = zip(classifier.train.split(9), classifier.labels.split(9), strict=True)
    guard = igeood.black_box().fit(pairs)
    whole = igeood.black_box().fit(classifier.train, classifier.labels)
    expected = whole.score(classifier.test)
    assert torch.equal(guard.score(iter(classifier.test.split(7))), expected)
    assert torch.equal(guard.score([Outputs(x) for x in classifier.test.split(70)]), expected)
    assert torch.equal(guard.score(list(classifier.test.split(70))), expected)
    assert torch.equal(guard.score((classifier.test, classifier.labels)), expected)
    assert isinstance(guard.score(iter([classifier.test.numpy()])), np.ndarray)
    assert guard.score([[0.0] * 10] * 3).shape == (3,)  # numbers, not blocks


def test_blocks_that_do_not_fit(classifier, known):
    guard = igeood.black_box().fit(classifier.train, classifier.labels)
    bad = classifier.test.clone()
    bad[123] = torch.nan
    with pytest.raises(InputError, match="logits: row 123 has NaN"):
        guard.score(iter(bad.split(50)))
    with pytest.raises(InputError, match="give each block its own"):
        guard.fit(iter(classifier.train.split(50)), classifier.labels)
    with pytest.raises(InputError, match="no batch"):
        guard.score(iter([]))
    with pytest.raises(InputError, match="read more than once"):
        guard.tune(iter([classifier.held_out]), classifier.ood)
    white = igeood.white_box(layers=["early"]).fit(known.train)
    assert white.layers == ["early"]
    with pytest.raises(InputError, match="no features of layer 'early', which the guard reads; these have none"):
        white.score(classifier.test)
    with pytest.raises(InputError, match="'fgsm' makes samples with the model's gradient"):
        white.tune(known.held_out, "fgsm")
    with pytest.raises(InputError, match="epsilon: an input step needs the model"):
        igeood.white_box(epsilon=0.1)


def test_probabilities_of_a_later_block(classifier, monkeypatch):
    monkeypatch.setattr("igeood.outputs.BLOCK_VALUES", 1000)  # blocks of 100 rows
    guard = igeood.black_box(probabilities=True).fit(classifier.train.softmax(1), classifier.labels)
    bad = classifier.test.softmax(1)
    bad[250] *= 2
    with pytest.raises(InputError, match=r"^probabilities: row 250 sums to 2"):
        guard.score(bad)


def nulls(values):
    return pa.array([None if i == 5 else list(row) for i, row in enumerate(values)], pa.list_(pa.float32()))


ROWS = np.random.default_rng(1).normal(size=(50, 3)).astype(np.float32)
RAGGED = [list(row)[: 2 if i == 17 else 3] for i, row in enumerate(ROWS.tolist())]
HOLED = [[None if (i, j) == (31, 1) else v for j, v in enumerate(row)] for i, row in enumerate(ROWS.tolist())]
NAN = np.where(np.arange(50)[:, None] == 44, np.nan, ROWS)
BAD_TABLES = {
    "no column 'logits' with the logits; it has scores; name another with --logits-column": {"scores": [1.0]},
    "logits: row 5 is null": {"logits": nulls(ROWS)},
    "logits: row 17 has 2 values, the first row 3": {"logits": pa.array(RAGGED, pa.list_(pa.float32()))},
    "logits: row 31 has a null among its values": {"logits": pa.array(HOLED, pa.list_(pa.float32()))},
    "logits: row 44 has NaN": {"logits": lists(NAN)},
    "logits: expected a list of numbers in each row, got double": {"logits": [1.0, 2.0]},
    "logits: expected a list of numbers in each row, got list<.*string>": {"logits": [["a", "b"]]},
    r"logits: expected shape \(N, C\).*C must be at least 2": {"logits": lists(ROWS[:, :1])},
    "label: row 1 is null": {"logits": lists(ROWS[:3]), "label": pa.array([0, None, 2])},
    "label: expected integers, got string": {"logits": lists(ROWS[:2]), "label": ["cat", "dog"]},
    "labels: 3 at position 1 is outside 0…2": {"logits": lists(ROWS[:2]), "label": [0, 3]},
    r"features\['a'\]: sample 44 has NaN": {"logits": lists(ROWS), "feature.a": lists(NAN)},
    "feature.a: row 17 has 2 values": {"logits": lists(ROWS), "feature.a": pa.array(RAGGED, pa.list_(pa.float32()))},
}


@pytest.mark.parametrize("message", BAD_TABLES)
def test_bad_tables_say_where(tmp_path, monkeypatch, message):
    monkeypatch.setattr("igeood.outputs.BLOCK_VALUES", 30)  # blocks of a few rows: numbers are the file's
    pq.write_table(pa.table(BAD_TABLES[message]), tmp_path / "bad.parquet", row_group_size=4)
    with pytest.raises(InputError, match=rf"bad\.parquet: {message}") as caught:
        list(igeood.read_logits(tmp_path / "bad.parquet"))
    assert "\n" not in str(caught.value)


def test_two_columns_of_one_name(tmp_path):
    pq.write_table(pa.Table.from_arrays([lists(ROWS), lists(ROWS)], names=["logits"] * 2), tmp_path / "two.parquet")
    with pytest.raises(InputError, match="two columns are called 'logits'"):
        igeood.read_logits(tmp_path / "two.parquet")


BAD_ARRAYS = {
    "no column 'logits'": {"x": ROWS},
    "logits: row 44 has NaN": {"logits": NAN},
    "logits: holds Python objects": {"logits": np.array([{"a": 1}, None])},
    "labels: holds Python objects": {"logits": ROWS[:2], "labels": np.array([0, None])},
    "logits: expected numbers of shape .* got float32 of shape": {"logits": ROWS[0]},
    "logits: expected numbers of shape .* got <U1": {"logits": np.array([["a", "b"]])},
    "logits: is stored by columns; save np.ascontiguousarray": {"logits": np.asfortranarray(ROWS)},
    "labels: expected integers, got float64": {"logits": ROWS[:2], "labels": [0.0, 1.0]},
    r"labels: shape \(3,\) for 2 rows": {"logits": ROWS[:2], "labels": [0, 1, 2]},
    r"feature.a: shape \(49, 3\) for 50 rows": {"logits": ROWS, "feature.a": ROWS[1:]},
}


@pytest.mark.parametrize("message", BAD_ARRAYS)
def test_bad_arrays_say_where(tmp_path, monkeypatch, message):
    monkeypatch.setattr("igeood.outputs.BLOCK_VALUES", 30)
    np.savez(tmp_path / "bad.npz", **BAD_ARRAYS[message])
    with pytest.raises(InputError, match=rf"bad\.npz: {message}"):
        list(igeood.read_logits(tmp_path / "bad.npz"))


UNUSUAL_IDS = {
    "list": pa.array([[1], [2]]),
    "struct": pa.array([{"a": 1}, {"a": 2}]),
    "binary": pa.array([b"a", b"b"]),
    ">i8": np.arange(2, dtype=">i8"),
    "complex128": np.array([1j, 2j]),
    "f0": np.zeros(2, dtype="i4,f4"),
    "S1": np.array([b"a", b"b"]),
}


@pytest.mark.parametrize("kind", UNUSUAL_IDS)
def test_ids_that_do_not_name_rows(tmp_path, kind):
    if isinstance(UNUSUAL_IDS[kind], pa.Array):
        pq.write_table(pa.table({"logits": lists(ROWS[:2]), "id": UNUSUAL_IDS[kind]}), tmp_path / "ids")
    else:
        with (tmp_path / "ids").open("wb") as file:
            np.savez(file, logits=ROWS[:2], id=UNUSUAL_IDS[kind])
    opened = igeood.read_logits(tmp_path / "ids")
    with pytest.raises(InputError, match=rf"ids: id: .*{kind}.* does not name rows; name another --id-column"):
        list(opened.blocks(ids=True))
    assert len(next(iter(opened))) == 2  # who does not want them is not kept from the rest


def test_ids_of_categories(tmp_path):
    names = pa.array(["a", "b", "a"]).dictionary_encode()
    pq.write_table(pa.table({"logits": lists(ROWS[:3]), "id": names}), tmp_path / "ids")
    (block,) = igeood.read_logits(tmp_path / "ids").blocks(ids=True)
    assert block[1].to_pylist() == ["a", "b", "a"]


def test_an_array_that_claims_more_than_it_has_is_not_believed(tmp_path):
    """A header of 8 TB with nothing behind it costs no memory: blocks are read as they come."""
    head = b"{'descr': '<f8', 'fortran_order': False, 'shape': (100000000000, 10), }".ljust(117) + b"\n"
    content = b"\x93NUMPY\x01\x00" + len(head).to_bytes(2, "little") + head + bytes(80)
    with zipfile.ZipFile(tmp_path / "bomb.npz", "w") as archive:
        archive.writestr("logits.npy", content)
    with pytest.raises(InputError, match="logits: ends before all of its rows"):
        list(igeood.read_logits(tmp_path / "bomb.npz"))


def test_no_files_of_logits(tmp_path):
    path = tmp_path / "file.npz"
    with pytest.raises(InputError, match=r"file\.npz: there is no such file"):
        igeood.read_logits(path)
    with pytest.raises(InputError, match="is a folder"):
        igeood.read_logits(tmp_path)
    for content, message in (
        (b"", "is empty"),
        (pickle.dumps({"logits": [1]}), "is neither Parquet nor npz"),
        (b"\x93NUMPY\x01\x00", r"np\.savez"),
        (b"PAR1" + bytes(50), "is damaged, or no Parquet file"),
        (b"PK\x03\x04" + bytes(50), "is damaged, or no npz file"),
    ):
        path.write_bytes(content)
        with pytest.raises(InputError, match=message):
            igeood.read_logits(path)


@pytest.mark.parametrize("suffix", [".parquet", ".npz"])
def test_every_truncation_is_told(tmp_path, suffix):
    igeood.write_logits(tmp_path / f"a{suffix}", ROWS, ids=np.arange(50))
    content = (tmp_path / f"a{suffix}").read_bytes()
    for end in range(0, len(content), 97):
        (tmp_path / f"cut{suffix}").write_bytes(content[:end])
        with pytest.raises(InputError):
            list(igeood.read_logits(tmp_path / f"cut{suffix}"))


@pytest.mark.parametrize("suffix", [".parquet", ".npz"])
def test_flipped_bytes_give_numbers_or_an_error_of_ours(tmp_path, suffix):
    igeood.write_logits(tmp_path / f"a{suffix}", ROWS, np.arange(50) % 3)
    content = bytearray((tmp_path / f"a{suffix}").read_bytes())
    for place in range(0, len(content), 13):
        flipped = content.copy()
        flipped[place] ^= 0x41
        (tmp_path / f"bad{suffix}").write_bytes(flipped)
        with contextlib.suppress(InputError):  # and nothing else
            assert sum(map(len, igeood.read_logits(tmp_path / f"bad{suffix}"))) <= 50


@pytest.mark.parametrize("suffix", [".parquet", ".npz"])
def test_labels_beside_outputs_are_written(tmp_path, suffix):
    igeood.write_logits(tmp_path / f"a{suffix}", Outputs(ROWS), np.arange(50) % 3)
    (block,) = igeood.read_logits(tmp_path / f"a{suffix}")
    assert np.array_equal(block.labels, np.arange(50) % 3)


def test_writing_what_does_not_fit(tmp_path):
    for arguments, options, message in (
        ((NAN,), {}, "row 44 has NaN"),
        ((ROWS, [0]), {}, "labels: expected 50"),
        ((ROWS,), {"ids": [1, 2]}, "ids: expected 50"),
        ((ROWS,), {"features": {"a": ROWS[1:]}}, r"features\['a'\]"),
        ((Outputs(ROWS), [0]), {}, "labels: expected 50"),
        ((Outputs(ROWS),), {"features": {"a": ROWS}}, "features: Outputs have their own"),
        ((ROWS[:2],), {"ids": [None, 1]}, "ids: expected names or numbers, got NoneType, int; convert each with str"),
        ((ROWS[:2],), {"ids": [tmp_path, tmp_path]}, "ids: expected names or numbers, got PosixPath"),
        ((ROWS[:2],), {"ids": [b"a", b"b"]}, "ids: expected names or numbers, got bytes"),
        ((ROWS[:2],), {"ids": [1j, 2j]}, "ids: expected names or numbers, got complex"),
        ((ROWS[:2],), {"ids": [[1], [2, 3]]}, "ids: cannot be read as an array"),
    ):
        for name in ("a.parquet", "a.npz"):
            with pytest.raises(InputError, match=message):
                igeood.write_logits(tmp_path / name, *arguments, **options)
    assert list(tmp_path.iterdir()) == []
    with pytest.raises(InputError, match="is a folder; name a file in it"):
        igeood.write_logits(tmp_path, ROWS)


@pytest.mark.parametrize("name", ["label", "labels"])
def test_labels_have_either_name(tmp_path, name):
    logits, classes = np.eye(3), np.array([0, 1, 2])
    np.savez(tmp_path / "a.npz", logits=logits, **{name: classes})
    pq.write_table(pa.table({"logits": list(logits), name: classes}), tmp_path / "a.parquet")
    for file in ("a.npz", "a.parquet"):
        (block,) = igeood.read_logits(tmp_path / file)
        assert block.labels.tolist() == [0, 1, 2]
