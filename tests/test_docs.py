"""What the documentation shows is true: its Python runs and prints what it says, links lead somewhere, it builds."""

import io
import re
import runpy
import subprocess
import sys
from contextlib import redirect_stdout
from html.parser import HTMLParser
from pathlib import Path
from xml.etree import ElementTree

import pytest

import igeood

ROOT = Path(__file__).parent.parent
PAGES = sorted(path for path in (ROOT / "docs").rglob("*.md") if path.parent.name != "reproduction")
WRITTEN = [
    *PAGES,
    ROOT / "README.md",
    ROOT / "CONTRIBUTING.md",
    ROOT / "CHANGELOG.md",
    ROOT / "SECURITY.md",
    ROOT / "examples" / "README.md",
]
NOT_RUN = 0  # blocks marked `title="not run"` in all pages together: keep them few

BLOCK = re.compile(r"^```python(?P<marks>[^\n]*)\n(?P<code>.*?)^```\n(?:\n```text\n(?P<printed>.*?)^```)?", re.S | re.M)


def name(path):
    return str(path.relative_to(ROOT))


def with_code():
    return [path for path in PAGES if BLOCK.search(path.read_text(encoding="utf-8"))]


NUMBER = re.compile(r"[-+]?\d+(?:\.\d+)?")


def check_printed(printed, shown):
    """Words are the same; numbers nearly: a network that is trained on the spot differs from machine to machine."""
    assert NUMBER.sub("#", printed).split() == NUMBER.sub("#", shown).split(), printed
    found, expected = ([float(number) for number in NUMBER.findall(text)] for text in (printed, shown))
    assert found == pytest.approx(expected, rel=0.3, abs=0.1), printed


@pytest.mark.parametrize("page", with_code(), ids=name)
def test_python_blocks_run_in_order_and_print_what_the_page_says(page, reader_names, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for block in BLOCK.finditer(page.read_text(encoding="utf-8")):
        if 'title="not run"' in block["marks"]:
            continue
        printed = io.StringIO()
        with redirect_stdout(printed):
            exec(block["code"], reader_names)  # noqa: S102 (our own pages)
        if block["printed"] is not None:
            check_printed(printed.getvalue(), block["printed"])


def test_pages_have_code_and_nearly_all_of_it_runs():
    assert {"index.md", "quick-start.md", "access.md", "guarantees.md"} <= {path.name for path in with_code()}
    blocks = [block for path in PAGES for block in BLOCK.finditer(path.read_text(encoding="utf-8"))]
    assert sum('title="not run"' in block["marks"] for block in blocks) <= NOT_RUN


@pytest.mark.parametrize("page", WRITTEN, ids=name)
def test_relative_links_and_images_exist(page):
    text = re.sub(r"^```.*?^```", "", page.read_text(encoding="utf-8"), flags=re.S | re.M)
    for target in re.findall(r"\]\(([^)\s#]+)[^)]*\)", text):
        if "://" not in target:
            assert (page.parent / target).exists(), target


def test_tests_that_the_guarantees_name_exist():
    found = re.findall(r"`(tests/[\w/]+\.py)::(\w+)`", (ROOT / "docs" / "guarantees.md").read_text(encoding="utf-8"))
    assert len(found) >= 10
    for file, test in found:
        assert f"def {test}(" in (ROOT / file).read_text(encoding="utf-8"), test


@pytest.fixture(scope="module")
def site(tmp_path_factory):
    """The site, built as `make docs` builds it: a warning is an error."""
    pytest.importorskip("mkdocs", reason="mkdocs is not installed: the extra `docs` has it")
    pytest.importorskip("mkdocstrings", reason="mkdocstrings is not installed: the extra `docs` has it")
    folder = tmp_path_factory.mktemp("site")
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "--site-dir", str(folder)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr + done.stdout
    return folder


def html_of(site, pattern="*.html"):
    return {path.name: path.read_text(encoding="utf-8") for path in site.rglob(pattern)}


class _Requests(HTMLParser):
    """Addresses that a browser fetches by itself."""

    def __init__(self):
        super().__init__()
        self.found = []

    def handle_starttag(self, tag, attributes):
        wanted = {"script": "src", "img": "src", "link": "href", "iframe": "src", "source": "src"}.get(tag)
        self.found += [value for key, value in attributes if key == wanted and value]


def test_the_site_asks_nothing_of_the_outside(site):
    for page, text in html_of(site).items():
        reader = _Requests()
        reader.feed(text)
        assert reader.found, page
        assert [address for address in reader.found if re.match(r"(https?:)?//", address)] == [], page


def test_every_public_name_is_in_the_reference(site):
    text = "".join(path.read_text(encoding="utf-8") for path in (site / "api").glob("*.html"))
    for public in igeood.__all__:
        assert f'id="igeood.{public}"' in text, public


def test_formulas_of_pages_and_docstrings_are_mathml(site):
    pages = html_of(site)
    assert pages["method.html"].count('class="formula"') >= 13
    assert "<math" in pages["geometry.html"]
    for page, text in pages.items():
        assert ":math:" not in text, page
        assert ".. math::" not in text, page
        for formula in re.findall(r"<math.*?</math>", text, re.S):
            ElementTree.fromstring(formula)  # noqa: S314 (our own pages)


def test_formulas():
    mathml = runpy.run_path(str(ROOT / "docs" / "hooks" / "formulas.py"))["mathml"]
    assert mathml(r"\frac1{N_y}") == (
        '<math display="inline"><mrow><mfrac><mn>1</mn><mrow><msub><mi>N</mi><mi>y</mi></msub></mrow></mfrac>'
        "</mrow></math>"
    )
    assert "<munder>" in mathml(r"\min_y d")
    assert "<msubsup>" in mathml(r"\sigma_j^2")
    for broken in (r"\nosuch", r"\frac{1}", r"\mathrm{FR"):
        with pytest.raises(ValueError, match=r"formula|command|early"):
            mathml(broken)


def test_formulas_in_a_line_are_not_shell_variables_or_code():
    convert = runpy.run_path(str(ROOT / "docs" / "hooks" / "formulas.py"))["on_page_markdown"]
    for text in ("$A and $B are set", "`$x$`", "```sh\necho $x$\n```", "costs 5$ or 6$"):
        assert convert(text) == text
    assert convert("so $x$.").startswith("so <math")
