"""`make bench` runs every script of benchmarks/, and the page has them all."""

import re
import runpy
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest

ROOT = Path(__file__).parent.parent
HELPERS = {
    "side_by_side",
    "page",
    "size",
    "train_networks",
    "against",
    "comparison",
    "export",
    "geometry",
    "peers",
    "health",
    "monitor",
    "access",
    "ranks",
    "rates",
    "serve",
    "units",
}
SCRIPTS = sorted(path.stem for path in (ROOT / "benchmarks").glob("*.py") if path.stem not in HELPERS)


def load(name):
    """What a file of benchmarks/ defines."""
    return SimpleNamespace(**runpy.run_path(str(ROOT / "benchmarks" / f"{name}.py")))


def test_all_scripts_are_run_and_shown(monkeypatch):
    monkeypatch.syspath_prepend(ROOT / "benchmarks")
    listed = re.search(r"^BENCHMARKS := (.*)$", (ROOT / "Makefile").read_text(), re.MULTILINE)[1].split()
    assert sorted(listed) == sorted(load("page").SCRIPTS) == SCRIPTS
    shown = (ROOT / "docs" / "performance.md").read_text(encoding="utf-8")
    for name in SCRIPTS:
        source = (ROOT / "benchmarks" / f"{name}.py").read_text(encoding="utf-8")
        title = re.search(r'main\("(.*?)", cases\)', source)[1]
        assert f"## {title}\n" in shown


def test_rows_tell_the_ratio_the_limit_and_the_memory():
    bench = load("side_by_side")
    slow, quick = (lambda: sum(range(100_000))), (lambda: sum(range(1_000)))
    others = {"slow": (slow, "least", 5.0), "itself": (quick, "most", 0.1)}
    faster, slower = bench.compare("a case", quick, others, number=3)
    assert faster.ratio > 5
    assert (faster.met, faster.limit, slower.met, slower.limit) == (True, "≥ 5× faster", False, "≤ 0.1×")
    (scaled,) = bench.compare("a case", quick, {"part": (quick, "least", None)}, scale={"part": 100.0}, number=3)
    assert (scaled.ratio > 20, scaled.met) == (True, None)


JOB = """
import torch
from side_by_side import peak_memory

def job():
    held = torch.ones(16_000_000)  # 64 MB
    return held[:8_000_000].clone()  # 32 MB, which are the result's

print(peak_memory(job))
"""


@pytest.mark.skipif(not Path("/proc/self/clear_refs").exists(), reason="needs Linux")
def test_peak_memory_counts_what_is_held_beyond_the_result():
    pytest.importorskip("torch")  # in a process of its own: what others have freed may serve again
    command = [sys.executable, "-c", JOB]
    done = subprocess.run(command, cwd=ROOT / "benchmarks", capture_output=True, text=True, check=True)
    assert 50 < float(done.stdout) < 90


def test_the_monitors_benchmark_prints_its_tables(capsys):
    pytest.importorskip("river", reason="river is not installed: the extra `dev` has it")
    load("monitor").main(["--quick"])
    rows = [line for line in capsys.readouterr().out.splitlines() if line.startswith("|")]
    assert len(rows) == 2 + 8 + 2 + 3 + 2 + 5
    assert not any("NO" in row for row in rows[:10])


@pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="needs Linux")
@pytest.mark.slow
def test_the_service_is_measured_in_seconds(capsys):
    pytest.importorskip("uvicorn")
    load("serve").main(["--quick"])
    speed, memory, mixed, signals = [part.splitlines()[2:] for part in capsys.readouterr().out.strip().split("\n\n")]
    assert [row.split("|")[1].strip() for row in speed] == ["10 logits"]
    assert mixed == ["| 10 logits | 300 | 270 | 30 | 0 |"]
    assert "NO" not in memory[0] + signals[0].partition("s old")[0]
