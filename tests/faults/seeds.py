"""Small right files of the library's own formats, and how each is read: guards, weights, logits, results."""

import io
import itertools
import json
import tempfile
from collections.abc import Callable, Mapping
from datetime import date
from functools import cache
from pathlib import Path
from typing import Any

import mutations as m
import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import torch
from safetensors.torch import save
from torch import Tensor, nn

import igeood
from igeood import demo, storage
from igeood.benchmark import load_network, observing
from igeood.benchmark.results import Results
from igeood.datasets import DATASETS
from igeood.datasets.download import _resumable
from igeood.datasets.store import status
from igeood.tables import read_logits, write_logits
from igeood.networks import build, load_weights
from igeood.networks.training import Recipe, Run, Task
from igeood.outputs import Outputs
from igeood.report import page
from igeood.report.promise import promises

SIDE = 32


def pixels(*shape: int, seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).integers(0, 256, shape, dtype=np.uint8)


# --- guards, checkpoints, kept outputs: files with a seal


def outputs(n: int = 12, classes: int = 3, seed: int = 0) -> Outputs:
    draw = np.random.default_rng(seed)
    labels = np.arange(n) % classes
    logits = (draw.normal(size=(n, classes)) + 4 * np.eye(classes)[labels]).astype(np.float32)
    features = {"early": draw.normal(size=(n, 4)).astype(np.float32) + labels[:, None]}
    return Outputs(
        torch.from_numpy(logits), {k: torch.from_numpy(v) for k, v in features.items()}, torch.from_numpy(labels)
    )


def bytes_of(write: Callable[[Path], object], name: str = "file") -> bytes:
    with tempfile.TemporaryDirectory() as folder:
        write(Path(folder) / name)
        return (Path(folder) / name).read_bytes()


@cache
def guards() -> dict[str, bytes]:
    """A small guard of each method, calibrated, and one that is tuned."""
    found = {}
    for method, entry in igeood.METHODS.items():
        make = igeood.white_box if entry.needs_layers else igeood.black_box
        guard = make(method=method).fit(outputs(24))
        if method == "igeood+":
            guard.tune(outputs(60, seed=1), outputs(60, seed=5))
        guard.calibrate(outputs(40, seed=2), tpr=0.9)
        found[method] = bytes_of(guard.save)
    return found


@cache
def opened(content: bytes) -> tuple[dict[str, Any], dict[str, Tensor]]:
    with tempfile.NamedTemporaryFile(suffix=".safetensors") as file:
        file.write(content)
        file.flush()
        return storage.read(file.name)


@cache
def sealed() -> list[tuple[str, dict[str, Tensor]]]:
    return [(json.dumps(record), tensors) for record, tensors in map(opened, guards().values())]


def same(one: Mapping[str, Tensor], other: Mapping[str, Tensor]) -> bool:
    fits = one.keys() == other.keys() and all(one[k].dtype == other[k].dtype for k in one)
    return fits and all(
        torch.equal(one[k].view(-1).view(torch.uint8), other[k].view(-1).view(torch.uint8)) for k in one
    )


def read_guard(path: Path) -> None:
    """What has a seal is as it was written, or refused."""
    igeood.load(path)
    record, tensors = storage.read(path)
    assert any(json.dumps(record) == r and same(tensors, t) for r, t in sealed()), "a changed guard was taken"


CHANGES: tuple[Callable[[Tensor], Tensor], ...] = (
    lambda t: t.reshape(-1)[:0],
    lambda t: t[:1] if t.ndim else t,
    lambda t: t.unsqueeze(0),
    lambda t: t.reshape(-1),
    lambda _: torch.zeros(()),
    lambda t: torch.full_like(t, -1) if t.dtype != torch.bool else t,
    torch.zeros_like,
    lambda t: torch.full(t.shape, float("nan")),
    lambda t: torch.full(t.shape, 1e38),
    *(lambda t, kind=kind: t.to(kind) for kind in (torch.float64, torch.float16, torch.int64, torch.bool, torch.uint8)),
    lambda t: t.float() + 0j,
)


def forged(content: bytes, draw: m.Draw) -> bytes:
    """Other content, with a right seal: somebody meant it."""
    record, tensors = opened(content)
    if draw.random() < 0.7:
        changed = m.tree(record, draw)
        record = changed if isinstance(changed, dict) else {}
    else:
        name = draw.choice(list(tensors))
        value = tensors[name]
        tensors = {k: t for k, t in tensors.items() if k != name}
        if draw.random() < 0.9:
            tensors[name if draw.random() < 0.9 else f"{name}x"] = draw.choice(CHANGES)(value).contiguous()
    text = json.dumps({**record, "sha256": storage._digest(record, tensors)}, sort_keys=True)
    return save(tensors, {"igeood": text})


def read_forged_guard(path: Path) -> None:
    """A guard that loads can be used: whoever has its outputs gets finite scores, or is told."""
    guard = igeood.load(path)
    given = outputs(6, int(guard.detector.n_classes_), seed=3)
    score = torch.as_tensor(guard.score(given))
    assert score.shape == (6,)
    assert bool(score.isfinite().all()), score
    if guard.calibration is not None:
        verdict = guard.predict(given)
        p = torch.as_tensor(verdict.p_value)
        assert bool(((p >= 0) & (p <= 1)).all()), p


@cache
def task() -> Task:
    images = np.random.default_rng(0).integers(0, 256, (8, 3, SIDE, SIDE), dtype=np.uint8)
    return Task("made", 2, images, np.arange(8) % 2, images, np.arange(8) % 2)


@cache
def a_run() -> Run:
    return Run("resnet-10-16", task(), Recipe(epochs=2, batch=8, augment=False))


@cache
def checkpoints() -> list[bytes]:
    run = Run("resnet-10-16", task(), Recipe(epochs=2, batch=8, augment=False))
    run.advance()
    return [bytes_of(run.save)]


def read_checkpoint(path: Path) -> None:
    run = a_run()
    run.load(path)
    assert 0 <= run.epoch < 2, run.epoch
    assert 0 <= run.step <= run.steps, run.step


def kept() -> list[bytes]:
    given = outputs(6)
    about = {"kind": "clean", "weights": "w", "images": "digest", "count": 6}
    return [bytes_of(lambda path: storage.write(path, about, observing._tensors(given)))]


def read_kept(path: Path) -> None:
    found = observing.recall(path.parents[1], weights="w", images="dig")
    assert found is None or len(found) == 6


# --- weights


@cache
def tiny() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(3, 2), nn.BatchNorm1d(2))


def weights() -> list[bytes]:
    return [save(tiny().state_dict(), {"network": "x"})]


def state_dicts() -> list[bytes]:
    state = tiny().state_dict()
    return [
        bytes_of(lambda p: torch.save(state, p)),
        bytes_of(lambda p: torch.save({"state_dict": state, "epoch": 3}, p)),
        bytes_of(lambda p: torch.save(state, p, _use_new_zipfile_serialization=False)),
    ]


def read_weights(path: Path) -> None:
    model = load_weights(nn.Sequential(nn.Linear(3, 2), nn.BatchNorm1d(2)), path)
    assert all(
        a.shape == b.shape for a, b in zip(model.state_dict().values(), tiny().state_dict().values(), strict=True)
    )


@cache
def networks() -> list[bytes]:
    about = {"network": "resnet-10-16", "trained_on": "cifar-10", "classes": "2", "mean": "0.5,0.5,0.5", "std": "1,1,1"}
    return [save(build("resnet-10-16", 2).state_dict(), about)]


def read_network(path: Path) -> None:
    found = load_network(str(path))
    assert found.mean
    assert found.std


def demo_weights() -> list[bytes]:
    return [save(tiny().state_dict(), {"training": json.dumps({"network": "x", "recipe": {"epochs": 1}, "data": "d"})})]


def read_demo(path: Path) -> None:
    demo._trained(path, 0, lambda *_: None)


# --- logits


def logits_files(suffix: str) -> list[bytes]:
    given = outputs(7)
    found = [bytes_of(lambda p: write_logits(p, given, ids=[f"id{i}" for i in range(7)]), f"x{suffix}")]
    if suffix == ".npz":
        made = io.BytesIO()
        np.savez_compressed(made, logits=given.logits.numpy(), labels=given.labels.numpy())
        return [*found, made.getvalue()]
    columns = {"logits": pa.array(given.logits.tolist()), "label": pa.array(given.labels.tolist(), pa.int8())}
    columns["id"] = pa.array(["a", "b"] * 3 + ["a"]).dictionary_encode()
    return [*found, *(_parquet(pa.table(columns), code) for code in ("none", "snappy", "gzip", "zstd"))]


def _parquet(table: pa.Table, compression: str) -> bytes:
    made = io.BytesIO()
    pq.write_table(table, made, compression=compression, row_group_size=4)
    return made.getvalue()


def npy_files() -> list[bytes]:
    made = io.BytesIO()
    np.save(made, outputs(7).logits.numpy())
    return [made.getvalue()]


def read_logits_file(path: Path) -> None:
    file = read_logits(path)
    rows = 0
    for block, ids in file.blocks(ids=True):
        assert block.logits.shape == (len(ids), file.n_classes)
        assert bool(block.logits.isfinite().all())
        rows += len(block)
    assert rows == file.rows


# --- JSON of our own


def manifests() -> list[bytes]:
    entry = {"size": 3073, "sha256": "0" * 64}
    return [json.dumps({"name": "cifar-10", "files": {"cifar-10-batches-bin/test_batch.bin": entry}}).encode()]


def read_manifest(path: Path) -> None:
    found = status(DATASETS["cifar-10"], path.parents[1], deep=True)
    assert found.state in ("partial", "damaged")


def read_part(path: Path) -> None:
    size, validator = _resumable("http://x/y", path.parent / "y.part", path)
    assert (size, validator) == (0, None) or (size == 1 and isinstance(validator, str))


@cache
def results() -> dict[str, bytes]:
    """A benchmark's folder, small."""
    who = {
        "network": "resnet-10-16",
        "weights": "w" * 16,
        "in_distribution": "cifar-10",
        "mean": [0.5] * 3,
        "std": [0.2] * 3,
    }
    digests = {"train": "aa", "test": "bb"}
    about = {"file": "net.safetensors", "classes": 10, "train_images": 50, "test_images": 20, "accuracy": 0.9,
             "accuracy_fisher_rao": 0.9, "notes": [], "data": digests}  # fmt: skip
    cells, tunings, scores = [], [], {}
    grid = [[1.0, 0.5], [10.0, 0.6]]
    for method, ood in itertools.product(("msp", "odin"), ("svhn", "lsun")):
        place = {**who, "setting": "black-box", "method": method, "validation": "gaussian", "seed": 0, "tpr": 0.95}
        name = f"{method}-{ood}.safetensors"
        cells.append({**place, "ood": ood, "data": {**digests, "ood": "cc", "validation": "dd"}, "file": "n",
                      "id_images": 20, "ood_images": 20, "tnr": 0.5, "auroc": 0.9, "aupr": 0.9, "temperature": 1.0,
                      "epsilon": 0.0, "scores": name, "igeood": "0.1.0", "torch": "2.9"})  # fmt: skip
        tunings.append({**place, "ood": "", "data": {**digests, "validation": "dd"}, "temperature": 1.0, "epsilon": 0.0,
                        "trials": grid, "steps": []})  # fmt: skip
        values = {"id": torch.arange(20.0), "ood": torch.arange(20.0) + 9}
        for side, which in itertools.product(("id", "ood"), ("most", "least")):
            values[f"{side}_{which}_rows"] = torch.arange(2)
            values[f"{side}_{which}"] = torch.from_numpy(pixels(2, 3, SIDE, SIDE))
        scores[f"scores/{name}"] = bytes_of(lambda p, v=values: storage.write(p, {"cell": {}}, v))
    text = {
        "results": cells,
        "tunings": tunings[::2],
        "networks": [{**who, **about}],
        "commands": [{"command": ["igeood", "bench"]}],
    }
    return {f"{n}.jsonl": b"".join(json.dumps(r).encode() + b"\n" for r in rows) for n, rows in text.items()} | scores


def read_lines(path: Path) -> None:
    found = Results(path.parent)
    assert all(isinstance(r, dict) for r in found.cells.records)


def read_report(path: Path) -> None:
    folder = path.parent.parent if path.parent.name == "scores" else path.parent
    made = page.make(Results.existing(folder), made_on=date(2026, 1, 2))
    assert made.html.startswith("<!doctype html>")


def read_promise(path: Path) -> None:
    assert all(promises(path, [], 0.95))
