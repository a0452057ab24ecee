"""Benchmarks can be run: `make bench` has every script of its list, and the page has them all."""

import re
import runpy
from pathlib import Path
from types import SimpleNamespace

import pytest

ROOT = Path(__file__).parent.parent


def load(name):
    """What a file of benchmarks/ defines."""
    return SimpleNamespace(**runpy.run_path(str(ROOT / "benchmarks" / f"{name}.py")))


@pytest.mark.parametrize("path", sorted((ROOT / "benchmarks").rglob("*.py")), ids=lambda path: path.stem)
def test_a_script_can_be_imported(path, monkeypatch):
    monkeypatch.syspath_prepend(ROOT / "benchmarks")
    runpy.run_path(str(path))


def test_all_scripts_are_run_and_shown(monkeypatch):
    monkeypatch.syspath_prepend(ROOT / "benchmarks")
    listed = re.search(r"^BENCHMARKS := (.*)$", (ROOT / "Makefile").read_text(), re.MULTILINE)[1].split()
    assert sorted(listed) == sorted(load("page").SCRIPTS)
    shown = (ROOT / "docs" / "performance.md").read_text(encoding="utf-8")
    for name in listed:
        source = (ROOT / "benchmarks" / f"{name}.py").read_text(encoding="utf-8")
        title = re.search(r'main\("(.*?)", cases\)', source)[1]
        assert f"## {title}\n" in shown


def test_the_house_is_measured_as_it_is_written():
    size = load("size")
    text = '"""Module."""\n\na, b, c = 1, 2, 3  # packed\nd, e = 1, 2\n\n\ndef f():\n    """Doc."""\n    return d\n'
    assert size.code_lines(text) == 4
    assert len(size.packed_assignments(text)) == 1
    assert size.unformatted("x = (1,\n2)  # fmt: " + "skip\n") == [2]
