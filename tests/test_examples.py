"""Every example runs as it stands, offline, and prints what its README says it does."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

FOLDER = Path(__file__).parent.parent / "examples"
README = (FOLDER / "README.md").read_text(encoding="utf-8")
EXAMPLES = sorted(FOLDER.glob("*.py"))
NEEDS = {"hugging_face_text": "transformers", "image_folder": "PIL"}
LAUNCH = {"torchrun": ["-m", "torch.distributed.run", "--standalone", "--nproc_per_node", "2"]}
KEY = {  # a line that each must print: what it shows has happened
    "hugging_face_text": r"white box: \d\.\d% of known topics refused, (100|[89]\d)\.\d% of the foreign one",
    "image_folder": r"  foreign/[89]/\d+\.png p=0\.0\d+, taken for a [0-7]; sample \d+: score .* = ",
    "sklearn_logits": r"  digits 8, 9 +[6-9]\d\.\d% refused",
    "torchrun": r"2 ranks fitted 2001 rows; at least 95%",
    "torchvision_like": r"loaded guard agrees: True",
}


def shape(text):
    """Lines without their numbers, and without what depends on numbers: signs, and which layer comes first."""
    return [re.sub(r"\d[\d.]*", "#", line.split(": score")[0]) for line in text.splitlines()]


@pytest.mark.parametrize("path", EXAMPLES, ids=lambda path: path.stem)
def test_it_runs(path, tmp_path):
    if path.stem in NEEDS:
        pytest.importorskip(NEEDS[path.stem])
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1", "PYTHONIOENCODING": "utf-8"}
    options = {"cwd": tmp_path, "env": environment, "capture_output": True, "encoding": "utf-8", "timeout": 600}
    command = [sys.executable, "-W", "error", *LAUNCH.get(path.stem, []), str(path)]
    done = subprocess.run(command, **options, check=False)
    assert done.returncode == 0, done.stderr
    assert [line for line in done.stderr.splitlines() if ": left out" not in line] == []
    assert re.search(f"^{KEY[path.stem]}", done.stdout, re.M), done.stdout
    shown = re.search(rf"`{path.name}`.*?```text\n(.*?)```", README, re.S)
    assert shape(done.stdout) == shape(shown[1]), done.stdout
    assert list(tmp_path.iterdir()) == []


def test_each_is_listed():
    assert {path.stem for path in EXAMPLES} == set(KEY)
