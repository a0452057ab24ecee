"""Guards under `torch.distributed`: several ranks, each with its shard, are one process with all the data.

The file is also the program that the ranks run: it imports torch once, and forks.
"""

import json
import multiprocessing
import os
import subprocess
import sys
import warnings
from datetime import timedelta
from functools import partial
from pathlib import Path

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch import nn

import igeood

pytestmark = pytest.mark.skipif(not hasattr(os, "fork"), reason="the ranks are forked")
SIZES = (1, 2, 3)
KINDS = ("igeood", "mahalanobis", "mahalanobis++", "arrays")
BOUNDS = {1: [0, 203], 2: [0, 150, 203], 3: [0, 120, 120, 203]}  # rank 1 of 3 has no row


def make_model():
    torch.manual_seed(0)
    layers = nn.Conv2d(1, 6, 3), nn.BatchNorm2d(6), nn.ReLU(), nn.Flatten(), nn.Linear(96, 24), nn.ReLU()
    return nn.Sequential(*layers, nn.Linear(24, 4)).double()


def make_data(seed, n=203):
    """Images whose class shows; those of class 3 come last, so that the first rank has none."""
    draw = torch.Generator().manual_seed(seed)
    y = (torch.arange(n) % 4).sort().values
    x = torch.randn(n, 1, 6, 6, generator=draw, dtype=torch.float64)
    x[torch.arange(n), 0, y, y] += 3.0
    return x, y


def shard(kind, seed, rank, size):
    x, y = make_data(seed)
    if kind == "arrays":
        x = make_model().eval()(x).detach()
    x, y = (part[slice(*BOUNDS[size][rank : rank + 2])] for part in (x, y))
    if kind == "arrays":
        return x.numpy(), y.numpy()
    return list(zip(x.split(16), y.split(16), strict=True)) if len(x) else []


def work(rank, size, folder):
    """Every kind of guard, fitted, calibrated and saved, with its scores; and two ranks of three."""
    test = make_data(3)[0]
    for kind in KINDS:
        guard = igeood.black_box() if kind == "arrays" else igeood.white_box(make_model(), method=kind)
        guard.fit(shard(kind, 1, rank, size)).calibrate(shard(kind, 2, rank, size), tpr=0.9)
        guard.save(folder / f"{kind}-{size}-{rank}.guard")
        guard.summary.save(folder / f"{kind}-{size}-{rank}.summary")
        scores = guard.score(make_model().eval()(test).detach() if kind == "arrays" else test)
        np.save(folder / f"{kind}-{size}-{rank}.npy", np.asarray(scores))
    if size == 3:
        fit = partial(igeood.black_box(method="energy").fit, torch.randn(10 + rank, 4), group=dist.new_group([1, 2]))
        (folder / f"part-{rank}.json").write_text(json.dumps(outcome(lambda: fit().summary.rows)))


def fail(rank, _, folder):
    """What each of two ranks raises where something is wrong with one of them, or with both."""
    x, y = make_data(1)
    logits, labels, model, black_box = x.flatten(1)[:, :4].numpy(), y.numpy(), make_model(), igeood.black_box
    wrapped = nn.parallel.DistributedDataParallel(make_model())  # exchanges buffers in each pass of its own

    def broken(error):
        yield x[:9], y[:9]
        raise error

    cases = {
        "failing": lambda: black_box(model).fit(broken(OSError("disk is gone")) if rank else (x, y)),
        "interrupt": lambda: black_box(model).fit(broken(KeyboardInterrupt()) if rank else (x, y)),
        "labels": lambda: black_box().fit(logits, labels + 9 * rank),
        "classes": lambda: black_box().fit(x.flatten(1)[:, : 4 + rank].numpy(), labels),
        "model": lambda: black_box(model.float() if rank else model).fit((x, y)),
        "no rows": lambda: black_box().fit(logits[:0], labels[:0]),
        "few": lambda: black_box().fit(logits, labels).calibrate(-logits[: 5 + rank]),
        "options": lambda: black_box(method="energy", temperature=1.0 + rank).fit(logits, labels),
        "promises": lambda: black_box().fit(logits, labels).calibrate(logits, 0.9 - 0.1 * rank),
        "wrapped": lambda: black_box(wrapped).fit([(x, y)] * (1 + rank)).summary.rows,
        "alone": lambda: black_box(method="energy").fit(logits[rank:], group=False).summary.rows,
        "scores": lambda: len(black_box(method="energy").fit(logits).score(logits[rank:])),
    }
    (folder / f"fail-{rank}.json").write_text(json.dumps({name: outcome(case) for name, case in cases.items()}))


def outcome(case):
    try:
        return case()
    except (Exception, KeyboardInterrupt) as error:  # noqa: BLE001
        return [type(error).__name__, getattr(error, "argument", None), str(error)]


def vanish(rank, _, folder):
    """Rank 1 dies in the middle of its data."""
    data = (os._exit(3) for _ in range(1)) if rank else make_data(1)
    (folder / "vanish.json").write_text(json.dumps(outcome(lambda: igeood.black_box(make_model()).fit(data))))


def child(task, rank, size, folder):
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    sys.stderr = (folder / f"log-{task.__name__}-{size}-{rank}.txt").open("w", buffering=1)
    store = f"file://{folder}/store-{task.__name__}-{size}"
    dist.init_process_group("gloo", store, timeout=timedelta(seconds=60), rank=rank, world_size=size)
    task(rank, size, folder)
    dist.destroy_process_group()


def main(folder):
    import scipy.stats  # noqa: PLC0415, F401 (slow to import: once, for all)

    fork = multiprocessing.get_context("fork").Process
    for task, size in [*((work, size) for size in SIZES), (fail, 2), (vanish, 2)]:
        ranks = [fork(target=child, args=(task, rank, size, folder)) for rank in range(size)]
        for process in ranks:
            process.start()
        for process in ranks:
            process.join(60)
            process.kill()


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """What all ranks have written."""
    path = tmp_path_factory.mktemp("ranks")
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo"}
    subprocess.run([sys.executable, __file__, str(path)], env=environment, check=True, timeout=300)
    assert not [text for text in map(Path.read_text, path.glob("log-*.txt")) if "Traceback" in text]
    return path


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("size", SIZES[1:])
def test_ranks_with_shards_are_one_process_with_all(folder, kind, size):
    """Sums agree to 1e-12, the sample to the row, scores to 1e-9; ranks among themselves to the bit."""
    alone, scores = igeood.Summary.load(folder / f"{kind}-1-0.summary"), np.load(folder / f"{kind}-1-0.npy")
    assert len({(folder / f"{kind}-{size}-{rank}.guard").read_bytes() for rank in range(size)}) == 1
    models = [] if kind == "arrays" else [make_model()]
    one, many = (igeood.load(folder / f"{kind}-{n}-0.guard", *models) for n in (1, size))
    assert (many.layers, many.promise) == (one.layers, one.promise)
    assert many.threshold == pytest.approx(one.threshold, rel=1e-9)
    for rank in range(size):
        summary = igeood.Summary.load(folder / f"{kind}-{size}-{rank}.summary")
        assert summary.rows == alone.rows == 203
        assert torch.equal(summary.counts, alone.counts)
        for block, sums in alone.sums.items():
            for value, expected in ((summary.sums[block].mean, sums.mean), (summary.sums[block].scatter, sums.scatter)):
                assert (value - expected).abs().max() <= 1e-12 * expected.abs().max()
        for part, sample in alone.samples.items():
            assert np.array_equal(summary.samples[part].outputs()[0].keys, sample.outputs()[0].keys)
            assert torch.equal(summary.samples[part].outputs()[1], sample.outputs()[1])
        np.testing.assert_allclose(np.load(folder / f"{kind}-{size}-{rank}.npy"), scores, rtol=1e-9)


OF_ONE = {"failing": ("OSError", None), "labels": ("InputError", "labels"), "interrupt": ("KeyboardInterrupt", None)}
OF_BOTH = {"classes": "outputs", "model": "summary", "no rows": "data", "few": "id_data"}
OF_BOTH |= {"options": "group", "promises": "group"}


def test_an_error_ends_all_ranks_and_names_the_one_that_failed(folder):
    first, second = (json.loads((folder / f"fail-{rank}.json").read_text()) for rank in (0, 1))
    for name, (error, argument) in OF_ONE.items():
        assert second[name][:2] == [error, argument], second[name]
        assert first[name][0] == "IgeoodError", first[name]
        assert f"rank 1: {error}" in first[name][2], first[name]
    for name, argument in OF_BOTH.items():
        assert first[name] == second[name]
        assert first[name][0] in ("InputError", "NoRowsError"), first[name]
        assert argument in first[name][2], first[name]
    assert (first["alone"], second["alone"]) == (203, 202)
    assert (first["scores"], second["scores"]) == (203, 202)  # of its own rows
    assert first["wrapped"] == second["wrapped"] == 3 * 203


def test_a_rank_that_dies_ends_the_others_and_ranks_outside_of_a_group_are_refused(folder):
    assert json.loads((folder / "vanish.json").read_text())[:2] == ["IgeoodError", "group"]
    outside, *inside = (json.loads((folder / f"part-{rank}.json").read_text()) for rank in range(3))
    assert inside == [23, 23]
    assert outside[:2] == ["InputError", "group"]


if __name__ == "__main__":
    main(Path(sys.argv[1]))
