"""Guards under `torch.distributed`: several ranks, each with its shard, are one process with all the data.

The file is also the program that the ranks run: it imports torch once, and forks.
"""

import json
import multiprocessing
import os
import subprocess
import sys
import time
import warnings
from datetime import timedelta
from functools import partial
from pathlib import Path

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.utils.data import BatchSampler, DataLoader, TensorDataset
from torch.utils.data.distributed import DistributedSampler

import igeood

pytestmark = pytest.mark.skipif(not hasattr(os, "fork"), reason="the ranks are forked")
SIZES = (1, 2, 3, 4)
KINDS = ("fisher-rao-product", "mahalanobis", "mahalanobis++", "arrays", "sampler", "array-sampler")
BOUNDS = {1: [0, 203], 2: [0, 150, 203], 3: [0, 120, 120, 203], 4: [0, 9, 100, 101, 203]}  # rank 1 of 3 has no row


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
    if kind.startswith("array"):
        x = make_model().eval()(x).detach()
    if "sampler" in kind:
        dataset = TensorDataset(x, y)
        sampler = DistributedSampler(dataset, size, rank, seed=seed)
        if size == 1 or kind == "sampler":
            return DataLoader(dataset, batch_size=16, sampler=None if size == 1 else sampler)
        return DataLoader(dataset, batch_sampler=BatchSampler(sampler, 16, drop_last=False))
    x, y = (part[slice(*BOUNDS[size][rank : rank + 2])] for part in (x, y))
    return (x.numpy(), y.numpy()) if kind == "arrays" else [*zip(x.split(16), y.split(16), strict=True)] * bool(len(x))


def work(rank, size, folder):
    """Every kind of guard, fitted, calibrated and saved, with its scores; and two ranks of three."""
    for kind in KINDS:
        method = {"method": kind} if kind.startswith("mahalanobis") else {}
        guard = igeood.black_box() if kind.startswith("array") else igeood.white_box(make_model(), **method)
        train, held_out, test = (shard(kind, seed, rank, size) for seed in (1, 2, 3))
        scores = guard.fit(train).calibrate(held_out, tpr=0.9).score(test[0] if kind == "arrays" else test)
        guard.save(folder / f"{kind}-{size}-{rank}.guard")
        guard.summary.save(folder / f"{kind}-{size}-{rank}.summary")
        np.save(folder / f"{kind}-{size}-{rank}.npy", np.asarray(scores))
    if size == 3:
        fit = partial(igeood.black_box(method="energy").fit, torch.randn(10 + rank, 4), group=dist.new_group([1, 2]))
        write(folder / f"part-{rank}.json", outcome(lambda: fit().summary.rows))


def fail(rank, _, folder):
    """What each of two ranks raises where something is wrong with one of them, or with both."""
    x, y = make_data(1)
    logits, labels, model, black_box = x.flatten(1)[:, :4].numpy(), y.numpy(), make_model(), igeood.black_box
    fitted = black_box() if rank else black_box().fit(logits, labels, group=False)
    wrapped = nn.parallel.DistributedDataParallel(make_model())  # exchanges buffers in each pass of its own

    def broken():
        yield x[:9], y[:9]
        raise OSError("disk is gone")

    def interrupted():
        yield x[:9], y[:9]
        raise KeyboardInterrupt

    def seven(rank):
        rows = TensorDataset(x[:7], y[:7])
        return DataLoader(rows, 2, sampler=DistributedSampler(rows, 2, rank))

    cases = {
        "failing": lambda: black_box(model).fit(broken() if rank else (x, y)),
        "labels": lambda: black_box().fit(logits, labels + 9 * rank),
        "classes": lambda: black_box().fit(x.flatten(1)[:, : 4 + rank].numpy(), labels),
        "layers": lambda: igeood.white_box(model, layers=["2" if rank else "5"], method="igeood").fit((x, y)),
        "model": lambda: black_box(model.float() if rank else model).fit((x, y)),
        "empty": lambda: black_box(make_model() if rank else model.float()).fit([(x, y)] * rank),
        "no rows": lambda: black_box().fit(logits[:0], labels[:0]),
        "few": lambda: black_box().fit(logits, labels).calibrate(-logits[: 5 + rank]),
        "names": lambda: black_box().fit(logits, labels, classes=["a"] * (4 + rank)),
        "unfitted": lambda: fitted.score(logits),
        "options": lambda: black_box(temperature=1.0 + rank).fit(logits, labels),
        "guards": lambda: black_box().fit(logits[rank:], labels[rank:], group=False).calibrate(logits),
        "promises": lambda: black_box().fit(logits, labels).calibrate(logits, 0.9 - 0.1 * rank),
        "budget": lambda: black_box().fit(logits, labels, budget=(1 << 20) * (1 - rank)),
        "interrupt": lambda: black_box(model).fit(interrupted() if rank else (x, y)),
        "padded": lambda: len(black_box(model).fit((x, y)).calibrate((x, y)).predict(seven(rank)).score),
        "wrapped": lambda: black_box(wrapped).fit([(x, y)] * (1 + rank)).summary.rows,
        "alone": lambda: black_box(method="energy").fit(logits[rank:], group=False).summary.rows,
    }
    write(folder / f"fail-{rank}.json", {name: outcome(case) for name, case in cases.items()})


def outcome(case):
    try:
        return case()
    except (Exception, KeyboardInterrupt) as error:  # noqa: BLE001
        return f"{type(error).__name__}: {error}"


def write(path, value):
    path.write_text(json.dumps(value), encoding="utf-8")


def vanish(rank, size, folder, *, dies=True):
    """Rank 1 dies in the middle of its data, or does not come."""
    if rank == 1 and not dies:
        return time.sleep(4)
    data = (os._exit(3) for _ in range(1)) if rank else make_data(1)
    return write(folder / f"vanish-{dies}.json", outcome(lambda: igeood.black_box(make_model()).fit(data)))


def stay_away(*rank):
    vanish(*rank, dies=False)


def child(task, rank, size, folder):
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    store, options = f"file://{folder}/store-{task.__name__}-{size}", {"rank": rank, "world_size": size}
    sys.stderr = (folder / f"log-{task.__name__}-{size}-{rank}.txt").open("w", buffering=1)
    dist.init_process_group("gloo", store, timeout=timedelta(seconds=2 if task is stay_away else 60), **options)
    task(rank, size, folder)
    dist.destroy_process_group()


def main(folder):
    import scipy.stats  # noqa: PLC0415, F401 (slow to import: once, for all)

    fork = multiprocessing.get_context("fork").Process
    for task, size in [*((work, size) for size in SIZES), (fail, 2), (vanish, 2), (stay_away, 2)]:
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
    logs = [log for log in path.glob("log-*.txt") if "Traceback" in log.read_text()]
    assert logs == [], logs[0].read_text()
    return path


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("size", SIZES[1:])
def test_ranks_with_shards_are_one_process_with_all(folder, kind, size):
    """Sums agree to 1e-12, the sample to the row, scores to 1e-9; ranks among themselves to the bit."""
    alone = igeood.Summary.load(folder / f"{kind}-1-0.summary")
    scores = np.load(folder / f"{kind}-1-0.npy")
    assert len({(folder / f"{kind}-{size}-{rank}.guard").read_bytes() for rank in range(size)}) == 1
    models = [] if kind.startswith("array") else [make_model()]
    one, many = (igeood.load(folder / f"{kind}-{n}-0.guard", *models) for n in (1, size))
    assert (many.layers, many.promise) == (one.layers, one.promise)
    assert many.health == (one.health if alone.samples else [])  # without a sample labels are not looked at
    assert many.threshold == pytest.approx(one.threshold, rel=1e-9)
    for rank in range(size):
        summary = igeood.Summary.load(folder / f"{kind}-{size}-{rank}.summary")
        assert summary.rows == alone.rows == 203
        assert torch.equal(summary.counts, alone.counts)
        for block, sums in alone.sums.items():
            for value, expected in ((summary.sums[block].mean, sums.mean), (summary.sums[block].scatter, sums.scatter)):
                assert (value - expected).abs().max() <= 1e-12 * expected.abs().max()
        for part, sample in alone.samples.items():
            (mine, weights), (all_, all_weights) = summary.samples[part].outputs(), sample.outputs()
            assert np.array_equal(mine.keys, all_.keys)
            assert torch.equal(weights, all_weights)
        np.testing.assert_allclose(np.load(folder / f"{kind}-{size}-{rank}.npy"), scores, rtol=1e-9)


def test_the_samples_that_a_sampler_repeats_are_counted(folder):
    first, second, alone = ((folder / f"log-work-{log}.txt").read_text() for log in ("3-0", "3-1", "1-0"))
    for name in ("data", "id_data", "x"):
        assert f"{name}: left out 1 samples, which the DistributedSampler repeats so that 3 ranks" in first
    assert second == alone == ""


def test_an_error_ends_all_ranks(folder):
    told = [json.loads((folder / f"fail-{rank}.json").read_text()) for rank in (0, 1)]
    for name, rank, message in (
        ("failing", 1, "OSError: disk is gone"),
        ("labels", 1, "InputError: labels: row 0 has a class outside"),
        ("names", 1, "InputError: classes: 5 names for 4"),
        ("unfitted", 1, "NotReadyError: score: the guard is not fitted"),
        ("empty", 0, "InputError: summary: was made with model"),
        ("budget", 1, "InputError: budget: expected a number of bytes"),
        ("interrupt", 1, "KeyboardInterrupt:"),
    ):
        assert told[rank][name].startswith(message), told
        assert told[1 - rank][name].startswith(f"IgeoodError: rank {rank}: {message}"), told
    for name, message in (
        ("classes", "InputError: rank 1: outputs: a batch has widths [('logits', 5)]"),
        ("layers", "InputError: rank 1: outputs: a batch has widths [('logits', 4), ('2', 6)]"),
        ("model", "InputError: rank 1: summary: model differ"),
        ("no rows", "InputError: data: no training row"),
        ("few", "InputError: id_data: 11 samples cannot promise"),
        ("options", "InputError: group: rank 1 has other method and options than rank 0"),
        ("guards", "InputError: group: rank 1 has other guards or options than rank 0"),
        ("promises", "InputError: group: rank 1 has other guards or options than rank 0"),
    ):
        assert told[0][name] == told[1][name]
        assert told[0][name].startswith(message), told
    assert [each["alone"] for each in told] == [203, 202]
    assert [each["padded"] for each in told] == [4, 4]  # a verdict for each row that the loader gives
    assert [each["wrapped"] for each in told] == [3 * 203] * 2


def test_a_rank_that_dies_or_stays_away_ends_the_others(folder):
    for name in ("vanish-True", "vanish-False"):
        message = json.loads((folder / f"{name}.json").read_text())
        assert message.startswith("IgeoodError: group: another rank has died, or was too slow ("), message
        assert "init_process_group(timeout=...)" in message


def test_a_part_of_the_ranks(folder):
    outside, *inside = (json.loads((folder / f"part-{rank}.json").read_text()) for rank in range(3))
    assert inside == [23, 23]
    assert outside.startswith("InputError: group: expected a ProcessGroup that has this rank")


if __name__ == "__main__":
    main(Path(sys.argv[1]))
