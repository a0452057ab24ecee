"""Tables of logits: what is written comes back, in blocks that do not depend on the layout; bad files say where."""

from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch

from igeood.errors import InputError
from igeood.outputs import Outputs, id_keys, row_keys
from igeood.tables import read_logits, write_logits

ROWS = np.random.default_rng(1).normal(size=(50, 3)).astype(np.float32)
NAN = np.where(np.arange(50)[:, None] == 44, np.nan, ROWS)
SUFFIXES = [".parquet", ".npz"]
CSV = "id,label,logit_10,logit_9\n007,1,0.5,1\n,0,2,-3e-1\n"


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
        for name in ("logits", "labels", "features"):
            torch.testing.assert_close(getattr(outputs, name), getattr(known.train, name), rtol=0, atol=0)
        assert outputs.numpy
    names = [str(name) for _, names in file.blocks(ids=True) for name in names]
    assert names == list(map(str, range(400) if ids is None else ids))


@pytest.mark.parametrize("suffix", SUFFIXES)
def test_labels_and_features_beside_outputs_are_written_and_read_where_they_are_asked_for(tmp_path, suffix):
    path, labels = tmp_path / f"a{suffix}", np.arange(50) % 3
    write_logits(path, Outputs(ROWS), labels, features={"a": ROWS, "b": ROWS + 1})
    (block,) = read_logits(path)
    assert np.array_equal(block.labels, labels)
    assert np.array_equal(block.features["b"], ROWS + 1)
    (some,) = read_logits(path, layers=["a"], labelled=False)
    assert (list(some.features), some.labels) == (["a"], None)
    write_logits(path, ROWS[:0], features={"a": ROWS[:0]})
    (empty,) = read_logits(path)  # one block without rows
    assert (len(empty), empty.n_classes, list(empty.features)) == (0, 3, ["a"])


@pytest.mark.parametrize("dtype", ["f2", "f4", "f8", "i4", "u1", ">f4"])
def test_numbers_of_any_type(tmp_path, dtype):
    values = np.arange(30).reshape(10, 3).astype(dtype)
    plain = values.astype(values.dtype.newbyteorder("="))
    array = pa.FixedSizeListArray.from_arrays(pa.array(plain.reshape(-1)), 3)
    kind = array.type.value_type
    for name, column in (("fixed", array.type), ("list", pa.list_(kind)), ("large", pa.large_list(kind))):
        pq.write_table(pa.table({"logits": array.cast(column)}), tmp_path / f"{name}.parquet")
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
    np.savez(tmp_path / "c.npz", logits=NAN, id=np.arange(50))
    with pytest.raises(InputError, match=r"c\.npz: logits: row 44 has NaN"):
        list(read_logits(tmp_path))
    write_logits(tmp_path / "c.npz", ROWS[:, :2], ids=np.arange(50))
    with pytest.raises(InputError, match=r"c\.npz: logits: row 0 has 2 values, expected 3"):
        list(read_logits(tmp_path))
    (tmp_path / "none").mkdir()
    with pytest.raises(InputError, match=r"no \.parquet, .* file in this folder"):
        read_logits(tmp_path / "none")


@pytest.mark.parametrize("suffix", SUFFIXES)
def test_ids_identify_samples_by_their_text_where_their_column_is_named(tmp_path, suffix):
    path = tmp_path / f"a{suffix}"
    write_logits(path, ROWS, ids=np.arange(50))
    (by_row,) = read_logits(path)
    (by_id,) = read_logits(path, identity="id")
    assert np.array_equal(by_row.keys, row_keys(torch.from_numpy(ROWS)))
    assert np.array_equal(by_id.keys, id_keys(range(50)))
    expected = np.array([0xE75017CACE788F82, 0xCB1ABF8BEFF3192F], dtype=np.uint64)  # the same in every process
    for ids in ([7, "é"], ["7", "é"], np.array(["7", "é"]), pa.array(["7", "é"]), [np.int32(7), "é"]):
        assert np.array_equal(id_keys(ids), expected)
    assert len(np.unique(id_keys(range(10_000)))) == 10_000


@pytest.mark.parametrize("suffix", SUFFIXES)
def test_the_column_id_identifies_samples_unless_every_file_may_have_the_same_ids(tmp_path, suffix):
    path = tmp_path / f"a{suffix}"
    texts = [f"{i * 7919 + 5000:x}-{i * 7919 + 5000}" for i in range(50)]
    for ids, identifies in (
        (texts, True), ([str(7 * i + 9) for i in range(50)], False), (np.arange(50) + 9000, False),
        (np.arange(50), False), (np.arange(50) + 1, False),
        ([f"image {i}" for i in reversed(range(50))], False), ([*texts[:49], texts[0]], False),
    ):  # fmt: skip
        write_logits(path, ROWS, ids=ids)
        (block,) = read_logits(path)
        assert block.identified == identifies
        assert np.array_equal(block.keys, id_keys(ids) if identifies else row_keys(torch.from_numpy(ROWS)))


@pytest.mark.parametrize("ids", [pa.array(["a", "b", "a"]).dictionary_encode(), pa.array(["a", None, None])])
def test_ids_that_do_not_identify_still_name_rows(tmp_path, ids):
    pq.write_table(pa.table({"logits": lists(ROWS[:3]), "id": ids}), tmp_path / "a.parquet")
    with pytest.raises(InputError, match=r"a\.parquet: id: rows share an id"):
        list(read_logits(tmp_path / "a.parquet", identity="id"))
    ((block, names),) = read_logits(tmp_path / "a.parquet").blocks(ids=True)
    assert (len(block), names.to_pylist()) == (3, ids.to_pylist())


RAGGED = pa.array([list(row)[: 2 if i == 17 else 3] for i, row in enumerate(ROWS.tolist())], pa.list_(pa.float32()))
NESTED = pa.array([[[1.0, 2.0]], [[3.0, 4.0]]])
HOLED = pa.array([[None if (i, j) == (31, 1) else float(v) for j, v in enumerate(row)] for i, row in enumerate(ROWS)])
INTEGERS = pa.array([[1, None if i == 110 else 2, 3] for i in range(120)], pa.list_(pa.int8()))
BAD = {
    "expected one column 'logits' among .'scores'.; name another": {"scores": [1.0]},
    "logits: row 17 has 2 values, expected 3": {"logits": RAGGED},
    "logits: row 31 has NaN": {"logits": HOLED},
    "logits: row 110 has NaN": {"logits": INTEGERS},  # beyond the rows that show the type
    "logits: expected a list of numbers in each row, got double; write lists, or name": {"logits": [1.0, 2.0]},
    "logits: row 1 has 2 lists, expected one": {"logits": pa.array([NESTED[0].as_py(), NESTED[0].as_py() * 2])},
    "logits: has one value in each row; write": {"logits": [[1.0], [2.0]]},
    "logits: expected numbers, got struct": {"logits": [[{"a": 1.0}]]},
    "logits: row 1 has '…', which is no number": {"logits": ["[0.5 2]", "[0.5 …]"]},
    "label: row 1 is null": {"logits": lists(ROWS[:3]), "label": pa.array([0, None, 2])},
    r"features\['a'\]: .* 44 .*NaN": {"logits": lists(ROWS), "feature.a": lists(NAN)},
    "id: list.* does not name rows": {"logits": lists(ROWS[:1]), "id": [[1]]},
    "is no sound npz file .*labels": {"logits": ROWS[:2], "labels": np.arange(3)},
    r"logits: expected shape .* got \(2, 0\)": {"logits": np.zeros((2, 0))},
    "labels: expected .* integers": {"logits": ROWS[:2], "labels": np.array([0.5, 1.0])},
}


@pytest.mark.parametrize("message", BAD)
def test_bad_tables_say_where(tmp_path, monkeypatch, message):
    monkeypatch.setattr("igeood.outputs.BLOCK_VALUES", 30)  # blocks of a few rows: numbers are the file's
    columns = BAD[message]
    if isinstance(columns.get("logits"), np.ndarray):
        np.savez(tmp_path / "bad.npz", **columns)
    else:
        pq.write_table(pa.table(columns), tmp_path / "bad.parquet", row_group_size=4)
    with pytest.raises(InputError, match=rf"bad\.\w+: {message}") as caught:
        list(read_logits(tmp_path, identity="id" if "id" in columns else None))
    assert "\n" not in str(caught.value)


def test_columns_of_either_name_and_those_that_are_missing_or_double(tmp_path):
    np.savez(tmp_path / "a.npz", logits=np.eye(3), label=np.arange(3))
    pq.write_table(pa.table({"logits": list(np.eye(3)), "labels": np.arange(3)}), tmp_path / "a.parquet")
    for file in ("a.npz", "a.parquet"):
        (block,) = read_logits(tmp_path / file)
        assert block.labels.tolist() == [0, 1, 2]
    path = tmp_path / "a.parquet"
    write_logits(path, ROWS)
    for options in ({"logits": "x"}, {"label": "x"}, {"identity": "x"}, {"layers": ["x"]}):
        with pytest.raises(InputError, match=r"a\.parquet: expected one column '(feature\.)?x' among"):
            read_logits(path, **options)
    pq.write_table(pa.Table.from_arrays([lists(ROWS)] * 2, names=["logits"] * 2), path)
    with pytest.raises(InputError, match="one column 'logits' among"):
        read_logits(path)


def test_text_and_nested_lists_are_read_as_they_are_meant(tmp_path):
    path = tmp_path / "a.csv"
    path.write_text(CSV)
    for pattern in ("logit_*", "*"):  # by number, and without what has another meaning
        ((block, ids),) = read_logits(path, logits=pattern).blocks(ids=True)
        assert (block.logits.tolist(), block.labels.tolist()) == ([[1.0, 0.5], [np.float32(-0.3), 2.0]], [1, 0])
        assert ids.to_pylist() == ["007", ""]
    path.write_text(CSV.replace("-3e-1", "0.30000000000000004"))  # no float32 is written so
    assert next(iter(read_logits(path, logits="*"))).logits[1].tolist() == [0.30000000000000004, 2.0]
    path.write_text(CSV.replace("logit_10", "cat").replace("logit_9", "dog"))  # without numbers: in the file's order
    assert next(iter(read_logits(path, logits="*"))).logits[0].tolist() == [0.5, 1.0]
    pq.write_table(pa.table({"logits": NESTED}), tmp_path / "a.parquet")
    np.savez(tmp_path / "a.npz", logits=np.arange(1.0, 5).reshape(2, 1, 2))
    (tmp_path / "a.jsonl").write_text('{"logits": [[1, 2]]}\n{"logits": [[3, 4.0]], "more": "x"}\n')
    (tmp_path / "a.csv").write_text('logits\n"[1, 2]"\n"[[ 3.\n  4.]]"\n')
    for suffix in (".parquet", ".npz", ".jsonl", ".csv"):
        assert next(iter(read_logits(tmp_path / f"a{suffix}"))).logits.tolist() == [[1, 2], [3, 4]]
    paths = [tmp_path / f"a{suffix}" for suffix in (".csv", ".npz")]
    file = read_logits(paths)
    assert (file.rows, len(next(iter(file))), file.rows) == (None, 4, 4)  # text is counted as it is read


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (("2,-3e-1", "2,abc"), "logit_9: row 1 has 'abc', which is no number"),
        (("2,-3e-1", "2,"), r"logit_\*: row 1 has NaN"),
        (("2,-3e-1", "2"), "is no sound CSV file .*Row #3: Expected 4 columns, got 3"),
        (("007,1", "007,cat"), "label: row 0 has 'cat', which is no number"),
        (("007,1", "007,0.5"), "label: row 0 has '0.5', which is no class"),
        (("logit_", "class_"), r"no column is called 'logit_\*' among \['id', 'label', 'class_10', 'class_9'\]"),
        (("logit_10", "logit_9"), "expected one column 'logit_9'"),
        ((CSV, ""), "is empty"),
        ((CSV, '{"logit_1": [1'), "is no sound JSON lines file"),
    ],
)
def test_bad_text_says_where(tmp_path, change, message):
    (tmp_path / "a.csv").write_text(CSV.replace(*change))
    with pytest.raises(InputError, match=rf"^[^:]*a\.csv: {message}") as caught:
        list(read_logits(tmp_path / "a.csv", logits="logit_*"))
    assert "\n" not in str(caught.value)
    (tmp_path / "b.csv").write_text(CSV)
    (tmp_path / "a.csv").write_text(CSV.replace("logit_10", "logit_8"))
    with pytest.raises(InputError, match=r"b\.csv: has other columns 'logit_\*' than .*a\.csv"):
        read_logits(tmp_path / "?.csv", logits="logit_*")
    with pytest.raises(InputError, match=r"x\*: no file has such a name"):
        read_logits(tmp_path / "x*")


@pytest.mark.parametrize("suffix", SUFFIXES)
def test_writing_what_does_not_fit(tmp_path, suffix):
    for arguments, options, message in (
        ((NAN,), {}, "row 44 has NaN"),
        ((ROWS, [0]), {}, "labels: expected 50"),
        ((ROWS,), {"features": {"a": ROWS[1:]}}, r"features\['a'\]"),
        ((ROWS[:2],), {"ids": [b"a", b"b"]}, "ids: expected 2 names or numbers, got .*with str"),
    ):
        with pytest.raises(InputError, match=message):
            write_logits(tmp_path / f"a{suffix}", *arguments, **options)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.skipif(not Path("/proc/self/statm").exists(), reason="reads /proc")
def test_reading_holds_a_block_of_a_file_and_not_the_file(tmp_path):
    values = np.zeros((20_000, 100), np.float32)
    column = pa.FixedSizeListArray.from_arrays(pa.array(values.reshape(-1)), 100)
    table = pa.table({"logits": column})
    with pq.ParquetWriter(tmp_path / "a.parquet", table.schema, compression="none", use_dictionary=False) as writer:
        for _ in range(20):  # 160 MB
            writer.write_table(table)
    statm = Path("/proc/self/statm")
    held = [int(statm.read_text().split()[1]) * 4096 / 1e6 for _ in read_logits(tmp_path / "a.parquet")]
    assert max(held) - held[0] < 60.0
