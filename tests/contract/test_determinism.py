"""The same inputs get the same verdicts: run again, in a new process, in other batches, orders, threads and precisions.

Reruns are the same to the bit. All else agrees to a tolerance of the scores' size, which is a score's own or the
greatest of the calibration scores, if that is more: 1e-9, of arrays in either precision and of a float64 network; 1e-6
of a float32 network, but for batches of one, where its convolutions take another way: they change the outputs by less
than 1e-6 of their size, and the steepest scores by 1e-5. A verdict differs only where the score is as near as that to
the threshold, a p-value where it is to a calibration score.
"""

import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import reruns
import torch
from safetensors.torch import load_file

import igeood
from igeood.calibration import p_values
from igeood.geometry import fused
from igeood.outputs import Outputs

ARRAYS = [name for name, case in reruns.CASES.items() if case.access == "arrays"]
THREADS = (1, 2, 4)


@pytest.fixture(scope="module")
def guards():
    """One guard for each case, made once in this process."""
    return {name: reruns.make(case) for name, case in reruns.CASES.items()}


@pytest.fixture(params=reruns.CASES)
def case(request):
    return reruns.CASES[request.param]


@pytest.fixture
def guard(guards, case):
    return guards[str(case)]


def assert_agree(found, expected, tolerance):
    """What a guard says, beside what it said: as the head of this file has it."""
    size = np.maximum(np.abs(expected["scores"]).max(), np.abs(expected["score"]))
    allowed = tolerance * size
    assert (np.abs(found["score"] - expected["score"]) <= allowed).all()
    assert abs(found["threshold"] - expected["threshold"]) <= allowed.min()
    assert (np.abs(found["scores"] - expected["scores"]) <= allowed.min()).all()
    apart = found["is_ood"] != expected["is_ood"]
    assert (np.abs(expected["score"] - expected["threshold"])[apart] <= 2 * allowed[apart]).all()
    least, most = (p_values(expected["scores"], expected["score"] + sign * 2 * allowed) for sign in (1, -1))
    assert (found["p_value"] >= least).all()
    assert (found["p_value"] <= most).all()
    assert np.array_equal(found["label"], expected["label"])


def tolerance(case, size=0):
    if case.access == "arrays" or case.precision == "float64":
        return 1e-9
    return 1e-5 if size == 1 else 1e-6


def same_bytes(one, other):
    return one.keys() == other.keys() and all(one[name].tobytes() == other[name].tobytes() for name in one)


# -- to the bit


def test_a_rerun_says_the_same_to_the_bit(case, guard, tmp_path):
    again = reruns.make(case)
    for name, made in (("one", guard), ("other", again)):
        made.save(tmp_path / name)
    assert (tmp_path / "one").read_bytes() == (tmp_path / "other").read_bytes()
    test = reruns.data(case, "test")
    assert same_bytes(reruns.content(again, test), reruns.content(guard, test))
    assert same_bytes(reruns.content(guard, test), reruns.content(guard, test))


def run(folder, threads, *words, **environment):
    """What guards say that a process of its own has made."""
    folder.mkdir()
    # threads that wait without spinning: many of them on few cores would take minutes otherwise
    waiting = {"OMP_NUM_THREADS": str(threads), "OMP_WAIT_POLICY": "passive", "KMP_BLOCKTIME": "0"}
    subprocess.run(
        [sys.executable, reruns.__file__, str(folder), str(threads), *words],
        env={**os.environ, **waiting, **environment}, check=True, capture_output=True, timeout=1200,
    )  # fmt: skip
    with np.load(folder / "said.npz") as said:
        return {name: said[name] for name in said}


@pytest.fixture(scope="module")
def processes(tmp_path_factory):
    """Folders and words of two processes; their memory is laid out differently, and so are their sets."""
    root = tmp_path_factory.mktemp("processes")
    folders = [root / "first", root / "second"]
    return [(folder, run(folder, 1, PYTHONHASHSEED=str(i), FILLING="x" * 1111 * i)) for i, folder in enumerate(folders)]


def of_case(said, name):
    return {key.removeprefix(f"{name}/"): value for key, value in said.items() if key.startswith(f"{name}/")}


def test_a_new_process_makes_the_same_guard_to_the_bit(case, processes):
    (folder, said), (other_folder, other_said) = processes
    name = f"{case}.safetensors"
    assert (folder / name).read_bytes() == (other_folder / name).read_bytes()
    found = of_case(said, str(case))
    assert len(found) == 6
    assert same_bytes(found, of_case(other_said, str(case)))


# -- to the tolerance


@pytest.mark.parametrize("size", [1, 7, 64])
def test_batches_do_not_matter(case, guard, size):
    rows = torch.arange(91) if size > 1 else torch.arange(56, 86)  # both kinds; one at a time they take long
    expected = reruns.content(guard, reruns.data(case, "test", rows))
    parts = [reruns.content(guard, reruns.data(case, "test", part)) for part in rows.split(size)]
    found = {name: np.concatenate([part[name] for part in parts]) for name in ("is_ood", "score", "p_value", "label")}
    assert_agree({**parts[0], **found}, expected, tolerance(case, size))
    other = reruns.start(case).fit(reruns.blocks(case, "train", size))
    other.calibrate(reruns.blocks(case, "calibration", size))
    assert_agree(reruns.content(other, reruns.data(case, "test", rows)), expected, tolerance(case, size))


@pytest.mark.parametrize("size", [1, 7, 64])
@pytest.mark.parametrize("precision", reruns.PRECISIONS)
def test_what_batches_change_in_the_networks_own_outputs(precision, size):
    """The part of it all that is the network's: less than 1e-6 of the outputs' size, or 1e-14."""
    dtype = reruns.PRECISIONS[precision]
    x, labels = reruns.seen(dtype, "test")
    loaders = [[(x, labels)], list(zip(x.split(size), labels.split(size), strict=True))]
    whole, parts = (igeood.extract(reruns.network(dtype), loader, reruns.LAYERS) for loader in loaders)
    for one, other in [(whole.logits, parts.logits), *((f, parts.features[k]) for k, f in whole.features.items())]:
        assert float((one - other).abs().max()) <= (1e-6 if precision == "float32" else 1e-14) * float(one.abs().max())


def test_the_order_of_samples_does_not_matter(case, guard):
    expected = reruns.content(guard, reruns.data(case, "test"))
    order = {part: reruns.shuffle(part) for part in ("train", "calibration", "test")}
    back = order["test"].argsort().numpy()

    def straight(said):
        return {name: value[back] if len(value.shape) and name != "scores" else value for name, value in said.items()}

    found = straight(reruns.content(guard, reruns.data(case, "test", order["test"])))
    assert_agree(found, expected, tolerance(case))
    other = reruns.start(case).fit(reruns.data(case, "train", order["train"]))
    other.calibrate(reruns.data(case, "calibration", order["calibration"]))
    found = straight(reruns.content(other, reruns.data(case, "test", order["test"])))
    assert_agree(found, expected, tolerance(case))


@pytest.fixture(scope="module")
def threads(tmp_path_factory):
    """What guards of many arrays say that processes with so many threads have made."""
    root = tmp_path_factory.mktemp("threads")
    return {n: run(root / str(n), n, "many") for n in THREADS}


@pytest.mark.parametrize("name", ARRAYS)
@pytest.mark.parametrize("n", THREADS[1:])
def test_threads_do_not_matter(name, n, threads):
    assert int(threads[n]["threads"]) == n
    found, expected = (of_case(threads[k], name) for k in (n, 1))
    assert_agree(found, expected, tolerance(reruns.CASES[name]))


@pytest.mark.parametrize("method", sorted(igeood.METHODS))
def test_float64_copies_of_float32_outputs_make_the_same_guard(method, guards):
    """The last layer's features are linear in one another but for float32's rounding, which is no more to either."""
    one, other = (reruns.CASES[f"{method}-arrays-{precision}"] for precision in reruns.PRECISIONS)
    test = reruns.data(one, "test")
    assert_agree(reruns.content(guards[str(other)], test), reruns.content(guards[str(one)], test), 1e-9)


@pytest.mark.data
@pytest.mark.slow
def test_a_real_network_in_other_batches():
    """DenseNet on CIFAR-10, in batches of 1 and 7: what is ours agrees to 1e-9, what the network adds to 1e-5."""
    root = Path(os.environ.get("IGEOOD_DATA") or "missing")
    if not (root / "weights").is_dir():
        pytest.skip("set IGEOOD_DATA to the folder of real data")
    network = igeood.networks.densenet_bc_100()
    network.load_state_dict(load_file(root / "weights" / "densenet-bc-100-cifar10.safetensors"))
    network.eval()
    records = np.fromfile(root / "cifar-10-batches-bin" / "test_batch.bin", np.uint8, 400 * 3073).reshape(-1, 3073)
    images = torch.from_numpy(records[:, 1:].reshape(-1, 3, 32, 32).astype(np.float32) / 128 - 1)
    labels = torch.from_numpy(records[:, 0].astype(np.int64))
    layers = ["conv1", "trans1", "trans2", "relu"]
    train = igeood.extract(network, (images[64:], labels[64:]), layers)
    whole, *cut = (igeood.extract(network, list(images[:64].split(size)), layers) for size in (64, 7, 1))
    for method in igeood.METHODS:
        detector = igeood.detector(method).fit(train)
        expected = detector.score(whole)
        alone = torch.cat([detector.score(whole[i : i + 1]) for i in range(64)])
        size = expected.abs().max()
        assert (alone - expected).abs().max() <= 1e-9 * size, method
        for outputs in cut:
            assert (detector.score(outputs) - expected).abs().max() <= 1e-5 * size, method


# -- a score that is the threshold is not refused, whatever rounding does


@pytest.mark.parametrize("method", sorted(igeood.METHODS))
@pytest.mark.parametrize("fast", [True, False])
def test_few_inputs_drawn_again_and_again_keep_their_verdicts(method, fast, monkeypatch):
    """Calibrated with the extra `fast` and judged without it, or the reverse; in other batches; as float64 copies.

    The threshold is the score of many calibration samples then, and of every twentieth sample to come.
    """
    pytest.importorskip("numba")
    train, distinct = (reruns.outputs(torch.float32, part) for part in ("train", "validation"))
    monkeypatch.setattr(fused, "installed", lambda: fast)
    guard = reruns.Guard(igeood.detector(method)).fit(train)
    draw = torch.Generator().manual_seed(3)
    for start in range(0, 60, 20):
        twenty = distinct[start : start + 20]
        drawn = torch.randint(20, (4000,), generator=draw)
        monkeypatch.setattr(fused, "installed", lambda: fast)
        guard.calibrate(twenty[drawn])
        kept = ~guard.predict(twenty).is_ood
        assert int(kept[drawn].sum()) >= 3801  # the threshold's rank
        monkeypatch.setattr(fused, "installed", lambda: not fast)
        double = Outputs(twenty.logits.double(), {k: v.double() for k, v in twenty.features.items()})
        alone = torch.cat([guard.predict(twenty[i : i + 1]).is_ood for i in range(20)])
        for again in (guard.predict(twenty).is_ood, guard.predict(double).is_ood, alone):
            assert torch.equal(~again, kept)
        drawn = torch.randint(20, (1000,), generator=draw)
        assert torch.equal(~guard.predict(twenty[drawn]).is_ood, kept[drawn])
