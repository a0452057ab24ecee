"""`igeood export`: with a model and an example, and of logits."""

import json

import numpy as np
import pytest
import torch

import igeood

onnxruntime = pytest.importorskip("onnxruntime", reason="onnxruntime is not installed: the extra `onnx` has it")


def test_keywords_from_an_npz_file(bad, good, nets, tmp_path):
    rows = torch.randn(2, 120, 3, generator=torch.Generator().manual_seed(0))
    train, held_out = ({"left": part[0], "right": part[1]} for part in (rows[:, :60], rows[:, 60:]))
    guard = igeood.black_box(nets.pair, method="energy").fit([train]).calibrate([held_out])
    guard.save("g.safetensors")
    arrays = {name: value[:5].numpy() for name, value in train.items()}
    np.savez("input.npz", **arrays, labels=np.zeros(5, int))
    np.savez("words.npz", left=np.array(["a", "b"]), right=np.zeros((2, 3)))
    np.savez("one.npz", left=np.zeros((2, 3), np.float32))
    np.save("array.npy", np.zeros((2, 3)))
    (tmp_path / "broken.npz").write_bytes((tmp_path / "input.npz").read_bytes()[:200])
    options = ["g.safetensors", "--model", "nets:pair", "--out", "g.onnx"]
    for wrong in ([], *(["--example", name] for name in ("words.npz", "one.npz", "array.npy", "broken.npz"))):
        assert "example" in bad("export", *options, *wrong)
        assert not (tmp_path / "g.onnx").exists()
    said = json.loads(good("export", *options, "--example", "input.npz", "--json"))
    assert (said["out"], said["threshold"], said["promise"]) == ("g.onnx", guard.threshold, guard.promise)
    score = onnxruntime.InferenceSession("g.onnx").run(["score"], arrays)[0]
    np.testing.assert_allclose(score, guard.predict(train).score[:5], rtol=1e-4)
