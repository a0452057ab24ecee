"""Killed at any point: files are whole, the same command finishes, little is done twice, and the end is the same."""

import json
import random
import re
import shutil
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import save_file

sys.path.insert(0, str(Path(__file__).parent))  # the processes that are killed import it by its name
from killed import run

from igeood.bench.networks import build
from igeood.files import only_one

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="forks a process that has torch")
KILLED = (-9, -25)
GUARD = "guard.safetensors"
STARTS = {"fit": "fit first", "calibrate": "fit", "tune": "fit", "score": "calibrate"}  # whose guard is there before
LOCKS = {"fit": f".{GUARD}.lock", "bench": "results/.lock", "train": ".net.lock"}
LOCKS |= {"calibrate": LOCKS["fit"], "data get": "fetched/.igeood/cifar-10.lock"}
JOBS = ("fit", "calibrate", "tune", "score", "bench", "train", "data get")
TEMPORARY = re.compile(r"(^|/)\.[^/]*part$|(^|/)\.igeood/|^net\.training$")


def write_cifar(folder):
    """A small CIFAR-10."""
    draw = np.random.default_rng(0)
    (folder / "cifar-10-batches-bin").mkdir(parents=True)
    for split in ("train", "test"):
        records = draw.integers(0, 256, (60, 3073), dtype=np.uint8)
        records[:, 0] = np.arange(60) % 10
        records.tofile(folder / "cifar-10-batches-bin" / f"{split}.bin")


class Shop:
    """Where jobs run: inputs, a server, and for each job how it ends when nothing disturbs it."""

    def __init__(self, folder, url):
        self.folder, self.url, self.count, self._whole = folder, url, 0, {}
        draw, labels = np.random.default_rng(0), np.arange(200) % 5
        for part, confidence in (("train", 6.0), ("held", 6.0), ("foreign", 0.0)):
            logits = draw.normal(size=(200, 5)) + confidence * np.eye(5)[labels]
            np.savez(folder / f"{part}.npz", logits=logits.astype(np.float32), labels=labels)
        write_cifar(folder / "data")
        torch.manual_seed(0)
        about = {"network": "resnet-10-16", "trained_on": "cifar-10", "classes": "10"}
        save_file(build("resnet-10-16").state_dict(), folder / "net.safetensors", about)
        train, held, foreign = (folder / f"{part}.npz" for part in ("train", "held", "foreign"))
        data = ["--root", folder / "data"]
        methods = ["--setting=black-box", "--setting=white-box", "--method=energy", "--method=igeood"]
        bench = ["bench", "--network", folder / "net.safetensors", "--ood=gaussian", "--validation=none", *methods]
        self.commands = {
            "fit first": ["fit", train, "--out", GUARD, "--method", "energy"],
            "fit": ["fit", train, "--out", GUARD, "--force"],
            "calibrate": ["calibrate", GUARD, held],
            "tune": ["tune", GUARD, "--train", train, "--id", held, "--ood", foreign],
            "score": ["score", GUARD, held, "--out", "scores.parquet", "--force"],
            "bench": [*bench, "--images=40", "--splits=1", "--out=results", *data],
            "train": ["train", "resnet-10-16", "--out=net.safetensors", "--epochs=3", "--batch=20", *data],
            "data get": ["data", "get", "cifar-10", "--root", "fetched"],
        }

    def fresh(self, job):
        """A new folder with what the job starts from."""
        self.count += 1
        folder = self.folder / f"run-{self.count}"
        folder.mkdir()
        if job in STARTS:
            (folder / GUARD).write_bytes(self.start(job))
        return folder

    def start(self, job):
        """The guard's file before a job."""
        return (self.whole(STARTS[job])[2] / GUARD).read_bytes()

    def run(self, job, folder, *fault):
        return run(self.commands[job], folder, self.url, *fault)

    def whole(self, job):
        """How the job ends, the files that it leaves, and where."""
        if job not in self._whole:
            folder = self.fresh(job)
            ended = self.run(job, folder)
            assert ended.code == 0, ended
            self._whole[job] = ended, tree(folder), folder
        return self._whole[job]


@pytest.fixture(scope="module")
def shop(file_server, tmp_path_factory):
    folder = tmp_path_factory.mktemp("kills")
    write_cifar(folder / "files")
    shutil.make_archive(folder / "web" / "small", "gztar", folder / "files")
    with file_server(folder / "web") as address:
        yield Shop(folder, f"{address}small.tar.gz")


def tree(folder):
    """Every file below a folder with its content, but for empty locks, which stay if nobody writes there again."""
    files = (path for path in Path(folder).rglob("*") if path.is_file() and not path.name.endswith(".lock"))
    return {str(path.relative_to(folder)): content(path.read_bytes(), path.suffix) for path in files}


def content(data, suffix=".safetensors"):
    """A file's bytes; of safetensors with a sorted head, which has any order."""
    if suffix != ".safetensors" or len(data) < 8:
        return data
    end = 8 + int.from_bytes(data[:8], "little")
    return json.dumps(json.loads(data[8:end]), sort_keys=True).encode() + data[end:]


def check_killed_and_given_again(shop, job, *fault):
    """What has its final name is whole, as before or as at the end; given again, the job ends as if undisturbed."""
    whole, folder = shop.whole(job)[1], shop.fresh(job)
    killed = shop.run(job, folder, *fault)
    assert killed.code in KILLED or (fault[0] == "bytes" and fault[1] > 500), killed  # some write no more
    for name, data in tree(folder).items():
        at_the_start = job in STARTS and data == content(shop.start(job))
        if not (TEMPORARY.search(name) or data == whole.get(name) or at_the_start):
            assert name.endswith(".jsonl"), name
            assert whole[name].startswith(data), name  # whole lines of what was done
    has_epochs = (folder / "net.training").exists()
    outputs = {path: path.stat().st_ino for path in folder.glob("results/outputs/**/*.safetensors")}
    was_done = tree(folder).get(GUARD) == whole.get(GUARD)
    last = shop.run(job, folder)
    assert last.code == 0 or (job == "train" and "net.safetensors" in last.text), last
    if job == "tune" and was_done:  # it was tuned already, and is tuned again from there
        whole = {**whole, GUARD: tree(folder)[GUARD]}
    assert tree(folder) == whole
    assert all(path.stat().st_ino == node for path, node in outputs.items())  # what was read is not read again
    assert not has_epochs or "epoch 1:" not in last.text  # training goes on from its checkpoint


@pytest.mark.parametrize("job", JOBS)
def test_killed_at_a_call_to_the_disk_or_in_the_middle_of_a_write(shop, job):
    draw, calls = random.Random(job), len(shop.whole(job)[0].calls)
    for at in (calls, draw.randrange(1, calls)):
        check_killed_and_given_again(shop, job, "call", at)
    check_killed_and_given_again(shop, job, "bytes", draw.randrange(1, 500))


@pytest.mark.parametrize("job", JOBS)
def test_a_full_disk_and_a_second_writer_are_one_line_and_lose_nothing(shop, job):
    folder = shop.fresh(job)
    before = tree(folder)
    endings = [shop.run(job, folder, "full", 150)]
    if job in LOCKS:
        with only_one(folder / LOCKS[job], "test"):
            endings.append(shop.run(job, folder))
    for ended in endings:
        assert ended.code == 2, ended
        assert ended.text.strip().splitlines()[-1].startswith("igeood: ")
        assert "Traceback" not in ended.text
    assert before.items() <= tree(folder).items()
    assert shop.run(job, folder).code == 0
    assert tree(folder) == shop.whole(job)[1]
