"""Commands in processes of their own, that die at a chosen call to the disk, or in the middle of a write.

`multiprocessing` forks them from a server that has imported torch once; it imports this module by its name.
"""

import multiprocessing
import os
import re
import resource
import signal
import sys
from dataclasses import replace
from typing import NamedTuple

CALLS = {"open", "os.rename", "os.remove", "os.mkdir", "os.rmdir", "os.chmod"}  # audit events that change the disk
WARM = ["sklearn.linear_model", "sklearn.model_selection", "scipy.stats", "pyarrow.parquet", "torch._dynamo"]
WARM += ["igeood.cli", "igeood.bench.runs", "igeood.bench.networks", "igeood.guard", "igeood.tables"]
PATIENCE = 300  # seconds


class Ended(NamedTuple):
    """How a command ended: its exit code (-9 or -25 if it was killed), what it printed, its calls to the disk."""

    code: int
    text: str
    calls: list[str]


def run(command, folder, url, fault="none", at=0):
    """Run `igeood COMMAND` in a folder.

    Fault "call" kills it before the disk call of this number, "bytes" while a file grows beyond so many bytes, and
    with "full" there is no space beyond them.
    """
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(WARM)
    reader, writer = context.Pipe(duplex=False)
    process = context.Process(target=_child, args=([*map(str, command)], str(folder), writer, url, fault, at))
    process.start()
    writer.close()
    with open(reader.fileno(), encoding="utf-8", closefd=False) as file:
        text = file.read()  # to the child's end
    process.join()
    calls = re.findall("^call (.*)", text, re.MULTILINE)
    return Ended(process.exitcode, re.sub(r"^call .*\n", "", text, flags=re.MULTILINE), calls)


def _child(command, folder, writer, url, fault, at):
    for stream in (1, 2):
        os.dup2(writer.fileno(), stream)
    signal.alarm(PATIENCE)
    os.chdir(folder)
    _hurry(url)
    from igeood.cli import main  # noqa: PLC0415

    if fault in ("bytes", "full"):
        signal.signal(signal.SIGXFSZ, signal.SIG_DFL if fault == "bytes" else signal.SIG_IGN)
        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
        resource.setrlimit(resource.RLIMIT_FSIZE, (at, at))
    else:
        _watch(os.path.realpath(folder), at)
    main.main(command, prog_name="igeood")


def _watch(folder, at):
    """Print each call that changes the disk below the folder, and die before the one of this number."""
    count = 0

    def hook(event, args):
        nonlocal count
        if event not in CALLS or not isinstance(args[0], str):
            return
        if event == "open" and not args[2] & (os.O_WRONLY | os.O_RDWR):
            return
        if not os.path.abspath(args[0]).startswith(folder):  # noqa: PTH100 (audited itself, it must not call much)
            return
        count += 1
        os.write(1, f"call {event} {args[0]}\n".encode())
        if count == at:
            os.kill(os.getpid(), signal.SIGKILL)

    sys.addaudithook(hook)


def _hurry(url):
    """Search coarsely, keep outputs in small files, and fetch from this machine: what is tested is how work stops."""
    from igeood.bench.datasets import DATASETS, Download  # noqa: PLC0415
    from igeood.bench.runs import observing  # noqa: PLC0415
    from igeood.detectors.weighted import Weighted  # noqa: PLC0415
    from igeood.guard import tune  # noqa: PLC0415

    observing.SHARD, tune.SWEEP_POINTS, tune.REFINEMENTS, Weighted.strengths = 40, 4, 0, (1.0,)
    layouts = {split: ((f"cifar-10-batches-bin/{split}.bin",),) for split in ("train", "test")}
    changes = {"counts": {"train": 60, "test": 60}, "layouts": layouts, "downloads": (Download(url),)}
    DATASETS["cifar-10"] = replace(DATASETS["cifar-10"], **changes)
