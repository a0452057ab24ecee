"""Damaged files: each is read as it is, or refused in one line; none is executed, hangs, or fills the memory."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

HERE = Path(__file__).parent
FUZZER = HERE / "fuzzer.py"
ROOT = HERE.parents[1]
sys.path.insert(0, str(HERE))

import readers  # noqa: E402
from PIL import Image  # noqa: E402

from igeood.datasets import DATASETS  # noqa: E402
from igeood.datasets.images import FORMATS  # noqa: E402
from igeood.datasets.loading import SUFFIXES  # noqa: E402
from igeood.datasets.unpack import ARCHIVES  # noqa: E402

LINUX = pytest.mark.skipif(sys.platform != "linux", reason="limits of memory, and what is open, are Linux's")


def fuzz(tmp_path, *arguments, timeout):
    told = tmp_path / "told.json"
    command = [
        sys.executable,
        str(FUZZER),
        *map(str, arguments),
        "--json",
        str(told),
        "--kept",
        str(ROOT / "build/fuzz"),
    ]
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=timeout, cwd=tmp_path)
    assert told.exists(), done.stderr[-3000:]
    return json.loads(told.read_text())


def none_failed(found):
    shown = [f"{f['reader']}: {f['why'][-600:]}\n{f['file']}" for f in found["failures"][:5]]
    assert not found["failures"], f"{len(found['failures'])} inputs failed\n" + "\n".join(shown)


def test_every_reader_has_seeds():
    """What opens a file in the library is known here, and what is known here is still there."""
    covered = {name for reader in readers.readers() for name in reader.covers}
    found = readers.opening_functions()
    assert found - covered - set(readers.OWN) == set(), (
        "these read files, and no reader of tests/faults/readers.py covers them"
    )
    assert (covered | set(readers.OWN)) - found == set(), "these are gone: remove them from tests/faults/readers.py"


def test_the_catalogues_are_covered():
    names = {reader.name for reader in readers.readers()}
    assert len(names) == len(readers.readers())
    assert {f"dataset {d.name}" for d in DATASETS.values() if d.kind != "noise"} <= names
    assert {f"image {suffix}" for suffix in SUFFIXES} <= names
    assert {f"archive {suffix}" for suffix in ARCHIVES} <= names
    assert {Image.registered_extensions()[suffix] for suffix in SUFFIXES} == set(FORMATS)


@LINUX
def test_a_short_run(tmp_path):
    """Of every reader, the right files first."""
    found = fuzz(tmp_path, "--inputs", 1200, "--jobs", 1, timeout=600)
    none_failed(found)
    assert set(found["counts"]) == {reader.name for reader in readers.readers()}
    assert sum(counts["refused"] for counts in found["counts"].values() if "refused" in counts) > 500
    assert sum(counts["taken"] for counts in found["counts"].values() if "taken" in counts) > 200


@LINUX
@pytest.mark.slow
def test_a_hundred_thousand_inputs(tmp_path, capsys):
    found = fuzz(tmp_path, "--inputs", 101_000, "--jobs", os.cpu_count() or 1, "--run", 1, timeout=7200)
    total = sum(sum(counts.values()) for counts in found["counts"].values())
    with capsys.disabled():
        for name, counts in found["counts"].items():
            told = ", ".join(f"{n:,} {what}" for what, n in sorted(counts.items()))
            sys.stdout.write(f"\n{name:24} {sum(counts.values()):>7,}: {told}")
        sys.stdout.write(f"\n{total:,} inputs in {found['seconds']:.0f} s, {len(found['failures'])} failed\n")
    none_failed(found)
    assert total >= 100_000


BAD = """
import os, signal, sys, time
sys.path.insert(0, {here!r})
import fuzzer, readers
from igeood.errors import InputError

def behave(path):
    what = path.read_bytes()[:4]
    if what == b"quit": os.kill(os.getpid(), signal.SIGSEGV)
    if what == b"spin":
        while True: pass
    if what == b"hoar": bytearray(10**9)
    if what == b"hide":
        try: bytearray(10**9)
        except MemoryError: raise InputError("damaged") from None
    if what == b"keep": globals().setdefault("kept", []).append(open(path))
    if what == b"evil": exec("1")
    if what == b"outs": open({outside!r}, "w").close()
    if what == b"rais": raise KeyError("x")
    if what == b"long": raise InputError("two\\nlines")
    if what == b"told": raise InputError("one line")

words = [b"quit", b"spin", b"hoar", b"hide", b"keep", b"evil", b"outs", b"rais", b"long", b"told", b"fine"]
reader = readers.Reader("bad", "x", lambda: [b"fine"], behave, seconds=0.3)
readers.readers = lambda: (reader,)
readers.damaged = lambda reader, made, number, run: words[number]
sys.argv = ["fuzzer", "--inputs", str(len(words)), "--json", {told!r}, "--kept", {kept!r}]
fuzzer.main()
"""


@LINUX
def test_the_fuzzer_sees_what_it_looks_for(tmp_path):
    """A reader that does each wrong thing once."""
    told, kept = tmp_path / "told.json", tmp_path / "kept"
    text = BAD.format(here=str(HERE), outside=str(tmp_path / "outside"), told=str(told), kept=str(kept))
    done = subprocess.run([sys.executable, "-c", text], capture_output=True, text=True, check=False, timeout=300)
    assert done.returncode == 1, done.stderr[-2000:]
    found = json.loads(told.read_text())
    assert found["counts"] == {"bad": {"failed": 9, "refused": 1, "taken": 1}}
    why = {failure["number"]: failure["why"] for failure in found["failures"]}
    expected = {0: "died (11)", 1: "died (27)", 2: "MemoryError", 3: "too much memory", 4: "left open", 5: "exec",
                6: "opened for writing", 7: "KeyError", 8: "several lines"}  # fmt: skip
    assert {n: text for n, text in expected.items() if text not in why[n]} == {}, why
    assert len(list(kept.iterdir())) == 9
