"""Every example runs as it stands, offline, and prints the lines that its README shows."""

import re
import runpy
import subprocess
import sys
from pathlib import Path

import pytest

from igeood.model.reader import random_state_kept

FOLDER = Path(__file__).parent.parent / "examples"
README = (FOLDER / "README.md").read_text(encoding="utf-8")
SLOW = {"ray_files": [pytest.mark.slow]}
EXAMPLES = [pytest.param(path, marks=SLOW.get(path.stem, []), id=path.stem) for path in sorted(FOLDER.glob("*.py"))]
NEEDS = {"hugging_face_text": "transformers", "image_folder": "PIL", "ray_files": "ray", "service_client": "uvicorn"}


def shape(text):
    """Each line up to its first figure: what follows differs from machine to machine."""
    return [re.split(r"-?\d", line)[0] for line in text.splitlines()]


@pytest.mark.parametrize("path", EXAMPLES)
def test_it_runs(path, tmp_path, monkeypatch, capsys):
    if path.stem in NEEDS:
        pytest.importorskip(NEEDS[path.stem])
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    monkeypatch.chdir(tmp_path)
    if path.stem == "torchrun":
        launch = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node", "2", str(path)]
        out = subprocess.run(launch, capture_output=True, text=True, timeout=600, check=True).stdout
    else:
        with random_state_kept():
            runpy.run_path(str(path), run_name="__main__")
        out = capsys.readouterr().out
    shown = re.search(rf"`{path.name}`.*?```text\n(.*?)```", README, re.S)
    assert shape(out) == shape(shown[1]), out
    assert list(tmp_path.iterdir()) == []
