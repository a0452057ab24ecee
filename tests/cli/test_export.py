"""`igeood export`: with a model and an example, of images, of logits."""

import json
import sys

import numpy as np
import pytest
import torch

import igeood

onnxruntime = pytest.importorskip("onnxruntime", reason="onnxruntime is not installed: the extra `onnx` has it")
NETS = """
import torch
from torch import nn

class Pair(nn.Module):
    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.body = nn.Linear(6, 3)

    def forward(self, left, right):
        return self.body(torch.cat([left, right], dim=1))

pair = Pair().eval()
"""


@pytest.fixture
def place(tmp_path, monkeypatch):
    """A folder with a model of two keywords and its guard."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [str(tmp_path), *sys.path])
    monkeypatch.delitem(sys.modules, "pairs", raising=False)
    (tmp_path / "pairs.py").write_text(NETS)
    import pairs  # noqa: PLC0415 (of that folder)

    draw = torch.Generator().manual_seed(0)

    def batch(n):
        left, right = torch.randn(2, n, 3, generator=draw)
        return {"left": left, "right": right, "labels": torch.arange(n) % 3}

    guard = igeood.black_box(pairs.pair).fit([batch(60)]).calibrate([batch(60)])
    guard.save("g.safetensors")
    np.savez("input.npz", **{name: value.numpy() for name, value in batch(5).items()})
    return guard, batch


def test_keywords_from_an_npz_file(good, place):
    guard, batch = place
    options = ["g.safetensors", "--model", "pairs:pair", "--example", "input.npz", "--out", "g.onnx"]
    said = json.loads(good("export", *options, "--json"))
    assert (said["out"], said["threshold"], said["promise"]) == ("g.onnx", guard.threshold, guard.promise)
    session = onnxruntime.InferenceSession("g.onnx")
    given = batch(7)
    del given["labels"]
    score, label = session.run(["score", "label"], {name: value.numpy() for name, value in given.items()})
    expected = guard.predict(given)
    np.testing.assert_allclose(score, expected.score, rtol=1e-4)
    assert label.tolist() == expected.label.tolist()


@pytest.mark.usefixtures("place")
def test_what_cannot_be_an_example_is_one_line(run, tmp_path):
    np.savez("words.npz", left=np.array(["a", "b"]), right=np.zeros((2, 3)))
    np.savez("one.npz", left=np.zeros((2, 3), np.float32))
    np.save("array.npy", np.zeros((2, 3)))
    np.savez("wide.npz", left=np.zeros((2, 3), np.longdouble))
    np.savez_compressed("packed.npz", left=np.random.default_rng(0).random((50, 3)), right=np.zeros((50, 3)))
    packed = bytearray((tmp_path / "packed.npz").read_bytes())
    packed[60:90] = bytes(30)
    (tmp_path / "packed.npz").write_bytes(packed)
    (tmp_path / "renamed.npz").write_bytes((tmp_path / "array.npy").read_bytes())
    (tmp_path / "broken.npz").write_bytes((tmp_path / "input.npz").read_bytes()[:200])
    wanted = {
        "words.npz": "example: left in words.npz has values of type <U1; give numbers",
        "wide.npz": "example: left in wide.npz has values of type float128; give numbers of 64 bits or less",
        "one.npz": "example: the guard cannot judge it .*TypeError.*; give inputs of the model",
        "array.npy": "example: array.npy is no .npz file; write one with numpy.savez",
        "renamed.npz": "example: renamed.npz is no sound .npz file",
        "packed.npz": "example: packed.npz is no sound .npz file",
        "broken.npz": "example: broken.npz is no sound .npz file",
        None: "example: the model's inputs are not known; give --example input.npz",
    }
    for name, line in wanted.items():
        example = [] if name is None else ["--example", name]
        result = run("export", "g.safetensors", "--model", "pairs:pair", *example, "--out", "g.onnx")
        assert result.exit_code == 2, result.output
        assert result.stderr.splitlines()[-1].startswith("igeood: ")
        assert __import__("re").search(line, result.stderr), result.stderr
        assert not (tmp_path / "g.onnx").exists()


@pytest.mark.usefixtures("place")
def test_a_file_that_is_there_is_asked_about_and_somebody_elses_stays(run, good, made, tmp_path):
    options = [made / "guard.safetensors", "--out", "g.onnx"]
    good("export", *options)
    assert "is there already" in run("export", *options).stderr
    good("export", *options, "--force")
    (tmp_path / "g.onnx").write_bytes(b"theirs")
    assert "is no guard's graph" in run("export", *options, "--force").stderr
    assert (tmp_path / "g.onnx").read_bytes() == b"theirs"
