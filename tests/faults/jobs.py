"""The commands that write, each with what it starts from, and what a kill may cost it."""

import io
import json
import os
import re
import shutil
import sys
import tarfile
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np

sys.path.insert(0, str(Path(__file__).parent))

from kills import Ended, Warm
from made import make_world

from igeood import storage
from igeood.datasets.download import CHUNK

SHARD, EPOCH = 20, 3  # images a file of outputs, and steps a pass over the training images
TEMPORARY = re.compile(r"\.(.+)\.[0-9a-f]{16}\.part")


@dataclass(frozen=True)
class Job:
    """A command, the files that are there before it, and for each unit of work how much one kill may cost.

    The files are what other jobs leave: each is a job and a name.
    """

    command: tuple
    start: dict = field(default_factory=dict)
    lost: dict = field(default_factory=dict)
    fetches: bool = False
    resumes: bool = False


@dataclass
class Shop:
    """Where jobs are made: logits, guards, a small world to benchmark in, and a folder for each run."""

    warm: Warm
    folder: Path
    served: object
    _whole: dict = field(default_factory=dict, repr=False)
    count: int = 0

    def __post_init__(self):
        self.world = make_world(self.folder / "world")
        for part, seed in (("train", 0), ("held", 1), ("foreign", 2)):
            np.savez(self.folder / f"{part}.npz", **_logits(seed, foreign=part == "foreign"))

    def logits(self, part):
        return self.folder / f"{part}.npz"

    def fresh(self, job):
        """A new folder with what the job starts from."""
        self.count += 1
        folder = self.folder / f"run-{self.count}"
        folder.mkdir()
        self.fill(job, folder)
        return folder

    def fill(self, job, folder):
        """Put there what the job starts from."""
        for name, (maker, made) in job.start.items():
            source = self.made(maker, made)
            if source.is_dir():
                shutil.copytree(source, folder / name)
            else:
                shutil.copyfile(source, folder / name)

    def before(self, job):
        """The contents of the files that the job starts from."""
        sources = {name: self.made(*source) for name, source in job.start.items()}
        return {name: content(path) for name, path in sources.items() if path.is_file()}

    def run(self, job, folder, **options):
        """Run the job's command there."""
        web = [self.served.url, len(self.served.content)] if job.fetches else None
        return self.warm.run(job.command, folder, web=web, **options)

    def whole(self, job) -> "tuple[Ended, dict]":
        """How the job ends when nothing disturbs it, and what it leaves."""
        if job.command not in self._whole:
            folder = self.fresh(job)
            ended = self.run(job, folder)
            assert ended.code == 0, ended
            self._whole[job.command] = ended, tree(folder), folder
        return self._whole[job.command][:2]

    def made(self, job, name) -> Path:
        """A file or folder that an undisturbed job leaves."""
        self.whole(job)
        return self._whole[job.command][2] / name

    def jobs(self):
        """Every command that writes a file, by its name."""
        train, held, foreign = (self.logits(part) for part in ("train", "held", "foreign"))
        guard, found = "guard.safetensors", {}
        other = (Job(("fit", train, "--out", guard, "--method", "energy")), guard)
        fitted = (Job(("fit", train, "--out", guard)), guard)
        network, red, blue = (self.world / name for name in ("net.safetensors", "red", "blue"))
        found["fit"] = Job(("fit", train, "--out", guard, "--force"), {guard: other})
        found["calibrate"] = Job(("calibrate", guard, held), {guard: fitted})
        found["tune"] = Job(("tune", guard, "--train", train, "--id", held, "--ood", foreign), {guard: fitted})
        ready = (found["calibrate"], guard)
        found["score"] = Job(("score", guard, held, "--out", "scores.parquet"), {guard: ready})
        found["save"] = Job(("save",), {"one.safetensors": fitted, "two.safetensors": ready})
        some = [f"--setting={s}" for s in ("black-box", "grey-box", "white-box")]
        some += [f"--method={m}" for m in ("energy", "igeood", "igeood+")]
        sets = ["--ood", f"folder:{red}", "--ood", "gaussian", "--validation", f"folder:{blue}", "--root", self.world]
        few = ["--images", 40, "--limit", 40, "--train", 60, "--splits", 1, "--out", "results"]
        found["bench"] = Job(
            ("bench", "--network", network, *sets, *some, *few),
            lost={"images": SHARD, "cells": 1, "searches": 1},
            resumes=True,
        )
        short = ["--limit", 10 * EPOCH, "--epochs", 3, "--batch", 10, "--root", self.world, "--out", "net.safetensors"]
        found["train"] = Job(("train", "resnet-10-16", *short), lost={"steps": EPOCH}, resumes=True)
        found["data get"] = Job(
            ("data", "get", "cifar-10", "--root", "data"), lost={"bytes": CHUNK}, fetches=True, resumes=True
        )
        results = (found["bench"], "results")
        found["report"] = Job(("report", "results"), {"results": results})
        found["demo"] = Job(("demo", "--out", "demo"), resumes=True)
        found["paper"] = Job(("paper", "histograms", "--results", "results", "--out", "figures"), {"results": results})
        return found


def archive():
    """A small CIFAR-10 as it is fetched: its two files, of bytes that do not shrink."""
    buffer, draw = io.BytesIO(), np.random.default_rng(0)
    with tarfile.open(fileobj=buffer, mode="w:gz") as made:
        for split, n in (("train", 300), ("test", 100)):
            records = draw.integers(0, 256, (n, 3073), dtype=np.uint8)
            records[:, 0] = np.arange(n) % 10
            info = tarfile.TarInfo(f"cifar-10-batches-bin/{split}.bin")
            info.size = records.nbytes
            made.addfile(info, io.BytesIO(records.tobytes()))
    return buffer.getvalue()


def _logits(seed, *, foreign, n=200, classes=5):
    draw = np.random.default_rng(seed)
    logits, labels = draw.normal(size=(n, classes)), np.arange(n) % classes
    logits[np.arange(n), labels] += 0.0 if foreign else 6.0
    return {"logits": logits.astype(np.float32), "labels": labels}


def tree(folder):
    """Every file below a folder with its content, and every empty folder."""
    found = {}
    for here, folders, files in os.walk(folder):
        place = Path(here).relative_to(folder)
        found.update({str(place / name): content(Path(here) / name) for name in files})
        if not (folders or files):
            found[f"{place}/"] = b""
    return found


def content(path):
    """A file's bytes; of safetensors with a sorted head, as its own library writes the notes in any order."""
    found = path.read_bytes()
    if path.suffix != ".safetensors" or len(found) < 8:
        return found
    end = 8 + int.from_bytes(found[:8], "little")
    try:
        return json.dumps(json.loads(found[8:end]), sort_keys=True).encode() + found[end:]
    except ValueError:
        return found


def check_sound(shop, job, folder):
    """Everything that has its final name is whole: as it was before, or as an undisturbed run leaves it.

    What is temporary is known by its name. Files that grow by lines are the beginning of the whole, and a checkpoint's
    digest is right.
    """
    before, whole = shop.before(job), shop.whole(job)[1]
    for name, found in tree(folder).items():
        if name.endswith("/") or found in (before.get(name), whole.get(name)):
            continue
        if job.command == ("save",) and not TEMPORARY.search(name):
            assert found in before.values(), name
        elif Path(name).name == "net.training":
            storage.read(folder / name, "checkpoint")
        else:
            _check_temporary(name, found, whole, shop.served.content)


def _check_temporary(name, found, whole, archived):
    last = Path(name).name
    if temporary := TEMPORARY.fullmatch(last):
        assert {str(Path(name).with_name(temporary[1])), temporary[1]} & {*whole, "net.training"}, name
    elif last.endswith(".jsonl"):
        assert whole[name].startswith(found), name
    elif last in ("small.tar.gz", "small.tar.gz.part"):
        assert archived.startswith(found), name
        assert last.endswith(".part") or found == archived, name
    else:
        assert found == b"" or last == "small.tar.gz.part.json" or ".igeood/unpack-cifar-10/" in name, name
        assert found or last.endswith((".lock", ".part.json")) or ".igeood/unpack-cifar-10/" in name, name


def check_units(job, ended, runs, kills):
    """Nothing was done twice but what each kill may cost."""
    total = sum((run.units for run in runs), Counter())
    for unit, lost in job.lost.items():
        assert ended.units[unit] > lost, f"{unit}: too few to tell"
        assert total[unit] <= ended.units[unit] + kills * lost, f"{unit}: {total[unit]} for {ended.units[unit]}"
