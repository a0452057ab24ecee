"""The page: figures that follow from the files, nothing asked of others, and the same bytes each time."""

import base64
import hashlib
import io
import re
from dataclasses import replace
from datetime import date
from html.parser import HTMLParser
from pathlib import Path

import numpy as np
import pytest
from click.testing import CliRunner
from PIL import Image

from igeood import black_box
from igeood.bench.guarded import Guarded
from igeood.bench.report import make
from igeood.bench.report.drawing import picture
from igeood.bench.report.evidence import Evidence
from igeood.bench.report.standings import standings
from igeood.bench.runs.averages import Averages
from igeood.cli import main

DAY = date(2026, 1, 2)
ADDRESSES = {"src", "href", "xlink:href", "srcset", "action", "data", "poster", "formaction", "background"}


class Page(HTMLParser):
    """A page's tags with their attributes, and its text."""

    def __init__(self, html):
        super().__init__()
        self.tags, self.words = [], []
        self.feed(html)
        self.text = " ".join(" ".join(self.words).split())

    def handle_starttag(self, tag, attrs):
        self.tags.append((tag, dict(attrs)))

    def handle_data(self, data):
        self.words.append(data)

    def all(self, tag):
        return [attrs for name, attrs in self.tags if name == tag]


@pytest.fixture(scope="module")
def html(full, verdicts):
    return make(full, made_on=DAY, verdicts=[verdicts]).html


def test_the_guards_figures_are_those_of_its_scores_under_one_threshold(full, html, guard):
    known, *foreign = Guarded.load(full.folder).sets
    refused = {one.title: (one.scores > guard.threshold).double().mean().item() for one in (known, *foreign)}
    text, headline = Page(html).text, make(full, made_on=DAY).guard
    for share in (1 - refused[known.title], *(refused[one.title] for one in foreign)):
        assert f"{share:.1%}" in headline
        assert f"{share:.1%}" in text
    assert guard.promise in text
    kept = sum(int((one.scores <= guard.threshold).sum()) for one in foreign)
    assert f"{kept} of 600" in text
    assert f"{600 - kept} of 600" in text
    assert re.findall(r"the threshold (−?[\d.]+) keeps", html) == [f"{guard.threshold:.4g}".replace("-", "−")] * 4
    for attrs in Page(html).all("img"):
        if attrs["alt"].startswith(("Digits", "Gauss")):
            score = float(re.search(r"score (\S+),", attrs["alt"])[1].replace("−", "-"))
            assert attrs["alt"].endswith("refused" if score > guard.threshold else "kept")


def test_a_guard_that_judged_nothing_another_guard_and_no_guard(full, guard, maker, classifier, tmp_path):
    results = maker.cell("black-box", "igeood-logits", "svhn").results
    assert make(results, made_on=DAY).guard is None
    guard.save(maker.folder / "guard.safetensors")
    page = make(results, made_on=DAY)
    assert page.guard is None
    assert guard.promise in Page(page.html).text
    other = black_box().fit(classifier.train, classifier.labels)
    other.save(tmp_path / "other.safetensors")
    assert make(full, made_on=DAY, guard=tmp_path / "other.safetensors").guard is None  # not calibrated
    other.calibrate(classifier.held_out).save(tmp_path / "other.safetensors")
    assert make(full, made_on=DAY, guard=tmp_path / "other.safetensors").guard is None  # it judged none of these
    (maker.folder / "guard.safetensors").unlink()
    Guarded.load(full.folder).save(maker.folder)
    assert make(results, made_on=DAY).guard is not None  # its file need not be there


def test_the_monitor_shows_where_the_inputs_changed(full, html, verdicts, tmp_path):
    since, at = (int(n) for n in re.findall(r"input (\d+) \(camera-\1\)", html)[:2])
    assert 550 < since < 700  # they change after 600
    assert since < at < 700
    rows = Path(verdicts).read_text().splitlines()
    (tmp_path / "short.csv").write_text("\n".join(rows[:300]))
    assert make(full, made_on=DAY, verdicts=[str(tmp_path / "short.csv")]).monitor.startswith("No alarm in 299")


def test_nothing_is_asked_of_others_links_lead_somewhere_and_figures_have_text(html):
    page = Page(html)
    fetched = [value for _, attrs in page.tags for name, value in attrs.items() if name in ADDRESSES]
    assert all(value.startswith(("#", "data:image/png;base64,")) for value in fetched)
    assert not re.search(r"url\((?!#)|@import|https?://(?!www\.w3\.org/)", html)
    policy = next(a["content"] for a in page.all("meta") if a.get("http-equiv") == "Content-Security-Policy")
    script = re.search(r"<script>(.*?)</script>", html, re.DOTALL)[1]
    digest = base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()
    assert "default-src 'none'" in policy
    assert f"script-src 'sha256-{digest}'" in policy
    names = [attrs["id"] for _, attrs in page.tags if "id" in attrs]
    assert len(names) == len(set(names))
    links = {v[1:] for _, attrs in page.tags for n, v in attrs.items() if n in ("href", "xlink:href") and v[0] == "#"}
    assert links | set(re.findall(r"url\(#([^)]+)\)", html)) <= set(names)
    assert all(attrs["role"] == "img" and re.search(r"\d", attrs["aria-label"]) for attrs in page.all("svg"))
    assert all(re.search(r"image \d+, score [\d−]", attrs["alt"]) for attrs in page.all("img"))


def test_names_are_text(full, maker, guard, tmp_path):
    evil = "folder:/x/<script>alert(1)</script>"
    quoted = 'folder:/x/"onload="alert(1)" $\\frac{'
    for ood in (evil, quoted):
        maker.cell("black-box", "igeood-logits", ood, validation=evil)
        maker.cell("white-box-validation", "igeood", ood, validation=evil)
    maker.results.note(["igeood", "bench", "--ood", evil])
    guard.save(maker.folder / "guard.safetensors")
    guarded = Guarded.load(full.folder)
    for one, name in zip(guarded.sets[1:], (evil, quoted), strict=False):
        pictures = [replace(shown, reason=evil) for shown in one.pictures]
        guarded.sets[guarded.sets.index(one)] = replace(one, name=name, title=name, pictures=pictures)
    guarded.save(maker.folder)
    rows = (f"{evil},{score!r}\n" for score in [*np.zeros(9).tolist(), *[1e9] * 99])
    (tmp_path / "verdicts.csv").write_text("".join(["id,score\n", *rows]))
    html = make(maker.results, made_on=DAY, verdicts=[str(tmp_path / "verdicts.csv")]).html
    page = Page(html)
    assert html.count("<script") == 1
    assert not any(name.startswith("on") for _, attrs in page.tags for name in attrs)
    assert page.text.count(evil) > 5
    assert quoted in page.text


def test_the_threshold_is_that_of_the_table_and_pictures_come_in_order_with_their_reason(full):
    """What lies above the drawn threshold is the TNR that was measured, in every cell."""
    ours = Averages(full)
    key = ours.classifiers()[0]
    evidence = Evidence(ours, key, standings(ours, key), 9)
    for row in evidence.standing.rows:
        for _, scores in evidence.scores(row):
            assert np.mean(scores.arrays["ood"] > scores.threshold) == pytest.approx(scores.cell["tnr"])
            assert np.mean(scores.arrays["id"] <= scores.threshold) >= 0.95
    scores = dict(evidence.scores(evidence.standing.shown))["svhn"]
    most, _ = evidence.pictures(3)["CIFAR-10 (in-distribution)"].values()
    assert [t["score"] for t in most] == [f"{v:.4g}" for v in np.sort(scores.arrays["id"])[::-1][:3]]
    assert {t["reason"] for t in most} == {"block2"}  # seven tenths of every score
    image = np.random.default_rng(0).integers(0, 256, (3, 32, 32), dtype=np.uint8)
    content = base64.b64decode(picture(image).partition(",")[2])
    assert np.array_equal(np.asarray(Image.open(io.BytesIO(content))), image.transpose(1, 2, 0))


def test_what_the_user_must_fix(full, maker):
    (maker.folder / "results.jsonl").touch()
    for words in ([maker.folder / "none"], [maker.folder], [full.folder, "--verdicts", maker.folder / "none.csv"]):
        assert CliRunner().invoke(main, ["report", *map(str, words)]).exit_code == 2
    assert not list(maker.folder.rglob("*.html"))
