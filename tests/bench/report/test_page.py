"""The page: what it holds, what it never holds, and that the same folder gives the same bytes."""

import base64
import hashlib
import io
import re
import shlex
from datetime import date
from html.parser import HTMLParser

import numpy as np
import pytest
from PIL import Image

from igeood import black_box
from igeood.bench.figures.curves import contributions
from igeood.bench.report import make
from igeood.bench.report.drawing import Artist, picture
from igeood.bench.report.evidence import Evidence
from igeood.bench.report.standings import standings
from igeood.bench.runs import Results
from igeood.bench.runs.averages import Averages
from igeood.errors import GuardFileError, InputError

DAY = date(2026, 1, 2)
ADDRESSES = {"src", "href", "xlink:href", "srcset", "action", "data", "poster", "formaction", "background"}


class Page(HTMLParser):
    """A page's tags, and the text of each kind of tag."""

    def __init__(self, html):
        super().__init__()
        self.tags, self.open, self.texts = [], [], {}
        self.feed(html)

    def handle_starttag(self, tag, attrs):
        self.tags.append((tag, dict(attrs)))
        self.open.append(tag)
        self.texts.setdefault(tag, []).append("")

    def handle_endtag(self, tag):
        if tag in self.open:
            del self.open[len(self.open) - 1 - self.open[::-1].index(tag) :]

    def handle_data(self, data):
        for tag in set(self.open):
            self.texts[tag][-1] += data

    def all(self, tag):
        return [attrs for name, attrs in self.tags if name == tag]

    @property
    def text(self):
        return " ".join(self.texts["main"][0].split())


def page(results, **options):
    return Page(make(results, made_on=DAY, **options).html)


@pytest.fixture(scope="module")
def html(full):
    return make(full, made_on=DAY).html


def test_everything_is_there(html):
    found = Page(html)
    assert found.texts["h2"] == [
        "What was run", "Verdict", "Table", "Scores", "ROC and precision–recall", "Temperature and step",
        "What the score is made of", "Pictures", "What the threshold promises", "How to redo it",
    ]  # fmt: skip
    assert "91.3% right on 200 test images" in found.text
    assert "SVHN (200 images), Chars74K (EnglishImg) (200 images)" in found.text
    assert "2026-01-02" in html
    assert len(found.all("svg")) == 2 + 2 * 2 + 2 + 2  # histograms, ROC and PR, temperature and step, layers
    assert len(found.all("img")) == 2 * 8 * 3


def test_the_same_folder_gives_the_same_bytes(full, html):
    assert make(Results.existing(full.folder), made_on=DAY).html == html
    assert make(full, made_on=date(2027, 1, 1)).html != html


def test_nothing_is_asked_of_others(html):
    found = Page(html)
    fetched = [value for _, attrs in found.tags for name, value in attrs.items() if name in ADDRESSES]
    assert fetched
    assert all(value.startswith(("#", "data:image/png;base64,")) for value in fetched)
    assert not re.search(r"url\((?!#)|@import|https?://(?!www\.w3\.org/)", html)


def test_the_policy_allows_the_script_that_is_there_and_no_other(html):
    policy = next(a["content"] for a in Page(html).all("meta") if a.get("http-equiv") == "Content-Security-Policy")
    script = re.search(r"<script>(.*?)</script>", html, re.DOTALL)[1]
    digest = base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()
    assert "default-src 'none'" in policy
    assert f"script-src 'sha256-{digest}'" in policy
    assert html.count("<script") == 1


def test_identifiers_are_unique_and_links_lead_somewhere(html):
    tags = Page(html).tags
    names = [attrs["id"] for _, attrs in tags if "id" in attrs]
    assert len(names) == len(set(names))
    links = {v[1:] for _, attrs in tags for n, v in attrs.items() if n in ("href", "xlink:href") and v[0] == "#"}
    links |= set(re.findall(r"url\(#([^)]+)\)", html))
    assert links <= set(names)


def test_every_figure_and_picture_says_what_it_shows(html):
    found = Page(html)
    labels = [attrs["aria-label"] for attrs in found.all("svg")]
    assert all(re.search(r"\d", label) for label in labels)
    assert all(attrs["role"] == "img" for attrs in found.all("svg"))
    assert all(re.search(r"score .*(refused|kept)", attrs["alt"]) for attrs in found.all("img"))


def test_names_are_text(maker):
    evil = "folder:/x/<script>alert(1)</script>"
    quoted = 'folder:/x/"onload="alert(1)" $\\frac{'
    for ood in (evil, quoted):
        maker.cell("black-box", "igeood-logits", ood, validation=evil)
        maker.cell("white-box-validation", "igeood", ood, validation=evil)
    maker.results.note(["igeood", "bench", "--ood", evil])
    html = make(maker.results, made_on=DAY).html
    found = Page(html)
    assert html.count("<script") == 1
    assert "<script>alert" not in html
    assert not any(name.startswith("on") for _, attrs in found.tags for name in attrs)
    assert evil in " ".join(found.texts["code"])  # in the command, quoted for a shell


def test_the_best_of_a_group_is_bold(maker):
    for method, tnr in (("energy", 0.5), ("odin", 0.7), ("igeood-logits", 0.6)):
        maker.cell("black-box", method, "svhn", tnr=tnr)
    for method, tnr in (("odin", 0.9), ("igeood-logits", 0.9)):
        maker.cell("grey-box", method, "svhn", tnr=tnr)
    html = make(maker.results, made_on=DAY).html
    table = re.search(r"<table>\s*<caption>TNR at TPR-95%.*?</table>", html, re.DOTALL)[0]
    assert re.findall(r"<strong>(.*?)</strong>", table) == ["70.0", "70.0"]  # SVHN and the average; a tie has none
    cells = re.findall(r'data-value="([\d.]+)"', table)
    assert [round(float(value)) for value in cells] == [70, 70, 50, 50, 60, 60, 90, 90, 90, 90]


def test_the_threshold_is_that_of_the_table(full):
    """What lies above the drawn threshold is the TNR that was measured, in every cell."""
    ours = Averages(full)
    key = ours.classifiers()[0]
    standing = standings(ours, key)
    evidence = Evidence(ours, key, standing, Artist(), 9)
    for row in standing.rows:
        for _, scores in evidence.scores(row):
            assert np.mean(scores.arrays["ood"] > scores.threshold) == pytest.approx(scores.cell["tnr"])
            assert np.mean(scores.arrays["id"] <= scores.threshold) >= 0.95


def test_a_real_runs_report(whole):
    found = page(whole)
    assert "tuned on samples of each OOD set" in found.text
    assert len(found.all("svg")) >= 6
    assert found.all("img")


def test_several_networks_have_a_section_each(maker, another):
    maker.cell("black-box", "igeood-logits", "svhn", tnr=0.4)
    another(maker.folder, network="densenet-bc-100", weights="other").cell("black-box", "energy", "svhn", tnr=0.6)
    made = make(maker.results, made_on=DAY)
    assert list(made.verdicts) == ["resnet-10-16, CIFAR-10", "densenet-bc-100, CIFAR-10"]
    assert "40.0%" in made.verdicts["resnet-10-16, CIFAR-10"][0]
    assert "60.0%" in made.verdicts["densenet-bc-100, CIFAR-10"][0]
    assert Page(made.html).texts["h2"][:2] == list(made.verdicts)


def test_a_large_benchmark_is_below_2_mb(maker, another):
    """Six networks on nine OOD sets, as in the paper, with noise for pictures."""
    sets = ("isun", "svhn", "textures", "lsun", "chars74k", "tiny-imagenet", "places365", "cifar-100", "gaussian")
    methods = [("black-box", m) for m in ("msp", "odin", "energy", "igeood-logits")] + [("white-box", "igeood+")]
    for i in range(6):
        made = maker if i == 0 else another(maker.folder, weights=f"weights-{i}")
        for setting, method in methods:
            for ood in sets:
                made.cell(setting, method, ood, validation="folder:/mine")
    html = make(maker.results, made_on=DAY).html
    assert len(html.encode()) < 2e6
    assert "Of the 3 hardest OOD sets." in html


def test_without_a_guard_nothing_is_promised(maker):
    found = page(maker.cell("black-box", "igeood-logits", "svhn").results).text
    assert "promises nothing for new data" in found
    assert "igeood calibrate" in found


def test_a_guards_promise_is_its_own(full):
    guard = full.folder / "guard.safetensors"
    found = page(full).text
    assert "at least 95% of in-distribution inputs are kept, on average over calibration sets of 150" in found
    assert "a network that is not in this report" in found
    assert page(full, guard=guard).text == found


def test_a_guard_without_calibration_says_so(maker, classifier, tmp_path):
    path = tmp_path / "other.safetensors"
    black_box().fit(classifier.train, classifier.labels).save(path)
    found = page(maker.cell("black-box", "igeood-logits", "svhn").results, guard=path).text
    assert "is not calibrated" in found
    with pytest.raises(GuardFileError, match="no guard file"):
        make(maker.results, made_on=DAY, guard=tmp_path / "none.safetensors")


def test_the_commands_are_those_that_were_noted(maker):
    results = maker.cell("black-box", "igeood-logits", "svhn").results
    assert "made from Python" in page(results).text
    given = [
        ["igeood", "bench", "--ood", "folder:/a b/c", "--out", "x"],
        ["igeood", "bench", *["--method", "msp"] * 20],
    ]
    for line in [*given, given[0]]:  # one given twice is noted once
        results.note(line)
    found = page(Results(results.folder))
    assert "made from Python" not in found.text
    code = found.texts["code"][-1]
    assert [shlex.split(line) for line in code.splitlines()] == [*given, ["igeood", "report", str(results.folder)]]


def test_pictures_are_the_images(full):
    image = np.random.default_rng(0).integers(0, 256, (3, 32, 32), dtype=np.uint8)
    content = base64.b64decode(picture(image).partition(",")[2])
    assert np.array_equal(np.asarray(Image.open(io.BytesIO(content))), image.transpose(1, 2, 0))


def test_pictures_come_in_order_with_their_reason(full):
    ours = Averages(full)
    key = ours.classifiers()[0]
    standing = standings(ours, key)
    inside, *_ = Evidence(ours, key, standing, Artist(), 9).pictures(3)
    scores = dict(Evidence(ours, key, standing, Artist(), 9).scores(standing.shown))["svhn"]
    most, least = inside.sides.values()
    assert inside.name == "CIFAR-10 (in-distribution)"
    assert [t.score for t in most] == [f"{v:.3g}" for v in np.sort(scores.arrays["id"])[::-1][:3]]
    assert {t.verdict for t in most} == {"refused"}
    assert {t.verdict for t in least} == {"kept"}
    assert {t.reason for t in most} == {"block2"}  # seven tenths of every score


def test_numbers_in_a_drawing_are_those_of_the_figure():
    drawn = Artist().draw(contributions(["a 0.12345", "b & c"], [1, 2], [3, 4]), "x < 0.12345", "").svg
    assert "a 0.12345" in drawn
    assert "b &amp; c" in drawn
    assert 'aria-label="x &lt; 0.12345"' in drawn


def test_empty_results_are_an_error(maker):
    path = maker.folder / "results.jsonl"
    path.touch()
    with pytest.raises(InputError, match="nothing was measured"):
        make(maker.results, made_on=DAY)
