"""Tables of logits: what is written comes back, in blocks that do not depend on the layout; bad files say where."""

import pickle

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch

from igeood.errors import InputError
from igeood.outputs import Outputs, row_keys
from igeood.tables import id_keys, read_logits, write_logits

ROWS = np.random.default_rng(1).normal(size=(50, 3)).astype(np.float32)
SUFFIXES = [".parquet", ".npz"]


def lists(values):
    return pa.array([list(map(float, row)) for row in values], pa.list_(pa.float32()))


@pytest.mark.parametrize("suffix", SUFFIXES)
@pytest.mark.parametrize("ids", [None, [f"image {i}" for i in range(400)], np.arange(400) * 7])
def test_what_is_written_comes_back(known, tmp_path, suffix, ids):
    path = tmp_path / f"all{suffix}"
    write_logits(path, known.train, ids=ids)
    file = read_logits(path)
    assert (file.rows, file.layers) == (400, ["early", "block.late"])
    for _ in range(2):  # it can be read again
        outputs = Outputs.concat(file)
        assert torch.equal(outputs.logits, known.train.logits)
        assert torch.equal(outputs.labels, known.train.labels)
        assert all(torch.equal(outputs.features[layer], known.train.features[layer]) for layer in file.layers)
        assert outputs.numpy
    names = [str(name) for _, names in file.blocks(ids=True) for name in names]
    assert names == list(map(str, range(400) if ids is None else ids))


@pytest.mark.parametrize("suffix", SUFFIXES)
def test_only_what_is_asked_for_is_read(known, tmp_path, suffix):
    write_logits(tmp_path / f"a{suffix}", known.train)
    (outputs,) = read_logits(tmp_path / f"a{suffix}", layers=["early"], labelled=False)
    assert (list(outputs.features), outputs.labels) == (["early"], None)


@pytest.mark.parametrize("dtype", ["f2", "f4", "f8", "i4", "u1", ">f4"])
def test_numbers_of_any_type(tmp_path, dtype):
    values = np.arange(30).reshape(10, 3).astype(dtype)
    plain = values.astype(values.dtype.newbyteorder("="))
    array = pa.FixedSizeListArray.from_arrays(pa.array(plain.reshape(-1)), 3)
    kind = array.type.value_type
    pq.write_table(pa.table({"logits": array}), tmp_path / "fixed.parquet")
    pq.write_table(pa.table({"logits": array.cast(pa.list_(kind))}), tmp_path / "list.parquet")
    pq.write_table(pa.table({"logits": array.cast(pa.large_list(kind))}), tmp_path / "large.parquet")
    np.savez(tmp_path / "plain.npz", logits=np.asfortranarray(values))
    np.savez_compressed(tmp_path / "small.npz", logits=values)
    for path in sorted(tmp_path.iterdir()):
        (block,) = read_logits(path)
        assert np.array_equal(block.logits.numpy(), values)


@pytest.mark.parametrize("group", [1, 7, 64, 1000])
def test_blocks_do_not_depend_on_row_groups(tmp_path, monkeypatch, group):
    monkeypatch.setattr("igeood.outputs.BLOCK_VALUES", 300)
    values = np.random.default_rng(0).normal(size=(1000, 3)).astype(np.float32)
    pq.write_table(pa.table({"logits": lists(values)}), tmp_path / "a.parquet", row_group_size=group)
    write_logits(tmp_path / "a.npz", values)
    for name in ("a.parquet", "a.npz"):
        blocks = list(read_logits(tmp_path / name))
        assert [len(block) for block in blocks] == [100] * 10
        assert np.array_equal(Outputs.concat(blocks).logits, values)


def test_a_folder_is_its_files_in_order(tmp_path):
    write_logits(tmp_path / "b.npz", ROWS[30:], ids=[f"b{i}" for i in range(20)])
    write_logits(tmp_path / "a.parquet", ROWS[:30], ids=[f"a{i}" for i in range(30)])
    (tmp_path / "b.npz").rename(tmp_path / "b.parquet")  # the content tells the format, not the name
    (tmp_path / "notes.txt").write_text("not a table")
    folder = read_logits(tmp_path)
    assert folder.rows == 50
    assert np.array_equal(Outputs.concat(folder).logits, ROWS)
    assert [str(name) for _, ids in folder.blocks(ids=True) for name in ids][29:31] == ["a29", "b0"]
    bad = ROWS[30:].copy()
    bad[7] = np.nan
    (tmp_path / "b.parquet").unlink()
    np.savez(tmp_path / "b.npz", logits=bad, id=np.arange(20))
    with pytest.raises(InputError, match=r"b\.npz: logits: row 7 has NaN"):
        list(read_logits(tmp_path))
    write_logits(tmp_path / "b.npz", ROWS[:, :2], ids=np.arange(50))
    with pytest.raises(InputError, match=r"b\.npz: logits: row 0 has 2 values, expected 3"):
        list(read_logits(tmp_path))
    (tmp_path / "none").mkdir()
    with pytest.raises(InputError, match=r"no \.parquet or \.npz file in this folder"):
        read_logits(tmp_path / "none")


@pytest.mark.parametrize("suffix", SUFFIXES)
def test_a_table_without_rows_is_one_empty_block(tmp_path, suffix):
    write_logits(tmp_path / f"a{suffix}", ROWS[:0], features={"early": ROWS[:0]})
    (block,) = read_logits(tmp_path / f"a{suffix}")
    assert (len(block), block.n_classes, list(block.features)) == (0, 3, ["early"])


# Ids.


@pytest.mark.parametrize("suffix", SUFFIXES)
def test_ids_identify_samples_where_their_column_is_named(tmp_path, suffix):
    path = tmp_path / f"a{suffix}"
    write_logits(path, ROWS, ids=np.arange(50))
    (by_row,) = read_logits(path)
    (by_id,) = read_logits(path, identity="id")
    assert np.array_equal(by_row.keys, row_keys(torch.from_numpy(ROWS)))
    assert np.array_equal(by_id.keys, id_keys(range(50)))


@pytest.mark.parametrize("names", [pa.array(["a", "b", "a"]).dictionary_encode(), pa.array([b"a", b"b", b"a"])])
def test_ids_of_categories_and_bytes(tmp_path, names):
    pq.write_table(pa.table({"logits": lists(ROWS[:3]), "id": names}), tmp_path / "ids.parquet")
    (block,) = read_logits(tmp_path / "ids.parquet").blocks(ids=True)
    assert block[1].to_pylist() == names.to_pylist()


def test_the_key_of_an_id_is_that_of_its_text():
    expected = np.array([0xE75017CACE788F82, 0xCB1ABF8BEFF3192F], dtype=np.uint64)  # the same in every process
    for ids in ([7, "é"], ["7", "é"], np.array(["7", "é"]), pa.array(["7", "é"]), [np.int32(7), "é"]):
        assert np.array_equal(id_keys(ids), expected)
    assert id_keys([]).dtype == np.uint64
    assert len(np.unique(id_keys(range(10_000)))) == 10_000


@pytest.mark.parametrize(
    ("ids", "message"),
    [
        (["a", "b", "a"], "id: rows share an id"),
        (pa.array(["a", None, None]), "id: rows share an id"),
        (pa.array([[1], [2], [3]]), "id: list.* does not name rows"),
    ],
)
def test_ids_that_do_not_identify(tmp_path, ids, message):
    pq.write_table(pa.table({"logits": lists(ROWS[:3]), "id": ids}), tmp_path / "a.parquet")
    with pytest.raises(InputError, match=rf"a\.parquet: {message}"):
        list(read_logits(tmp_path / "a.parquet", identity="id"))
    assert len(Outputs.concat(read_logits(tmp_path / "a.parquet"))) == 3  # by row, where they are not named


@pytest.mark.parametrize("name", ["label", "labels"])
def test_labels_have_either_name(tmp_path, name):
    np.savez(tmp_path / "a.npz", logits=np.eye(3), **{name: np.arange(3)})
    pq.write_table(pa.table({"logits": list(np.eye(3)), name: np.arange(3)}), tmp_path / "a.parquet")
    for file in ("a.npz", "a.parquet"):
        (block,) = read_logits(tmp_path / file)
        assert block.labels.tolist() == [0, 1, 2]


# Bad tables.

NULL = pa.array([None if i == 5 else list(row) for i, row in enumerate(ROWS)], pa.list_(pa.float32()))
RAGGED = pa.array([list(row)[: 2 if i == 17 else 3] for i, row in enumerate(ROWS.tolist())], pa.list_(pa.float32()))
HOLED = pa.array([[None if (i, j) == (31, 1) else float(v) for j, v in enumerate(row)] for i, row in enumerate(ROWS)])
NAN = np.where(np.arange(50)[:, None] == 44, np.nan, ROWS)
BAD_TABLES = {
    "expected one column 'logits' among .'scores'.; name another": {"scores": [1.0]},
    "logits: row 5 has 0 values, expected 3": {"logits": NULL},
    "logits: row 17 has 2 values, expected 3": {"logits": RAGGED},
    "logits: row 31 has NaN": {"logits": HOLED},
    "logits: expected a list of numbers in each row, got double": {"logits": [1.0, 2.0]},
    "logits: expected real numbers": {"logits": [["a", "b"]]},
    r"logits: expected shape \(N, C\)": {"logits": lists(ROWS[:, :1])},
    "label: row 1 is null": {"logits": lists(ROWS[:3]), "label": pa.array([0, None, 2])},
    "labels: row .*outside 0…2": {"logits": lists(ROWS[:2]), "label": [0, 3]},
    r"features\['a'\]: .* 44 .*NaN": {"logits": lists(ROWS), "feature.a": lists(NAN)},
}


@pytest.mark.parametrize("message", BAD_TABLES)
def test_bad_tables_say_where(tmp_path, monkeypatch, message):
    monkeypatch.setattr("igeood.outputs.BLOCK_VALUES", 30)  # blocks of a few rows: numbers are the file's
    pq.write_table(pa.table(BAD_TABLES[message]), tmp_path / "bad.parquet", row_group_size=4)
    with pytest.raises(InputError, match=rf"bad\.parquet: {message}") as caught:
        list(read_logits(tmp_path / "bad.parquet"))
    assert "\n" not in str(caught.value)


BAD_ARRAYS = {
    "is no sound Parquet or npz file .*Object arrays": {"logits": np.array([{"a": 1}, None])},
    "is no sound Parquet or npz file .*labels": {"logits": ROWS[:2], "labels": [0, 1, 2]},
    r"is no sound Parquet or npz file .*logits: expected shape .* got \(2, 3, 4\)": {"logits": np.zeros((2, 3, 4))},
    r"is no sound Parquet or npz file .*logits: expected shape .* got \(2, 0\)": {"logits": np.zeros((2, 0))},
    "logits: expected a list of numbers in each row, got float": {"logits": ROWS[0]},
    "labels: expected .* integers": {"logits": ROWS[:2], "labels": [0.5, 1.0]},
}


@pytest.mark.parametrize("message", BAD_ARRAYS)
def test_bad_arrays_say_where(tmp_path, message):
    np.savez(tmp_path / "bad.npz", **BAD_ARRAYS[message])
    with pytest.raises(InputError, match=rf"bad\.npz: {message}"):
        list(read_logits(tmp_path / "bad.npz"))


def test_columns_that_are_missing_or_double(tmp_path):
    path = tmp_path / "a.parquet"
    write_logits(path, ROWS)
    for options in ({"logits": "x"}, {"label": "x"}, {"identity": "x"}, {"layers": ["x"]}):
        with pytest.raises(InputError, match=r"a\.parquet: expected one column '(feature\.)?x' among"):
            read_logits(path, **options)
    pq.write_table(pa.Table.from_arrays([lists(ROWS)] * 2, names=["logits"] * 2), path)
    with pytest.raises(InputError, match="one column 'logits' among"):
        read_logits(path)


# Damaged files.


@pytest.mark.parametrize("content", [b"", pickle.dumps({"logits": [1]}), b"PAR1" + bytes(50), b"PK" + bytes(50)])
def test_files_that_are_no_tables(tmp_path, content):
    path = tmp_path / "file"
    with pytest.raises(FileNotFoundError):
        read_logits(path)
    path.write_bytes(content)
    with pytest.raises(InputError, match="file: is no sound Parquet or npz file"):
        read_logits(path)


@pytest.mark.parametrize("suffix", SUFFIXES)
def test_every_truncation_is_refused(tmp_path, suffix):
    write_logits(tmp_path / f"a{suffix}", ROWS, ids=np.arange(50))
    content = (tmp_path / f"a{suffix}").read_bytes()
    for end in range(0, len(content), 97):
        (tmp_path / f"cut{suffix}").write_bytes(content[:end])
        with pytest.raises(InputError):
            list(read_logits(tmp_path / f"cut{suffix}"))


# Writing.


@pytest.mark.parametrize("suffix", SUFFIXES)
def test_labels_and_features_beside_outputs_are_written(tmp_path, suffix):
    write_logits(tmp_path / f"a{suffix}", Outputs(ROWS), np.arange(50) % 3, features={"a": ROWS})
    (block,) = read_logits(tmp_path / f"a{suffix}")
    assert np.array_equal(block.labels, np.arange(50) % 3)
    assert np.array_equal(block.features["a"], ROWS)


@pytest.mark.parametrize("suffix", SUFFIXES)
def test_writing_what_does_not_fit(tmp_path, suffix):
    for arguments, options, message in (
        ((NAN,), {}, "row 44 has NaN"),
        ((ROWS, [0]), {}, "labels: expected 50"),
        ((ROWS,), {"features": {"a": ROWS[1:]}}, r"features\['a'\]"),
        ((ROWS,), {"ids": [1, 2]}, "ids: expected 50 names or numbers, got int64"),
        ((ROWS[:2],), {"ids": [b"a", b"b"]}, "ids: expected 2 names or numbers, got .*with str"),
    ):
        with pytest.raises(InputError, match=message):
            write_logits(tmp_path / f"a{suffix}", *arguments, **options)
    assert list(tmp_path.iterdir()) == []
    with pytest.raises(InputError, match="is a folder, or no ordinary file"):
        write_logits(tmp_path, ROWS)
