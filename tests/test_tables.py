"""Tables of logits: what is written comes back, whatever the file's kind and layout; bad files say where."""

from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.csv
import pyarrow.parquet as pq
import pytest
import torch

import igeood
from igeood import tables
from igeood.errors import InputError
from igeood.logits_files import read_logits, write_logits
from igeood.outputs import Outputs, id_keys, row_keys
from igeood.tables import find_files

ROWS = np.random.default_rng(1).normal(size=(50, 3)).astype(np.float32)
NAN = np.where(np.arange(50)[:, None] == 44, np.nan, ROWS)
SUFFIXES = [".parquet", ".npz"]
CSV = "id,label,logit_10,logit_9\n007,1,0.5,1\n,0,2,-3e-1\n"


def lists(values):
    return pa.array([list(map(float, row)) for row in values], pa.list_(pa.float32()))


@pytest.mark.parametrize("suffix", SUFFIXES)
@pytest.mark.parametrize("ids", [None, [f"image {i}" for i in range(50)], np.arange(50) * 7])
def test_what_is_written_comes_back(tmp_path, suffix, ids):
    path = tmp_path / f"all{suffix}"
    outputs = Outputs(ROWS, {"early": ROWS + 1, "block.late": ROWS[:, :1]}, np.arange(50) % 3)
    write_logits(path, outputs, ids=ids)
    file = read_logits(path)
    for _ in range(2):  # it can be read again
        back = Outputs.concat(file)
        for name in ("logits", "labels", "features"):
            torch.testing.assert_close(getattr(back, name), getattr(outputs, name), rtol=0, atol=0)
        assert (back.numpy, file.rows) == (True, 50)
    names = [str(name) for _, names in file.blocks(ids=True) for name in names]
    assert names == list(map(str, range(50) if ids is None else ids))
    (some,) = read_logits(path, layers=["early"], labelled=False)
    assert (list(some.features), some.labels) == (["early"], None)
    write_logits(path, ROWS[:0])
    assert [len(block) for block in read_logits(path)] == [0]


@pytest.mark.parametrize("dtype", ["f2", "f4", "f8", "i4", "u1", ">f4"])
def test_numbers_of_any_type(tmp_path, dtype):
    values = np.arange(30).reshape(10, 3).astype(dtype)
    plain = values.astype(values.dtype.newbyteorder("="))
    array = pa.FixedSizeListArray.from_arrays(pa.array(plain.reshape(-1)), 3)
    kind = array.type.value_type
    for name, column in (("fixed", array.type), ("list", pa.list_(kind)), ("large", pa.large_list(kind))):
        pq.write_table(pa.table({"logits": array.cast(column)}), tmp_path / f"{name}.parquet")
    np.savez(tmp_path / "plain.npz", logits=np.asfortranarray(values))
    np.savez_compressed(tmp_path / "small.npz", logits=values[:, None])
    for path in sorted(tmp_path.iterdir()):
        (block,) = read_logits(path)
        assert np.array_equal(block.logits.numpy(), values)


@pytest.mark.parametrize("group", [1, 7, 64, 1000])
def test_blocks_are_bounded_and_add_up_to_the_whole(tmp_path, monkeypatch, group):
    monkeypatch.setattr(tables, "BLOCK_VALUES", 300)
    values = np.random.default_rng(0).normal(size=(1000, 3)).astype(np.float32)
    pq.write_table(pa.table({"logits": lists(values)}), tmp_path / "a.parquet", row_group_size=group)
    write_logits(tmp_path / "a.npz", values)
    for name in ("a.parquet", "a.npz"):
        blocks = list(read_logits(tmp_path / name))
        assert max(map(len, blocks)) <= 100
        assert np.array_equal(Outputs.concat(blocks).logits, values)


def test_a_folder_or_a_pattern_is_its_files_in_order(tmp_path, refused):
    write_logits(tmp_path / "sub" / "b.npz", ROWS[30:], ids=[f"b{i}" for i in range(20)])
    write_logits(tmp_path / "a.parquet", ROWS[:30], ids=[f"a{i}" for i in range(30)])
    (tmp_path / "sub" / "b.npz").rename(tmp_path / "sub" / "b.parquet")  # the content tells the format, not the name
    for hidden in ("notes.txt", "_SUCCESS", ".a.parquet.crc", "_temporary/a.parquet"):
        (tmp_path / hidden).parent.mkdir(exist_ok=True)
        (tmp_path / hidden).write_text("not a table")
    (tmp_path / "none").mkdir()
    several = [tmp_path / "a.parquet", tmp_path / "_SUCCESS", tmp_path / "s*"]
    for name in (tmp_path, tmp_path / "*", tmp_path / "**", several):
        file = read_logits(name)
        assert np.array_equal(Outputs.concat(file).logits, ROWS)
        assert [str(name) for _, ids in file.blocks(ids=True) for name in ids][29:31] == ["a29", "b0"]
    assert find_files(str(tmp_path / "s*"))[0] == tmp_path
    for name in ("none", "x*"):
        with refused(None, str(tmp_path / name)):
            read_logits(tmp_path / name)
    for bad, argument in ((NAN, None), (ROWS[:, :2], "logits")):
        np.savez(tmp_path / "c.npz", logits=bad, id=np.arange(50))
        with refused(argument, str(tmp_path / "c.npz")):
            list(read_logits([tmp_path / "a.parquet", tmp_path / "c.npz"]))


@pytest.mark.parametrize("suffix", SUFFIXES)
def test_ids_identify_samples_where_they_are_asked_for_or_unique_texts(tmp_path, suffix):
    path = tmp_path / f"a{suffix}"
    texts = [f"image {7 * i}" for i in range(50)]
    for ids, identifies in (
        (texts, True),
        ([str(7 * i + 9) for i in range(50)], False),
        (np.arange(50), False),
        ([f"row {i}" for i in range(50)], False),
        ([*texts[:49], texts[0]], False),
    ):
        write_logits(path, ROWS, ids=ids)
        (block,) = read_logits(path)
        assert block.identified == identifies
        assert np.array_equal(block.keys, id_keys(ids) if identifies else row_keys(torch.from_numpy(ROWS)))
        if len({*ids}) == 50:
            assert np.array_equal(next(iter(read_logits(path, identity="id"))).keys, id_keys(ids))
    expected = np.array([0xE75017CACE788F82, 0xCB1ABF8BEFF3192F], dtype=np.uint64)  # the same in every process
    for ids in ([7, "é"], ["7", "é"], np.array(["7", "é"]), pa.array(["7", "é"]), [np.int32(7), "é"]):
        assert np.array_equal(id_keys(ids), expected)


@pytest.mark.parametrize("ids", [pa.array(["a", "b", "a"]).dictionary_encode(), pa.array(["a", None, None])])
def test_ids_that_do_not_identify_still_name_rows(tmp_path, ids, refused):
    pq.write_table(pa.table({"logits": lists(ROWS[:3]), "id": ids}), tmp_path / "a.parquet")
    with refused("id"):
        list(read_logits(tmp_path / "a.parquet", identity="id"))
    ((block, names),) = read_logits(tmp_path / "a.parquet").blocks(ids=True)
    assert (len(block), names.to_pylist()) == (3, ids.to_pylist())


RAGGED = pa.array([list(row)[: 2 if i == 17 else 3] for i, row in enumerate(ROWS.tolist())], pa.list_(pa.float32()))
HOLED = pa.array([[None if (i, j) == (31, 1) else float(v) for j, v in enumerate(row)] for i, row in enumerate(ROWS)])
INTEGERS = pa.array([[1, None if i == 110 else 2, 3] for i in range(120)], pa.list_(pa.int8()))
NULLED = pa.array([None if i == 5 else row for i, row in enumerate(ROWS.tolist())])
BAD_ROWS = [
    (17, {"logits": RAGGED}),
    (31, {"logits": HOLED}),
    (110, {"logits": INTEGERS}),
    (5, {"logits": NULLED}),
    (44, {"logits": lists(ROWS), "feature.a": lists(NAN)}),
    (44, {"logits": NAN}),
]


@pytest.mark.parametrize(("row", "columns"), BAD_ROWS)
def test_a_bad_row_is_refused_or_an_error_that_says_where(tmp_path, monkeypatch, row, columns):
    monkeypatch.setattr(tables, "BLOCK_VALUES", 30)  # blocks of a few rows: numbers are the file's
    if isinstance(columns["logits"], np.ndarray):
        path = tmp_path / "bad.npz"
        np.savez(path, **columns)
    else:
        path = tmp_path / "bad.parquet"
        pq.write_table(pa.table(columns), path, row_group_size=4)
    with pytest.raises(InputError, match=rf"row {row}\b") as caught:
        list(read_logits(path))
    assert caught.value.place == str(path)
    assert next(reversed(columns)).removeprefix("feature.") in str(caught.value)
    file = read_logits(path)
    file.on_error = "refuse"
    whole = Outputs.concat(file)
    assert (whole.valid.logical_not().nonzero().tolist(), list(whole.reasons)) == ([[row]], [row])


@pytest.mark.parametrize(
    ("argument", "columns"),
    [
        ("logits", {"scores": [1.0]}),
        ("logits", {"logits": [1.0, 2.0]}),
        ("logits", {"logits": [[1.0], [2.0]]}),
        ("logits", {"logits": [[{"a": 1.0}] * 2]}),
        ("logits", {"logits": pa.nulls(3, pa.list_(pa.float32()))}),
        ("labels", {"logits": lists(ROWS[:3]), "label": pa.array([0, None, 2])}),
        ("labels", {"logits": ROWS[:2], "labels": np.array([0.5, 1.0])}),
        (None, {"logits": ROWS[:2], "labels": np.arange(3)}),
        (None, {"logits": np.zeros((2, 0))}),
    ],
)
def test_a_table_of_no_use_is_an_error(tmp_path, argument, columns, refused):
    path = tmp_path / "bad.parquet"
    if isinstance(columns.get("logits"), np.ndarray):
        with path.open("wb") as file:
            np.savez(file, **columns)
    else:
        pq.write_table(pa.table(columns), path)
    with refused(argument, str(path)):
        list(read_logits(path))


def test_columns_of_either_name_and_those_that_are_missing_or_double(tmp_path, refused):
    np.savez(tmp_path / "a.npz", logits=np.eye(3), label=np.arange(3))
    pq.write_table(pa.table({"logits": list(np.eye(3)), "labels": np.arange(3)}), tmp_path / "a.parquet")
    for name in ("a.npz", "a.parquet"):
        (block,) = read_logits(tmp_path / name)
        assert block.labels.tolist() == [0, 1, 2]
    path = tmp_path / "a.parquet"
    write_logits(path, ROWS)
    options = {"logits": "x", "label": "x", "identity": "x", "layers": ["x"]}
    cases = [({name: value}, "feature.x" if name == "layers" else "x") for name, value in options.items()]
    pq.write_table(pa.Table.from_arrays([lists(ROWS)] * 2, names=["logits"] * 2), tmp_path / "double.parquet")
    for file, options, argument in [(path, *case) for case in cases] + [(tmp_path / "double.parquet", {}, "logits")]:
        with refused(argument):
            list(read_logits(file, **options))


def test_text_is_read_as_it_is_meant(tmp_path):
    path = tmp_path / "a.csv"
    path.write_text(CSV)
    for pattern in (None, "logit_*", "*"):  # by number, and without what has another meaning
        file = read_logits(path, logits=pattern)
        ((block, ids),) = file.blocks(ids=True)
        assert (block.logits.tolist(), block.labels.tolist()) == ([[1.0, 0.5], [-0.3, 2.0]], [1, 0])
        assert (ids.to_pylist(), file.rows) == (["007", ""], 2)
    path.write_text(CSV.replace("logit_10", "cat").replace("logit_9", "dog"))  # without numbers: in the file's order
    assert next(iter(read_logits(path, logits="*"))).logits[0].tolist() == [0.5, 1.0]


def named(folder, suffix, labels, columns=("p_cat", "p_dog")):
    """A file of three rows with a column for each class, or with an array if it is npz."""
    path = folder / f"names{suffix}"
    if suffix == ".npz":
        np.savez(path, logits=ROWS[:3, :2], labels=np.array(labels))
    else:
        content = pa.table({**dict(zip(columns, ROWS[:3].T, strict=False)), "label": pa.array(labels)})
        (pyarrow.csv.write_csv if suffix == ".csv" else pq.write_table)(content, path)
    return read_logits(path, logits=None if suffix == ".npz" else "p_*")


@pytest.mark.parametrize("suffix", [".csv", *SUFFIXES])
def test_labels_may_be_names(tmp_path, suffix):
    names = ["dog", "cat", "dog"]
    for labels, classes, places in (
        (names, None, [1, 0, 1]),
        (names, ["dog", "cat"], [0, 1, 0]),
        (["0", "1", "0"], ["a", "b"], [0, 1, 0]),  # a text of numbers is numbers
        ([0, 1, 0], ["1", "0"], [0, 1, 0]),
        (["0", "1", "0"], ["1", "0"], [1, 0, 1]),  # unless they are names
        (["2.0", "1.0", "2.0"], ["2.0", "1.0"], [0, 1, 0]),
    ):
        if suffix == ".csv" and labels[0] in ("0", "2.0"):  # it has no types
            continue
        assert next(iter(named(tmp_path, suffix, labels).settled(classes))).labels.tolist() == places
    file = named(tmp_path, suffix, names, ("p_dog", "p_cat")).settled()
    assert file.classes == (["cat", "dog"] if suffix == ".npz" else ["dog", "cat"])
    for labels, classes, fact in (
        (["dog", "cat", "emu"], ["dog", "cat"], "row 2 has 'emu'"),
        (["dog", "", "cat"], None, "row 1 has ''"),
        (["dog", "3", "cat"], ["dog", "cat"], "row 1 has '3'"),
        (["dog", None, "cat"], None, "row 1 has "),
        (names, ["dog"], "1 "),
        (names, ["dog", "dog"], "1 "),
    ):
        if None not in labels or suffix != ".npz":
            with pytest.raises(InputError) as caught:
                list(named(tmp_path, suffix, labels).settled(classes))
            argument = "labels" if fact.startswith("row") else "classes"
            assert (caught.value.argument, fact in caught.value.what) == (argument, True), caught.value


@pytest.mark.parametrize("suffix", SUFFIXES)
def test_numbers_are_read_once(tmp_path, suffix, monkeypatch):
    file = named(tmp_path, suffix, [1, 0, 1])
    monkeypatch.setattr(tables, "_block_rows", None)  # nothing can be read
    assert file.settled(["a", "b"]).classes == ()


def test_ids_count_where_samples_are_recognised(tmp_path, refused):
    for name, ids in (("a", range(10)), ("b", [0] * 10)):
        write_logits(tmp_path / f"{name}.npz", ROWS[:10], np.arange(10) % ROWS.shape[1], ids=np.array(ids))
    guard = igeood.black_box(method="energy").fit(read_logits(tmp_path / "a.npz", identity="id"))
    repeated = read_logits(tmp_path / "b.npz")
    assert len(guard.score(repeated)) == 10
    for step in (guard.calibrate, guard.fit, lambda data: guard.tune(data, ROWS)):
        with refused("id", str(tmp_path / "b.npz")):
            step(read_logits(tmp_path / "b.npz", identity="id") if step == guard.fit else repeated)


def test_columns_are_found_by_name(tmp_path, refused):
    for name, columns in {"a": "p_cat,p_dog", "b": "p_dog,p_cat", "c": "p_dog,p_emu"}.items():
        (tmp_path / f"{name}.csv").write_text(f"{columns}\n1,2\n3,4\n")
    np.savez(tmp_path / "d.npz", logits=ROWS[:2, :2])
    both = read_logits([tmp_path / "a.csv", tmp_path / "b.csv"], logits="p_*").settled()
    assert Outputs.concat(both).logits.tolist() == [[1, 2], [3, 4], [2, 1], [4, 3]]
    assert both.columns == {"logits": ["p_cat", "p_dog"], "id": None}
    for name, pattern, first in (
        ("b.csv", None, [2, 1]),
        ("b.csv", "p_*", [2, 1]),
        ("c.csv", "p_*", [1, 2]),  # the user's word
        ("d.npz", None, ROWS[0, :2].tolist()),  # an array has no names
    ):
        file = read_logits(tmp_path / name, logits=pattern)
        file.columns = both.columns
        assert next(iter(file)).logits[0].tolist() == first
    for columns, missing in ((None, "logit*"), (both.columns, "p_cat")):
        file = read_logits(tmp_path / "c.csv")
        file.columns = columns
        with refused("logits", str(tmp_path / "c.csv")) as caught:
            list(file)
        assert (missing in caught.value.what, "p_emu" in caught.value.what) == (True, True)
    with refused("logits", str(tmp_path / "c.csv")):
        list(read_logits(tmp_path / "?.csv", logits="p_*"))


@pytest.mark.parametrize(
    ("change", "fact"),
    [
        (("2,-3e-1", "2,abc"), "abc"),
        (("2,-3e-1", "2,"), "row 1"),
        (("2,-3e-1", "2"), "got 3"),
        (("007,1", "007,cat"), "cat"),
        (("logit_", "class_"), "logit_*"),
        (("logit_10", "logit_9"), "logit_9"),
        ((CSV, ""), ""),
        ((CSV, '{"logit_1": [1'), ""),
    ],
)
def test_bad_text_is_one_line_that_says_where(tmp_path, change, fact):
    (tmp_path / "a.csv").write_text(CSV.replace(*change))
    with pytest.raises(InputError) as caught:
        list(read_logits(tmp_path / "a.csv", logits="logit_*"))
    assert caught.value.place == str(tmp_path / "a.csv")
    assert (fact in str(caught.value), "\n" in str(caught.value)) == (True, False)


@pytest.mark.parametrize("suffix", SUFFIXES)
def test_writing_what_does_not_fit(tmp_path, suffix, refused):
    for arguments, options, argument in (
        ((NAN,), {}, "logits"),
        ((ROWS, [0]), {}, "labels"),
        ((ROWS,), {"features": {"a": ROWS[1:]}}, "features['a']"),
        ((ROWS,), {"ids": ["a", "b"]}, "ids"),
    ):
        with refused(argument):
            write_logits(tmp_path / f"a{suffix}", *arguments, **options)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.skipif(not Path("/proc/self/statm").exists(), reason="reads /proc")
def test_reading_holds_a_block_of_a_file_and_not_a_row_group(tmp_path):
    column = pa.FixedSizeListArray.from_arrays(pa.array(np.zeros(40_000_000, np.float32)), 100)  # 160 MB
    options = {"compression": "none", "use_dictionary": False, "row_group_size": 400_000}
    pq.write_table(pa.table({"logits": column}), tmp_path / "a.parquet", **options)
    del column
    statm = Path("/proc/self/statm")
    held = [int(statm.read_text().split()[1]) * 4096 / 1e6 for _ in read_logits(tmp_path / "a.parquet")]
    assert max(held) - held[0] < 60.0
