"""`make bench` runs every script of benchmarks/, and the page has them all."""

import importlib.util
import re
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
HELPERS = {"side_by_side", "samples", "page", "size", "train_networks", "against"}  # not part of `make bench`
SCRIPTS = sorted(path.stem for path in (ROOT / "benchmarks").glob("*.py") if path.stem not in HELPERS)


@pytest.fixture
def load(monkeypatch):
    """Imports a file of benchmarks/ as `python benchmarks/name.py` would."""
    monkeypatch.syspath_prepend(ROOT / "benchmarks")

    def load(name):
        spec = importlib.util.spec_from_file_location(name, ROOT / "benchmarks" / f"{name}.py")
        module = importlib.util.module_from_spec(spec)
        monkeypatch.setitem(sys.modules, name, module)
        spec.loader.exec_module(module)
        return module

    return load


def test_all_scripts_are_run_and_shown(load):
    listed = re.search(r"^BENCHMARKS := (.*)$", (ROOT / "Makefile").read_text(), re.MULTILINE)[1].split()
    assert sorted(listed) == sorted(load("page").SCRIPTS) == SCRIPTS
    shown = (ROOT / "docs" / "performance.md").read_text(encoding="utf-8")
    for name in SCRIPTS:
        title = re.search(r'main\("(.*?)", cases\)', (ROOT / "benchmarks" / f"{name}.py").read_text(encoding="utf-8"))[
            1
        ]
        assert f"## {title}\n" in shown


def test_rows_tell_the_ratio_the_limit_and_the_memory(load):
    bench = load("side_by_side")
    slow, quick = (lambda: sum(range(100_000))), (lambda: sum(range(1_000)))
    faster, slower = bench.compare(
        "a case", quick, {"slow": (slow, "least", 5.0), "itself": (quick, "most", 0.1)}, number=3
    )
    assert faster.ratio > 5
    assert faster.met
    assert faster.limit == "≥ 5× faster"
    assert slower.met is False
    assert slower.limit == "≤ 0.1×"
    (scaled,) = bench.compare("a case", quick, {"part": (quick, "least", None)}, scale={"part": 100.0}, number=3)
    assert scaled.ratio > 20
    assert scaled.met is None


@pytest.mark.skipif(not Path("/proc/self/clear_refs").exists(), reason="needs Linux")
def test_peak_memory_counts_what_is_held_beyond_the_result(load):
    torch = pytest.importorskip("torch")
    megabytes = load("side_by_side").peak_memory

    def job():
        held = torch.ones(16_000_000)  # 64 MB
        return held[:8_000_000].clone()  # 32 MB, which are the result's

    assert 50 < megabytes(job) < 90
