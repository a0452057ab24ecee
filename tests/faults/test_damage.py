"""Damaged, forged and hostile files: each is read as it is or refused in one line; nothing in it is executed."""

import gzip
import io
import os
import pickle
import zipfile
from functools import partial
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from PIL import Image
from safetensors.torch import save_file

import igeood
from igeood.bench import datasets
from igeood.bench.datasets.store import unpack
from igeood.bench.runs import Lines
from igeood.errors import IgeoodError, InputError
from igeood.model.factory import load_weights, read_weights

DRAW = np.random.default_rng(0)
LOGITS, LABELS = (DRAW.normal(size=(60, 3)) + 5 * np.eye(3)[np.arange(60) % 3]).astype(np.float32), np.arange(60) % 3
FEATURES = {"a": DRAW.normal(size=(60, 4)).astype(np.float32)}
OUTPUTS = igeood.Outputs(LOGITS, FEATURES, LABELS)
PIXELS = DRAW.integers(0, 255, (8, 8, 3), dtype=np.uint8)


def write_table(path):
    igeood.write_logits(path, OUTPUTS)


def read_table(path, **options):
    return list(igeood.read_logits(path, **options))


def write_archive(path):
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr("set/a", b"content")


IDX = gzip.compress(bytes([0, 0, 8, 3]) + np.array([2, 5, 4], ">u4").tobytes() + bytes(40), mtime=0)
CSV = b"logit_0,logit_1,label\n1,2.5,0\n3,-1,1\n"
LINES = b'{"a": 1}\n{"a": [2.5, null]}\n'
GUARD = igeood.white_box().fit(OUTPUTS).calibrate(igeood.Outputs(LOGITS + 1, FEATURES))
STATE = {"weight": torch.ones(3, 4), "bias": torch.zeros(3)}
READERS = {  # the file's name, who writes its right content, and who reads it
    "guard": ("g", GUARD.save, igeood.load),
    "summary": ("s", igeood.summarise(igeood.white_box(), OUTPUTS).save, igeood.Summary.load),
    "weights": ("w.safetensors", partial(save_file, STATE), partial(load_weights, torch.nn.Linear(4, 3))),
    "weights of torch": ("w.pt", partial(torch.save, STATE), read_weights),
    "npz": ("x.npz", write_table, read_table),
    "parquet": ("x.parquet", write_table, read_table),
    "csv": ("x.csv", lambda path: path.write_bytes(CSV), partial(read_table, logits="logit_*")),
    "json lines": ("y.jsonl", lambda path: path.write_bytes(b'{"logit_0": 1, "logit_1": 2.5}\n' * 3), read_table),
    "results": ("x.jsonl", lambda path: path.write_bytes(LINES), lambda path: Lines(path, frozenset("a"))),
    "idx": ("x.gz", lambda path: path.write_bytes(IDX), lambda path: datasets.load(f"idx:{path}").images()),
    "image": ("x.png", Image.fromarray(PIXELS).save, lambda path: datasets.load(f"folder:{path.parent}").images()),
    "zip": ("x.zip", write_archive, lambda path: unpack(path, path.parent / "into", folders={"set"})),
}


@pytest.fixture(scope="module")
def seeds(tmp_path_factory):
    paths = {name: tmp_path_factory.mktemp("seeds") / file for name, (file, _, _) in READERS.items()}
    for name, path in paths.items():
        READERS[name][1](path)
        READERS[name][2](path)  # right files are taken
    return {name: path.read_bytes() for name, path in paths.items()}


def check_read_or_refused(name, content, folder):
    """Reads a file of this content; True if it was taken."""
    file, _, read = READERS[name]
    path = Path(folder) / "place" / file
    path.parent.mkdir(exist_ok=True)
    path.write_bytes(content)
    try:
        read(path)
    except IgeoodError as error:
        assert "\n" not in str(error)  # noqa: PT017
        return False
    return True


PLACE = st.floats(0, 1)
DAMAGE = st.lists(st.tuples(PLACE, PLACE, st.binary(max_size=12)), min_size=1, max_size=3)


@pytest.mark.parametrize("name", READERS)
@settings(max_examples=80, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(damage=DAMAGE)
def test_damaged_files_are_read_or_refused(seeds, tmp_path, name, damage):
    """Pieces are cut out, and others put in their place."""
    content = seeds[name]
    for at, length, piece in damage:
        start = int(at * len(content))
        content = content[:start] + piece + content[start + int(length**4 * len(content)) :]
    check_read_or_refused(name, content, tmp_path)


class Evil:
    """Makes a folder when it is unpickled."""

    def __init__(self, mark):
        self.mark = mark

    def __reduce__(self):
        return os.mkdir, (str(self.mark),)


PICKLES = {
    "plain": pickle.dump,
    "arrays": lambda evil, file: np.savez(file, logits=np.full((2, 2), evil), labels=np.full(2, evil)),
    "torch": lambda evil, file: torch.save({"weight": evil}, file),
}


@pytest.mark.parametrize("kind", PICKLES)
@pytest.mark.parametrize("name", READERS)
def test_pickles_under_any_name_are_not_executed(tmp_path, name, kind):
    file, mark = io.BytesIO(), tmp_path / "executed"
    PICKLES[kind](Evil(mark), file)
    taken = check_read_or_refused(name, file.getvalue(), tmp_path)
    assert not mark.exists()
    assert not taken or name in ("zip", "results")  # unpacked, for nobody to open; or a line that was cut


def test_weights_of_sparse_tensors_are_refused(tmp_path):
    """Their indices are not checked when they are loaded, and may point outside."""
    outside = torch.sparse_coo_tensor([[0, 9_000_000], [0, 3]], torch.ones(2), (3, 4), check_invariants=False)
    torch.save({"weight": outside, "bias": torch.zeros(3)}, tmp_path / "w.pt")
    with pytest.raises(InputError):
        load_weights(torch.nn.Linear(4, 3), tmp_path / "w.pt")


def test_images_of_other_formats_are_not_handed_to_their_decoders(tmp_path, monkeypatch):
    """PostScript would be handed to Ghostscript: a program, run on a stranger's program."""
    Image.fromarray(PIXELS).save(tmp_path / "a.png", "EPS")
    monkeypatch.setattr("subprocess.Popen", lambda *_, **__: pytest.fail("a program was started"))
    with pytest.raises(InputError):
        datasets.load(f"folder:{tmp_path}").images()
