"""The page in a real browser: it asks nothing of others, fits a phone, sorts by mouse and keyboard, prints whole."""

import itertools
import os
import shutil
from datetime import date

import pytest
from playwright.sync_api import sync_playwright

from igeood.bench.report import make

CHROMIUM = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
CONTRAST = """element => {
  const light = text => {
    const channel = v => (v /= 255) <= 0.03928 ? v / 12.92 : ((v + 0.055) / 1.055) ** 2.4;
    const [r, g, b] = text.match(/[\\d.]+/g).map(Number).map(channel);
    return 0.2126 * r + 0.7152 * g + 0.0722 * b;
  };
  let behind = element;
  while (/^rgba\\(.*, 0\\)$/.test(getComputedStyle(behind).backgroundColor)) behind = behind.parentElement;
  const front = getComputedStyle(element)[element.ownerSVGElement ? "fill" : "color"];
  const pair = [front, getComputedStyle(behind).backgroundColor].map(light).sort((a, b) => a - b);
  return (pair[1] + 0.05) / (pair[0] + 0.05);
}"""
TABLE = "[data-metric=tnr] table"
TEXTS = "p, h1, dt, dd, td, th button, nav a, figcaption, li, .muted, .reason, summary h3, svg text"


@pytest.fixture(scope="module")
def browser():
    if CHROMIUM is None and os.environ.get("IGEOOD_BROWSER") != "required":
        pytest.skip("Chromium is missing: the page is not seen in a browser")
    assert CHROMIUM is not None, "Chromium is missing, and IGEOOD_BROWSER=required"
    with sync_playwright() as play:
        found = play.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox", "--disable-gpu"])
        yield found
        found.close()


@pytest.fixture
def visit(browser, full, verdicts, tmp_path):
    """Opens the page; whatever goes wrong there, or is asked of others, fails the test."""
    path = tmp_path / "report.html"
    path.write_text(make(full, made_on=date(2026, 1, 2), verdicts=[verdicts]).html, encoding="utf-8")
    troubles, pages = [], []

    def opened(width=1280, *, unfold=False, **options):
        page = browser.new_page(viewport={"width": width, "height": 900}, **options)
        pages.append(page)
        page.on("console", lambda message: troubles.append(message.text))
        page.on("pageerror", lambda error: troubles.append(str(error)))

        def route(asked):
            if asked.request.url.partition(":")[0] in ("file", "data", "blob"):
                asked.continue_()
            else:
                troubles.append(f"asked for {asked.request.url}")
                asked.abort()

        page.route("**/*", route)
        page.goto(path.as_uri())
        if unfold:
            page.locator("details").evaluate_all("all => all.forEach(e => { e.open = true; })")
        return page

    yield opened
    for page in pages:
        page.close()
    assert troubles == []


def averages(page, group=0):
    rows = page.locator(f"{TABLE} tbody").nth(group).locator("tr:not(.group)")
    return [float(row.locator("td").last.inner_text()) for row in rows.all()]


@pytest.mark.parametrize("width", [390, 1280])
def test_the_page_fits_and_every_figure_is_seen(visit, width):
    page = visit(width)
    assert page.evaluate("document.documentElement.scrollWidth") <= width
    page.locator("details").evaluate_all("all => all.forEach(e => { e.open = true; })")
    assert page.evaluate("document.documentElement.scrollWidth") <= width
    boxes = page.locator("figure svg, li img").evaluate_all("all => all.map(e => e.getBoundingClientRect().toJSON())")
    assert boxes
    assert all(box["width"] > 20 and box["height"] > 20 for box in boxes)
    assert all(box["left"] >= 0 and box["right"] <= width for box in boxes)


def test_sorting_by_mouse_and_by_keyboard_one_metric_at_a_time_and_all_without_a_script(visit):
    page = visit()
    head = page.locator(f"{TABLE} thead th").last
    start = averages(page)
    head.locator("button").click()
    assert head.get_attribute("aria-sort") == "descending"
    assert averages(page) == sorted(start, reverse=True)
    head.locator("button").focus()
    page.keyboard.press("Enter")
    assert head.get_attribute("aria-sort") == "ascending"
    assert averages(page) == sorted(start)
    assert averages(page, 2) == sorted(averages(page, 2))
    shown = "all => all.filter(e => e.offsetHeight).map(e => e.dataset.metric)"
    assert page.locator("[data-metric]").evaluate_all(shown) == ["tnr"]
    page.get_by_label("AUROC", exact=True).check()
    assert page.locator("[data-metric]").evaluate_all(shown) == ["auroc"]
    plain = visit(java_script_enabled=False)
    assert plain.locator("table:visible").count() == 1 + 3


def test_the_keyboard_reaches_what_it_should_and_everything_has_a_name_for_those_who_do_not_see_it(visit):
    page = visit()
    reached = []
    for _ in range(20):
        page.keyboard.press("Tab")
        reached.append(page.evaluate("document.activeElement.className || document.activeElement.tagName"))
    assert reached[0] == "skip"
    assert reached.index("scroll") < reached.index("BUTTON") < reached.index("SUMMARY")
    nameless = page.locator("img, svg[role=img], button, input, [role=region], nav").evaluate_all(
        """all => all.filter(e => !(e.getAttribute("alt") || e.getAttribute("aria-label") || e.textContent.trim()
             || (e.labels && e.labels.length))).map(e => e.outerHTML.slice(0, 80))"""
    )
    assert nameless == []
    levels = page.locator("h1, h2, h3, h4").evaluate_all("all => all.map(e => Number(e.tagName[1]))")
    assert levels[0] == 1
    assert all(after - before <= 1 for before, after in itertools.pairwise(levels))


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_text_stands_out(visit, scheme):
    page = visit(color_scheme=scheme, unfold=True)
    bright = page.evaluate("getComputedStyle(document.body).backgroundColor") == "rgb(255, 255, 255)"
    assert bright == (scheme == "light")
    contrasts = page.locator(TEXTS).evaluate_all(f"all => all.map({CONTRAST})")
    assert min(contrasts) >= 4.5
