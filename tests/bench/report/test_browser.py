"""The page in a real browser: it asks nothing of others, fits a phone, sorts by mouse and keyboard."""

import os
import shutil
from datetime import date

import pytest
from playwright.sync_api import sync_playwright

from igeood.bench.report import make

CHROMIUM = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
NAMELESS = """all => all.filter(e => !(e.getAttribute("alt") || e.getAttribute("aria-label") || e.textContent.trim()
  || (e.labels && e.labels.length))).map(e => e.outerHTML.slice(0, 80))"""
TABLE = "[data-metric=tnr] table"


@pytest.fixture
def visit(full, verdicts, tmp_path):
    """Opens the page with all unfolded; whatever goes wrong there, or is asked of others, fails the test."""
    if CHROMIUM is None and os.environ.get("IGEOOD_BROWSER") != "required":
        pytest.skip("Chromium is missing: the page is not seen in a browser")
    assert CHROMIUM is not None, "Chromium is missing, and IGEOOD_BROWSER=required"
    path, troubles = tmp_path / "report.html", []
    path.write_text(make(full, made_on=date(2026, 1, 2), verdicts=[verdicts]).html, encoding="utf-8")
    with sync_playwright() as play:
        browser = play.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox", "--disable-gpu"])

        def opened(width):
            page = browser.new_page(viewport={"width": width, "height": 900})
            page.on("console", lambda message: troubles.append(message.text))
            page.on("pageerror", lambda error: troubles.append(str(error)))
            page.on("request", lambda asked: troubles.extend([asked.url] if asked.url.startswith("http") else []))
            page.goto(path.as_uri())
            page.locator("details").evaluate_all("all => all.forEach(e => { e.open = true; })")
            return page

        yield opened
        browser.close()
    assert troubles == []


def test_the_page_fits_has_names_for_those_who_do_not_see_it_and_sorts_by_mouse_and_by_keyboard(visit):
    for width in (390, 1280):
        page = visit(width)
        assert page.evaluate("document.documentElement.scrollWidth") <= width
        assert page.locator("img, svg[role=img], button, input, [role=region], nav").evaluate_all(NAMELESS) == []

    def averages():
        rows = page.locator(f"{TABLE} tbody").first.locator("tr:not(.group)")
        return [float(row.locator("td").last.inner_text()) for row in rows.all()]

    button = page.locator(f"{TABLE} thead th").last.locator("button")
    start = averages()
    button.click()
    assert averages() == sorted(start, reverse=True)
    button.focus()
    page.keyboard.press("Enter")
    assert averages() == sorted(start)
    page.get_by_label("AUROC", exact=True).check()
    shown = "all => all.filter(e => e.offsetHeight).map(e => e.dataset.metric)"
    assert page.locator("[data-metric]").evaluate_all(shown) == ["auroc"]
