"""Every array of the catalogue, in a file: a command takes it as the library does, or refuses it in one clear line."""

import io
import json
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from arrays import ARRAYS, FEATURE_ARRAYS, LABELS
from calls import COMMANDS, GOOD, Place, call, good, no_traceback, refused

import igeood
from igeood.errors import IgeoodError

N, CLASSES = 64, 8


def make(seed, margin=6.0):
    """Logits (N, C) of a classifier that is mostly right, and the true classes."""
    rng = np.random.default_rng(seed)
    labels = np.arange(N) % CLASSES
    logits = rng.normal(size=(N, CLASSES)) + margin * np.eye(CLASSES)[labels] * rng.uniform(0.5, 1, (N, 1))
    return logits, labels


PARTS = {"train": make(0), "held_out": make(1), "test": make(2), "ood": make(3, margin=0.0)}
# Every parameter that takes a file of samples: those of the commands that read logits.
SLOTS = [
    (words, param.name)
    for words, command in COMMANDS.items()
    if "logits_column" in [param.name for param in command.params]
    for param in command.params
    if param.required and param.name not in ("guard", "out")
]


def plain(value):
    """What a file can hold of a value: an array; None if there is none."""
    if np.ma.isMaskedArray(value):  # no file has masks
        return None
    try:
        return np.asarray(value)
    except (TypeError, ValueError, RuntimeError):  # ragged lists, and tensors that no array shares numbers with
        return None


def npz(columns):
    file = io.BytesIO()
    np.savez(file, **columns)
    return file.getvalue()


def column(array):
    """An array as a column of Parquet, one row a row; pyarrow raises where there is no such column."""
    if array.ndim == 2 and array.dtype.kind in "fiu" and array.itemsize <= 8 and array.shape[1]:
        native = np.ascontiguousarray(array.astype(array.dtype.newbyteorder("=")))
        return pa.FixedSizeListArray.from_arrays(pa.array(native.reshape(-1)), array.shape[1])
    if array.dtype.hasobject:
        raise TypeError("a column has one type, whatever the objects are")
    return pa.array(array.tolist() if array.ndim else [array.item()])


def parquet(columns):
    file = pa.BufferOutputStream()
    names = {"labels": "label"}
    pq.write_table(pa.table({names.get(name, name): column(array) for name, array in columns.items()}), file)
    return file.getvalue().to_pybytes()


WRITE = {"npz": npz, "parquet": parquet}


def written(catalogue, clean, spoil):
    """Each entry of a catalogue that can be written, once for each content: its name, its case and the file."""
    found = {}
    for name, entry in catalogue.items():
        case = entry(clean)
        array = plain(case.array)
        for kind, write in WRITE.items():
            try:
                content = None if array is None else write(spoil(array))
            except (pa.ArrowException, TypeError, ValueError, OverflowError, AttributeError):
                continue  # no such file can be
            if content is not None and content not in [c for _, c in found.values()]:
                found[f"{name}.{kind}"] = (case, content)
    return found


def with_logits(labels):
    return lambda array: {"logits": array, "labels": labels}


FILES = {part: written(ARRAYS, logits, with_logits(labels)) for part, (logits, labels) in PARTS.items()}
CASES = [
    pytest.param(words, slot, name, id=f"{' '.join(words)} {slot} {name}")
    for words, slot in SLOTS
    for name in FILES[GOOD.get(slot, "test.npz").removesuffix(".npz")]
]


@pytest.fixture(scope="module")
def place(tmp_path_factory):
    """Good files of samples, and guards, in a folder that is as it was for each test."""
    folder = tmp_path_factory.mktemp("files")
    for part, (logits, labels) in PARTS.items():
        igeood.write_logits(folder / f"{part}.npz", logits, labels)
    guard = igeood.black_box(method="energy").fit(*PARTS["train"])
    guard.save(folder / "fitted.safetensors")
    guard.calibrate(PARTS["held_out"][0]).save(folder / "guard.safetensors")
    return Place(folder, tmp_path_factory.mktemp("place") / "here")


@pytest.fixture
def files(place, monkeypatch):
    monkeypatch.chdir(place.tidy())
    return place.folder


def by_library(words, slot, given, labels):
    """What the library makes of the same arrays: a guard, or verdicts; None for a command that we do not know."""
    train, held_out, ood = PARTS["train"], PARTS["held_out"][0], PARTS["ood"][0]
    if words == ("fit",):
        return igeood.black_box().fit(given, labels)
    if words == ("tune",):
        guard = igeood.load("fitted.safetensors")
        guard.fit(*((given, labels) if slot == "train" else train))
        return guard.tune(*(given if slot == name else other for name, other in (("id_data", held_out), ("ood", ood))))
    if words == ("calibrate",):
        return igeood.load("fitted.safetensors").calibrate(given)
    if words == ("score",):
        return igeood.load("guard.safetensors").predict(given)
    return None


def check_same(called, words, expected):
    """The command has done what the library does, to the last bit."""
    told = [json.loads(line) for line in called.result.stdout.splitlines()]
    if isinstance(expected, igeood.Verdict):
        for name in ("score", "p_value", "is_ood", "label"):
            assert [row[name] for row in told] == np.asarray(getattr(expected, name)).tolist()
    elif expected is not None:
        expected.save("expected.safetensors")
        [about] = told
        assert Path(about["out"]).read_bytes() == Path("expected.safetensors").read_bytes()


def aside(words):
    """Where a guard goes, so that the one that was given stays as it was."""
    return {} if words == ("score",) else {"out": "made.safetensors"}


def check(called, words, slot, name, case, given, labels):
    """It was taken as by the library, or refused in a line that names the file."""
    no_traceback(called)
    if called.code:
        assert not (case.verdict == "same" and must_be_taken(given)), called.line
        refused(called, name, slot, "labels")
        return
    assert case.verdict != "refused", f"took {name}"
    try:
        expected = by_library(words, slot, given, labels)
    except IgeoodError as error:
        pytest.fail(f"the library refuses it: {error}")
    check_same(called, words, expected)


def must_be_taken(given):
    """Plain numbers in the order of memory: what anybody's `np.savez` writes."""
    return given.dtype.kind in "fiu" and given.itemsize <= 8 and given.flags.c_contiguous and given.dtype.isnative


@pytest.mark.filterwarnings("ignore::igeood.errors.IgeoodWarning")
@pytest.mark.parametrize(("words", "slot", "name"), CASES)
def test_an_array_in_a_file(words, slot, name, files):
    part = GOOD.get(slot, "test.npz").removesuffix(".npz")
    case, content = FILES[part][name]
    (files / name).write_bytes(content)
    given, labels = plain(case.array), PARTS[part][1]
    called = call(good(words, **{slot: name, **aside(words)}), files)
    if words == ("tune",) and slot == "train" and case.verdict == "same" and rounded(given) != rounded(PARTS[part][0]):
        refused(called, "train: 64 of 64 samples are not those that the guard was fitted on")
    else:
        check(called, words, slot, name, case, given, labels)


def rounded(array):
    """Samples are known again to the precision of float32."""
    return array.astype(np.float32).tolist()


LABELLED = written(LABELS, PARTS["train"][1], lambda y: {"logits": PARTS["train"][0], "labels": y})


@pytest.mark.filterwarnings("ignore::igeood.errors.IgeoodWarning")
@pytest.mark.parametrize("name", LABELLED)
@pytest.mark.parametrize(("words", "slot"), [slot for slot in SLOTS if slot[1] == "train"], ids=str)
def test_labels_in_a_file(words, slot, name, files):
    case, content = LABELLED[name]
    (files / name).write_bytes(content)
    labels = plain(case.array)
    called = call(good(words, **{slot: name, **aside(words)}), files)
    if called.code:
        assert not (case.verdict == "same" and must_be_taken(labels)), called.line
        refused(called, name, "train", "labels")
    else:
        assert case.verdict != "refused", f"took {name}"
        check_same(called, words, by_library(words, slot, PARTS["train"][0], labels))


FEATURES = written(
    FEATURE_ARRAYS,
    PARTS["train"][0][:, :5],
    lambda x: {**with_logits(PARTS["train"][1])(PARTS["train"][0]), "feature.early": x},
)


@pytest.mark.filterwarnings("ignore::igeood.errors.IgeoodWarning")
@pytest.mark.parametrize("name", FEATURES)
def test_features_in_a_file(name, files):
    case, content = FEATURES[name]
    (files / name).write_bytes(content)
    given = plain(case.array)
    called = call(good(("fit",), train=name, method="igeood"), files)
    if called.code:
        assert not (case.verdict == "same" and must_be_taken(given)), called.line
        refused(called, name, "train")
    else:
        assert case.verdict != "refused", f"took {name}"
        outputs = igeood.Outputs(PARTS["train"][0], {"early": given}, PARTS["train"][1])
        check_same(called, ("fit",), igeood.white_box(method="igeood").fit(outputs))


def test_there_are_enough_of_them():
    assert len(CASES) + 2 * len(LABELLED) + len(FEATURES) >= 400
