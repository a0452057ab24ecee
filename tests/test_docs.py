"""What the documentation shows is true: its Python runs and prints what it says, links lead somewhere, it builds."""

import contextlib
import io
import re
import runpy
import shlex
import subprocess
import sys
from collections import Counter
from pathlib import Path
from xml.etree import ElementTree

import click
import pytest
from click.testing import CliRunner

import igeood
from igeood.cli import main

ROOT = Path(__file__).parent.parent
README = ROOT / "README.md"
PAGES = sorted(path for path in (ROOT / "docs").rglob("*.md") if path.parent.name != "reproduction")
WRITTEN = [*PAGES, *sorted(ROOT.glob("*.md")), ROOT / "examples" / "README.md"]
BLOCK = re.compile(r"^```python\n(?P<code>.*?)^```\n(?:\n```text\n(?P<printed>.*?)^```)?", re.S | re.M)
NUMBER = re.compile(r"[-+]?\d+(?:\.\d+)?")
NEEDS = {"text.md": "transformers", "production.md": "tritonclient.http", "export.md": "onnxruntime"}


def text_of(path):
    return path.read_text(encoding="utf-8")


def name(path):
    return str(path.relative_to(ROOT))


@pytest.fixture
def _methods_kept():
    """What a page registers is gone after it."""
    before = dict(igeood.METHODS)
    yield
    for method in igeood.METHODS.keys() - before.keys():
        del igeood.METHODS[method]


@pytest.mark.parametrize("page", [path for path in [*PAGES, README] if BLOCK.search(text_of(path))], ids=name)
@pytest.mark.usefixtures("_methods_kept")
def test_python_blocks_run_in_order_and_print_what_the_page_says(page, reader_names, tmp_path, monkeypatch, capsys):
    if page.name in NEEDS:
        pytest.importorskip(NEEDS[page.name])
    monkeypatch.chdir(tmp_path)
    for block in BLOCK.finditer(text_of(page)):
        exec(block["code"], reader_names)  # noqa: S102 (our own pages)
        printed, shown = capsys.readouterr().out, block["printed"]
        if shown is not None:  # words are the same; numbers nearly: networks differ from machine to machine
            assert NUMBER.sub("#", printed).split() == NUMBER.sub("#", shown).split(), printed
            numbers, expected = ([float(number) for number in NUMBER.findall(text)] for text in (printed, shown))
            assert numbers == pytest.approx(expected, rel=0.3, abs=0.1), printed


@pytest.mark.parametrize("page", WRITTEN, ids=name)
def test_links_and_the_files_of_the_source_that_a_page_names_exist(page):
    prose = re.sub(r"^```.*?^```", "", text_of(page), flags=re.S | re.M)
    links = [page.parent / link for link in re.findall(r"\]\(([^)\s#]+)[^)]*\)", prose) if "://" not in link]
    named = [ROOT / path for path in re.findall(r"\b(?:tests|src|benchmarks|docs)/[\w/-]+(?:\.\w+)?", prose)]
    assert [str(path) for path in [*links, *named] if not path.exists()] == []


def test_the_navigation_has_every_page_once():
    tree = re.search(r"^nav:\n(.*?)\n\n", text_of(ROOT / "mkdocs.yml"), re.S | re.M)[1]
    pages = re.findall(r": (\S+\.md)$", tree, re.M)
    assert sorted(pages) == sorted(str(path.relative_to(ROOT / "docs")) for path in PAGES)


def test_the_table_of_methods_has_every_method_with_its_title():
    table = re.findall(r"^\| `([\w+-]+)` \| ([^|]*?) \|[^|]*\|[^|]+\|$", text_of(ROOT / "docs" / "methods.md"), re.M)
    assert dict(table) == {name: method.title for name, method in igeood.METHODS.items()}


def test_the_excerpts_of_the_comparison_are_what_the_comparison_says():
    whole = text_of(ROOT / "docs" / "comparison.md").splitlines()
    excerpt = re.findall(r"^\| `[^`]+` \| [\d.]+ / .*$", text_of(ROOT / "docs" / "methods.md"), re.M)
    assert excerpt
    assert [line for line in excerpt if not any(full.startswith(line) for full in whole)] == []


def test_the_calls_in_the_readmes_table_work(reader_names, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    calls = re.findall(r"`((?:igeood|guard)\.[^`]+\))`", text_of(README))
    assert calls
    names = {"igeood": igeood, "path": "guard.safetensors", "shard": reader_names["train_loader"], **reader_names}
    names["loader"] = reader_names["held_out_loader"]
    names["guard"] = igeood.white_box(names["model"], method="probe").fit(names["train_loader"])
    for call in calls:
        names["guard"].calibrate(names["held_out_loader"])  # `tune` undoes it
        exec(call, names)  # noqa: S102 (our own text_of(README))


def test_the_readmes_comparison_is_that_of_the_page():
    first = text_of(ROOT / "docs" / "comparison.md").partition("## Where the product loses")[0]
    page = dict(re.findall(r"^\| `([\w+-]+)` \| (.+? \| .+? \| .+? \| .+?) \|", first, re.M))
    plain = text_of(README).replace("*", "").replace(" (all layers)", "")
    shown = re.findall(r"^\| `([\w+-]+)` \| (.+?) \| (.+?) \| (.+?) \| ([\d.]+) \|$", plain, re.M)
    assert shown
    for name, *figures in shown:
        assert " | ".join(figures) == page[name]


def test_the_tree_names_every_part_of_the_source():
    tree = re.search(r"```\nsrc/igeood/\n(.*?)```", text_of(ROOT / "CONTRIBUTING.md"), re.DOTALL)[1]
    folder = ROOT / "src" / "igeood"
    parts = {f"{path.parent.name}/" for path in folder.glob("*/__init__.py")}
    parts |= {path.name for path in folder.glob("*.py")} - {"__init__.py", "version.py", "terminal.py"}
    assert {part for part in parts if not re.search(rf"^  {re.escape(part)} ", tree, re.M)} == set()


def command_lines():
    """Calls of `igeood` in the shell blocks, as lists of words; those of the command line's page are run."""
    for page in [*PAGES, README]:
        if page.name != "command-line.md":
            for block in re.findall(r"^```sh\n(.*?)^```", text_of(page), re.S | re.M):
                for line in block.replace("\\\n", " ").splitlines():
                    words = shlex.split(re.split(r" > | && ", line)[0], comments=True)
                    if words[:1] == ["igeood"] and len(words) > 1:
                        yield words[1:]


@pytest.mark.parametrize("words", list(command_lines()), ids=" ".join)
def test_every_command_can_be_parsed(words, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    command, (name, *rest) = main.get_command(None, words[0]), words
    if isinstance(command, click.Group):
        command, rest = command.commands[rest[0]], rest[1:]
    command.make_context(name, rest)


def test_the_list_of_commands_is_complete():
    page = text_of(ROOT / "docs" / "commands.md")
    assert {*re.findall(r"^\| `igeood (\w+)", page, re.M)} == {*main.list_commands(None)}


@pytest.fixture(scope="module")
def site(tmp_path_factory):
    """The site, built as `make docs` builds it: a warning is an error."""
    pytest.importorskip("mkdocstrings", reason="mkdocstrings is not installed: the extra `docs` has it")
    folder = tmp_path_factory.mktemp("site")
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "--site-dir", str(folder)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr + done.stdout
    return {str(path.relative_to(folder)): text_of(path) for path in folder.rglob("*.html")}


def test_the_site_requests_nothing_from_elsewhere(site):
    """Of the addresses that a browser fetches by itself."""
    for page, text in site.items():
        addresses = re.findall(r'<(?:script|img|iframe|source)\b[^>]*?\bsrc=["\']?([^"\'\s>]+)', text)
        addresses += re.findall(r'<link\b[^>]*?\bhref=["\']?([^"\'\s>]+)', text)
        assert addresses, page
        assert [address for address in addresses if re.match(r"(https?:)?//", address)] == [], page


def test_every_public_name_is_in_the_reference(site):
    reference = "".join(text for page, text in site.items() if page.startswith("api"))
    assert [public for public in igeood.__all__ if f'id="igeood.{public}"' not in reference] == []


def test_formulas_of_pages_and_docstrings_are_mathml(site):
    assert "<math" in site["api/geometry.html"]
    for page, text in site.items():
        assert not re.search(r":math:|\.\. math::", text), page
        for formula in re.findall(r"<math.*?</math>", text, re.S):
            ElementTree.fromstring(formula)  # noqa: S314 (our own pages)


STEP = re.compile(
    r"cat > (?P<file>\S+) <<'END'\n(?P<text>.*?\n)END$|python -c '(?P<code>.*?)'$|(?P<line>[^\n]+)$", re.S | re.M
)


def run_python(run):
    printed = io.StringIO()
    with contextlib.redirect_stdout(printed):
        run()
    return printed.getvalue()


def run_igeood(words, rest, way):
    """What a command prints, once its output went where `| rest` or `> rest` sends it."""
    result = CliRunner().invoke(main, words)
    assert result.exit_code == 0, result.output
    if way == ">":
        Path(rest).write_text(result.stdout)
        return result.stderr
    if way == "|":
        done = subprocess.run(["/bin/sh", "-ec", rest], input=result.stdout, capture_output=True, text=True, check=True)
        return result.stderr + done.stdout
    return result.output


def run_step(step):
    """One command of a shell block; what it prints."""
    if step["file"]:
        Path(step["file"]).write_text(step["text"])
        return ""
    if step["code"]:
        return run_python(lambda: exec(step["code"], {}))  # noqa: S102 (our own page)
    if step["line"].startswith("python "):
        return run_python(lambda: runpy.run_path(step["line"].split()[1], run_name="__main__"))
    if step["line"].startswith("igeood "):
        line, way, rest = re.fullmatch(r"igeood (.*?)(?: ([|>]) (.+))?", step["line"]).groups()
        return run_igeood(shlex.split(line), rest, way)
    return subprocess.run(["/bin/sh", "-ec", step["line"]], capture_output=True, text=True, check=True).stdout


def test_the_commands_of_the_page_print_what_it_shows(tmp_path, monkeypatch):
    """Their words, in any order; numbers differ between machines."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.delitem(sys.modules, "nets", raising=False)
    monkeypatch.setattr(sys, "path", [*sys.path])
    blocks = re.findall(r"```sh\n(.*?)```\n(?:\n```\n(.*?)```)?", text_of(ROOT / "docs" / "command-line.md"), re.DOTALL)
    assert blocks
    for commands, shown in blocks:
        printed = "".join(map(run_step, STEP.finditer(commands)))
        lines, expected = (Counter(NUMBER.sub("#", text).splitlines()) for text in (printed, shown))
        assert not lines - expected  # log lines are the test runner's
    sys.modules.pop("nets", None)
