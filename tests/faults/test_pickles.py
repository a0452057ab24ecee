"""A pickle under any name is refused by every reader, and nothing of it is executed."""

import ast
import contextlib
import io
import os
import pickle
import sys
import warnings
import zipfile
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image

from igeood.datasets import load
from igeood.datasets.images import FORMATS
from igeood.errors import IgeoodError, InputError

sys.path.insert(0, str(Path(__file__).parent))
import readers
from seeds import pixels

READERS = {reader.name: reader for reader in readers.readers()}


class Evil:
    """Makes a folder when it is unpickled."""

    def __init__(self, mark):
        self.mark = mark

    def __reduce__(self):
        return os.mkdir, (str(self.mark),)


def pickled(mark, protocol):
    return pickle.dumps({"logits": Evil(mark), "state_dict": Evil(mark)}, protocol)


def object_arrays(mark):
    made = io.BytesIO()
    evil = np.empty((2, 2), object)
    evil[:] = Evil(mark)
    np.savez(made, logits=evil, labels=evil, X=evil)
    return made.getvalue()


def object_array(mark):
    made = io.BytesIO()
    np.save(made, np.array([Evil(mark)], object), allow_pickle=True)
    return made.getvalue()


def torch_file(mark, zipped):
    made = io.BytesIO()
    torch.save({"state_dict": {"w": Evil(mark), "x": torch.zeros(2)}}, made, _use_new_zipfile_serialization=zipped)
    return made.getvalue()


def zip_of_pickle(mark):
    made = io.BytesIO()
    with zipfile.ZipFile(made, "w") as archive:
        archive.writestr("archive/data.pkl", pickled(mark, 2))
        archive.writestr("archive/version", "3\n")
        archive.writestr("logits.npy", pickled(mark, 2))
    return made.getvalue()


def disguised(mark):
    """Behind the first bytes of other formats."""
    return b"PAR1" + pickled(mark, 4) + b"PAR1"


KINDS = {
    **{f"pickle, protocol {protocol}": lambda mark, p=protocol: pickled(mark, p) for protocol in (0, 2, 4, 5)},
    "npz of objects": object_arrays,
    "npy of objects": object_array,
    "torch's format": lambda mark: torch_file(mark, True),
    "torch's older format": lambda mark: torch_file(mark, False),
    "zip of a pickle": zip_of_pickle,
    "pickle between the marks of Parquet": disguised,
}


@pytest.mark.parametrize("kind", KINDS)
def test_these_files_are_dangerous(tmp_path, kind):
    """Whoever trusts them makes the folder: so that the next test would see it."""
    content = KINDS[kind](tmp_path / "executed")
    start = content.find(b"\x80") if kind.startswith(("npy", "torch's older", "pickle between")) else 0
    path = tmp_path / "file"
    path.write_bytes(content)
    if zipfile.is_zipfile(path):
        with zipfile.ZipFile(path) as archive:
            inner = next(name for name in archive.namelist() if name.endswith(("data.pkl", "logits.npy")))
            content = archive.read(inner)
        start = content.index(b"\x80", 10) if kind == "npz of objects" else 0
    file = io.BytesIO(content[start:])
    unpickler = pickle.Unpickler(file)
    unpickler.persistent_load = lambda _: None
    with contextlib.suppress(FileExistsError, EOFError, pickle.UnpicklingError, TypeError, AttributeError):
        for _ in range(8):  # torch's older format has several, one behind the other
            unpickler.load()
    assert (tmp_path / "executed").is_dir()


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("name", READERS)
def test_every_reader_refuses_it(tmp_path, name, kind):
    reader, mark = READERS[name], tmp_path / "executed"
    path = tmp_path / "place" / reader.place
    path.parent.mkdir(parents=True)
    for other, content in reader.beside.items():
        (tmp_path / "place" / other).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / "place" / other).write_bytes(content)
    path.write_bytes(KINDS[kind](mark))
    if reader.tolerant or (name == "archive .zip" and kind in ("npz of objects", "torch's format", "zip of a pickle")):
        reader.read(path)  # as if it were not there; or unpacked, for nobody to open
    else:
        with pytest.raises(IgeoodError) as error:
            reader.read(path)
        assert "\n" not in str(error.value)
    assert not mark.exists()


def test_torch_is_told_each_time_to_read_weights_only():
    calls = [
        (path, call)
        for path in readers.PACKAGE.rglob("*.py")
        for call in ast.walk(ast.parse(path.read_text(encoding="utf-8")))
        if isinstance(call, ast.Call) and ast.unparse(call.func) in ("torch.load", "load_file")
    ]
    assert calls
    for path, call in calls:
        said = {word.arg: ast.unparse(word.value) for word in call.keywords}
        assert said.get("weights_only") == "True", f"{path}: {ast.unparse(call)}"


def other_formats():
    """An image in each format that Pillow can write, beside ours and what our decoders read too."""
    Image.init()
    image, found = Image.fromarray(pixels(9, 11, 3)), {}
    for kind in sorted(set(Image.SAVE) - {*FORMATS, "DIB", "MPO"}):
        for mode in ("RGB", "1", "P"):
            made = io.BytesIO()
            with (
                contextlib.suppress(OSError, ValueError, KeyError, AttributeError, TypeError),
                warnings.catch_warnings(),
            ):
                warnings.simplefilter("ignore")
                image.convert(mode).save(made, kind)
                found.setdefault(kind, made.getvalue())
    return found


OTHERS = other_formats()


@pytest.mark.parametrize("kind", OTHERS)
def test_images_of_other_formats_are_not_handed_to_their_decoders(tmp_path, monkeypatch, kind):
    """PostScript would be handed to Ghostscript: a program, run on a stranger's program."""
    assert "EPS" in OTHERS
    (tmp_path / "a.png").write_bytes(OTHERS[kind])
    monkeypatch.setattr("subprocess.Popen", lambda *_, **__: pytest.fail("a program was started"))
    with pytest.raises(InputError, match=r"a\.png: does not decode as an image"):
        load(f"folder:{tmp_path}").images()
