"""Killed at any point: files are whole, the same command finishes, little is done twice, and the end is the same."""

import functools
import http.server
import json
import random
import re
import shutil
import sys
import threading
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import save_file

sys.path.insert(0, str(Path(__file__).parent))  # the processes that are killed import it by its name
from killed import Fault, run

from igeood.bench.networks import build
from igeood.files import only_one

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="forks a process that has torch")
KILLED = (-9, -25)
GUARD = "guard.safetensors"
STARTS = {  # what is there before a command: guards that other commands make
    "fit": {GUARD: "fit first"},
    "calibrate": {GUARD: "fit"},
    "tune": {GUARD: "fit"},
    "score": {GUARD: "calibrate"},
    "save": {"one.safetensors": "fit", "two.safetensors": "calibrate"},
}
JOBS = ("fit", "calibrate", "tune", "score", "save", "bench", "train", "data get")


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
        self.commands = {
            "fit first": ["fit", train, "--out", GUARD, "--method", "energy"],
            "fit": ["fit", train, "--out", GUARD, "--force"],
            "calibrate": ["calibrate", GUARD, held],
            "tune": ["tune", GUARD, "--train", train, "--id", held, "--ood", foreign],
            "score": ["score", GUARD, held, "--out", "scores.parquet", "--force"],
            "save": ["save"],
            "bench": ["bench", "--network", folder / "net.safetensors", "--ood=gaussian", "--validation=none", *methods,
                      "--images=40", "--splits=1", "--out=results", *data],
            "train": ["train", "resnet-10-16", "--out=net.safetensors", "--epochs=3", "--batch=20", *data],
            "data get": ["data", "get", "cifar-10", "--root", "fetched"],
        }  # fmt: skip

    def fresh(self, job):
        """A new folder with what the job starts from."""
        self.count += 1
        folder = self.folder / f"run-{self.count}"
        folder.mkdir()
        for name, maker in STARTS.get(job, {}).items():
            self.whole(maker)
            shutil.copyfile(self._whole[maker][2] / GUARD, folder / name)
        return folder

    def run(self, job, folder, *fault):
        return run(self.commands[job], folder, Fault(*fault), self.url)

    def whole(self, job):
        """How the job ends, and the files that it leaves."""
        if job not in self._whole:
            folder = self.fresh(job)
            ended = self.run(job, folder)
            assert ended.code == 0, ended
            self._whole[job] = ended, tree(folder), folder
        return self._whole[job][:2]


@pytest.fixture(scope="module")
def shop(tmp_path_factory):
    folder = tmp_path_factory.mktemp("kills")
    write_cifar(folder / "files")
    shutil.make_archive(folder / "web" / "small", "gztar", folder / "files")
    handler = functools.partial(http.server.SimpleHTTPRequestHandler, directory=folder / "web")
    handler.func.log_message = lambda *_: None
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), handler) as server:
        thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.02})
        thread.start()
        yield Shop(folder, f"http://127.0.0.1:{server.server_port}/small.tar.gz")
        server.shutdown()
        thread.join()


def tree(folder):
    """Every file below a folder with its content, but for empty locks, which stay if nobody writes there again."""
    files = (path for path in Path(folder).rglob("*") if path.is_file())
    return {str(path.relative_to(folder)): content(path) for path in files if not path.name.endswith(".lock")}


def content(path):
    """A file's bytes; of safetensors with a sorted head, which has any order."""
    found = path.read_bytes()
    if path.suffix != ".safetensors" or len(found) < 8:
        return found
    end = 8 + int.from_bytes(found[:8], "little")
    return json.dumps(json.loads(found[8:end]), sort_keys=True).encode() + found[end:]


TEMPORARY = re.compile(r"(^|/)\.[^/]*part$|(^|/)\.igeood/|^net\.training$")


def check_sound(shop, job, folder):
    """What has its final name is whole: as before, or as at the end; files of lines are a beginning of the whole."""
    whole = shop.whole(job)[1]
    starts = [content(shop._whole[maker][2] / GUARD) for maker in STARTS.get(job, {}).values()]
    for name, found in tree(folder).items():
        if TEMPORARY.search(name) or found == whole.get(name) or found in starts:
            continue
        assert name.endswith(".jsonl"), name
        assert whole[name].startswith(found), name


def kept(folder):
    """The files of finished work, which the next run must not make again: outputs, and the scores of whole results."""
    lines = folder / "results" / "results.jsonl"
    results = lines.read_text().rpartition("\n")[0] if lines.exists() else ""
    files = folder.glob("results/*/**/*.safetensors")
    return {path: path.stat().st_ino for path in files if path.parent.name != "scores" or path.name in results}


def check_killed_and_given_again(shop, job, *fault):
    _, whole = shop.whole(job)
    folder = shop.fresh(job)
    first = shop.run(job, folder, *fault)
    assert first.code in KILLED or (fault[0] == "bytes" and fault[1] > 500), first  # some write no more
    check_sound(shop, job, folder)
    before, epochs = kept(folder), (folder / "net.training").exists()
    done = (folder / GUARD).exists() and content(folder / GUARD) == whole.get(GUARD)
    last = shop.run(job, folder)
    assert last.code == 0 or "net.safetensors exists already" in last.text, last
    if job == "tune" and done:  # it was tuned already, and is tuned again from there
        whole = {**whole, GUARD: content(folder / GUARD)}
    assert tree(folder) == whole
    assert before.items() <= kept(folder).items()
    assert not epochs or "epoch 1:" not in last.text  # training goes on from its checkpoint


@pytest.mark.parametrize("job", JOBS)
def test_killed_at_a_call_to_the_disk_or_in_the_middle_of_a_write(shop, job):
    draw, calls = random.Random(job), len(shop.whole(job)[0].calls)
    for at in (calls, draw.randrange(1, calls)):
        check_killed_and_given_again(shop, job, "call", at)
    check_killed_and_given_again(shop, job, "bytes", draw.randrange(1, 500))


@pytest.mark.slow
@pytest.mark.parametrize("job", JOBS)
def test_killed_at_every_call(shop, job):
    calls = len(shop.whole(job)[0].calls)
    for at in range(1, calls + 1, max(1, calls // 40)):
        check_killed_and_given_again(shop, job, "call", at)
    for size in (1, 100, 10_000, 100_000):
        check_killed_and_given_again(shop, job, "bytes", size)


@pytest.mark.parametrize("job", [job for job in JOBS if job != "save"])
def test_a_full_disk_is_one_line_and_loses_nothing(shop, job):
    folder = shop.fresh(job)
    before = tree(folder)
    ended = shop.run(job, folder, "full", 150)
    assert ended.code == 2, ended
    assert re.fullmatch(r"igeood: .*(too large|No space).*", ended.text.strip().splitlines()[-1]), ended
    assert "Traceback" not in ended.text
    assert before.items() <= tree(folder).items()
    assert shop.run(job, folder).code == 0
    assert tree(folder) == shop.whole(job)[1]


LOCKS = {"fit": f".{GUARD}.lock", "bench": "results/.lock", "train": ".net.lock"}
LOCKS |= {"calibrate": LOCKS["fit"], "data get": "fetched/.igeood/cifar-10.lock"}


@pytest.mark.parametrize("job", LOCKS)
def test_a_second_writer_is_refused(shop, job):
    folder = shop.fresh(job)
    with only_one(folder / LOCKS[job], "test"):
        ended = shop.run(job, folder)
    assert ended.code == 2, ended
    assert "another process is writing there" in ended.text
    assert shop.run(job, folder).code == 0
