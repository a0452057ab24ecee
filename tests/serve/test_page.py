"""The service's page in a real browser, on canned answers."""

import copy
import itertools
import json
import math
import os
import random
import shutil
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest
from playwright.sync_api import sync_playwright

import igeood
from igeood.serve import service as serve
from igeood.serve.app import _page

CHROMIUM = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
FLAGS = "--no-sandbox --disable-gpu --disable-quic --no-first-run --disable-background-networking --disable-sync"
PAGE = Path(igeood.__file__).parent / "serve" / "page.html"
EXAMPLES = Path(__file__).parents[2] / "examples" / "service"
NOW = 1_772_539_509  # 3 March 2026, 12:05:09 UTC
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


BASE = {}  # the status of a service


@pytest.fixture(scope="module", autouse=True)
def base(guards, tmp_path_factory):
    path = tmp_path_factory.mktemp("page") / "guard"
    path.write_bytes(guards.named.path.read_bytes())
    service = serve.Service(path, options=serve.Options(name="pets"))
    BASE.update(service.record())
    service.close()


def bell(x, mean, std):
    return math.exp(-(((x - mean) / std) ** 2) / 2)


def quiet():
    """The status of a service with steady traffic and nothing wrong."""
    draw = random.Random(0)
    inputs = [draw.randint(6, 14) for _ in range(360)]
    ood = [sum(draw.random() < 0.05 for _ in range(n)) for n in inputs]
    evidence = [math.exp(5 + 2.5 * math.sin(i / 23) + draw.random()) for i in range(360)]
    edges = [-4 + 0.2 * i for i in range(41)]
    shape = [bell((low + 0.1), -1, 0.9) + 0.05 * bell(low + 0.1, 1.6, 0.6) for low in edges[:-1]]
    calibration = [value / sum(shape) for value in shape]
    drawn = draw.choices(range(40), calibration, k=sum(inputs))
    status = copy.deepcopy(BASE)
    status |= {"now": NOW, "started": NOW - 90_000, "queue": {"waiting": 3, "limit": 256}}
    about = {"threshold": 0.7312, "access": "white box", "classes": ["cat", "dog", "ship", "truck"], "health": []}
    status["guard"] |= {**about, "loaded": NOW - 90_000}
    status["hour"] |= {"start": NOW // 10 * 10 - 3590, "inputs": inputs, "ood": ood, "evidence": evidence}
    status["scores"] = {"edges": edges, "calibration": calibration, "hour": [drawn.count(i) for i in range(40)]}
    status["monitor"] |= {"evidence": 123.4, "inputs": 81_234}
    return status


def empty():
    """Just started."""
    status = quiet()
    status["started"] = status["guard"]["loaded"] = NOW - 4
    status["queue"]["waiting"] = 0
    status["hour"] |= {name: [0] * 360 for name in ("inputs", "ood", "unread")} | {"evidence": [None] * 360}
    status["scores"]["hour"] = [0] * 40
    status["monitor"] |= {"evidence": 0.0, "inputs": 0}
    status["flagged"] = {"folder": "flagged", "kept": 0, "limit": 100, "latest": []}
    return status


def alarm():
    """A change 15 minutes ago, found 10 minutes ago, and again after."""
    status, draw = quiet(), random.Random(1)
    hour, monitor = status["hour"], status["monitor"]
    for i in range(270, 360):
        hour["ood"][i] = sum(draw.random() < 0.4 for _ in range(hour["inputs"][i]))
        hour["evidence"][i] = 10 ** (1 + 5.02 * ((i - 270) % 30) / 29)
    bins = random.Random(2).choices(range(25, 40), k=400)
    status["scores"]["hour"] = [n * 8 // 9 + bins.count(i) for i, n in enumerate(status["scores"]["hour"])]
    starts = [monitor["inputs"] - sum(hour["inputs"][i:]) for i in (270, 300, 330)]
    monitor["alarms"] = [
        {"at": at, "since": at - 300, "evidence": 1.04e6, "time": NOW - 600 + 300 * k}
        for k, at in enumerate([starts[1], starts[2], monitor["inputs"] - 1])
    ]
    monitor["alarms"][0]["since"] = starts[0] + 1
    monitor |= {"evidence": 4.2, "alarm": True, "since": starts[0] + 1, "alarm_count": 5}
    kept = {"p_value": 0.000999, "label": 3, "name": "truck", "reason": None, "explanation": "score 3.12, usual 1"}
    first = kept | {"file": "1.safetensors", "time": NOW - 11, "score": 3.1217}
    second = kept | {"file": "2.safetensors", "time": NOW - 129, "score": None, "label": -1, "name": None}
    third = kept | {"file": "3.safetensors", "time": NOW - 249, "score": 0.912, "name": None}
    status["flagged"] = {"folder": "/var/lib/igeood/flagged", "kept": 3, "limit": 100, "latest": [first, second, third]}
    return status


def reload_error():
    """A broken guard file, a nearly full queue, unreadable inputs, a guard with findings and 200 classes."""
    status = quiet()
    error = "path: guard.safetensors is damaged (SHA-256 differs); save it again"
    status["guard"] |= {"reloads": 2, "reload_failures": 1, "reload_error": error, "n_classes": 200}
    status["guard"]["classes"] = [f"class number {i}" for i in range(200)]
    message, cure = "calibration scores are higher than training scores, KS distance 0.21", "look for another source"
    finding = {"code": "calibration-shift", "level": "warning", "message": message, "cure": cure}
    swapped = {"code": "swapped", "level": "info", "message": "ood: AUROC 0.31: swapped?", "cure": "give OOD second"}
    status["guard"]["health"] = [finding, swapped]
    status["queue"]["waiting"] = 250
    status["hour"]["unread"][100] = 120
    status["hour"]["inputs"][100] = 130
    status["monitor"]["unread"] = 120
    return status


HOSTILE = "<img src=x onerror=\"document.title='owned'\"><script>document.title='owned'</script>"


def hostile():
    """Text that would be markup, wherever text comes from outside; long words without a space."""
    status = alarm()
    status["name"] = HOSTILE
    status["guard"] |= {"classes": [HOSTILE, "y" * 300], "n_classes": 2, "reload_error": HOSTILE + "x" * 300}
    finding = {"code": HOSTILE, "level": "warning", "message": HOSTILE, "cure": HOSTILE}
    status["guard"] |= {"title": HOSTILE, "promise": HOSTILE, "health": [finding]}
    status["flagged"]["folder"] = HOSTILE
    for kept in status["flagged"]["latest"]:
        kept |= {"name": HOSTILE, "explanation": "sample 0: " + HOSTILE, "file": "z" * 300}
    return status


POLICY = _page().headers["content-security-policy"]
STATES = {"quiet": quiet, "empty": empty, "alarm": alarm, "reload": reload_error, "hostile": hostile}


@pytest.fixture(scope="module")
def browser():
    if CHROMIUM is None and os.environ.get("IGEOOD_BROWSER") != "required":
        pytest.skip("Chromium is missing: the page is not seen in a browser")
    assert CHROMIUM is not None, "Chromium is missing, and IGEOOD_BROWSER=required"
    with sync_playwright() as play:
        chromium = play.chromium.launch(executable_path=CHROMIUM, args=FLAGS.split())
        yield chromium
        chromium.close()


class Service(ThreadingHTTPServer):
    """Serves the page at /pets/ and `answer`, a status code and an object, at /pets/status; None hangs up."""

    daemon_threads = True
    answer = None


class Handler(BaseHTTPRequestHandler):
    def do_GET(self):
        code, body, kind = 404, b"", "text/plain"
        if self.path == "/pets/":
            code, body, kind = 200, PAGE.read_bytes(), "text/html; charset=utf-8"
        elif self.path == "/pets/status":
            if self.server.answer is None:
                return
            code, answer = self.server.answer
            body, kind = json.dumps(answer).encode(), "application/json"
        self.send_response(code)
        self.send_header("Content-Type", kind)
        self.send_header("Content-Length", str(len(body)))
        self.send_header("Content-Security-Policy", POLICY)
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *arguments):
        pass


@pytest.fixture
def service():
    with Service(("127.0.0.1", 0), Handler) as server:
        thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.05})
        thread.start()
        yield server
        server.shutdown()
        thread.join()


@pytest.fixture
def visit(browser, service):
    """Opens the page on a status; whatever goes wrong there, or is asked of others, fails the test."""
    troubles, pages = [], []
    home = f"http://127.0.0.1:{service.server_port}/pets/"

    def opened(status, width=1280, **options):
        service.answer = None if status is None else (200, status)
        page = browser.new_page(viewport={"width": width, "height": 900}, timezone_id="UTC", **options)
        pages.append(page)
        page.on("console", lambda message: troubles.append(message.text))
        page.on("pageerror", lambda error: troubles.append(str(error)))

        def route(asked):
            if asked.request.url in (home, home + "status") or asked.request.url.startswith("data:"):
                asked.continue_()
            else:
                troubles.append(f"asked for {asked.request.url}")
                asked.abort()

        page.route("**/*", route)
        page.clock.install(time=NOW)
        page.goto(home)
        return settled(page)

    opened.troubles = troubles
    yield opened
    for page in pages:
        page.close()
    assert troubles == []


def settled(page):
    """Once the page has its answer."""
    for _ in range(500):
        if not page.evaluate("isAsking"):
            return page
        page.wait_for_timeout(20)
    raise TimeoutError


def later(page):
    """Five seconds on: the page asks again."""
    page.clock.run_for(5_000)
    settled(page)


def state(page):
    return page.locator("#state").inner_text()


def words(page, where):
    return " ".join(page.locator(where).inner_text().split())


def label(page, chart):
    return page.locator(f"#{chart} svg[role=img]").get_attribute("aria-label")


@pytest.mark.parametrize("width", [390, 1280])
@pytest.mark.parametrize("name", STATES)
def test_it_fits_and_letters_are_legible(visit, name, width):
    page = visit(STATES[name](), width)
    assert page.evaluate("document.documentElement.scrollWidth") <= width
    boxes = page.locator("body *:visible").evaluate_all(
        "all => all.map(e => [e.outerHTML.slice(0, 80), e.getBoundingClientRect().toJSON()])"
    )
    assert [name for name, box in boxes if box["left"] < 0 or box["right"] > width] == []
    clipped = "e => e.scrollWidth > e.clientWidth + 1 && getComputedStyle(e).overflowX !== 'visible'"
    assert page.locator("main *:not(svg *)").evaluate_all(f"all => all.filter({clipped}).length") == 0
    charts = page.locator("figure svg[role=img]")
    assert charts.count() == 3
    assert all(chart.bounding_box()["height"] > 200 for chart in charts.all())
    sizes = "all => all.map(e => parseFloat(getComputedStyle(e).fontSize) * e.getScreenCTM().a)"
    assert min(charts.locator("text").evaluate_all(sizes)) >= 11.5


@pytest.mark.parametrize("width", [390, 1280])
def test_figures_are_shown(visit, width):
    page = visit(quiet(), width)
    assert all(text in words(page, "#tiles") for text in ("5.8%", "5%", "3,527", "203", "123.4", "1,000,000", "256"))
    assert all(text in label(page, "share") for text in ("12.3%", "3.7%", "5%"))
    assert all(text in label(page, "evidence") for text in ("123.4", "1,000,000"))
    assert "0.7312" in label(page, "scores")
    assert all(text in words(page, "#guard") for text in ("white box", "0.7312", "cat, dog, ship, truck"))
    assert page.locator("#flagged").is_hidden()


@pytest.mark.parametrize("width", [390, 1280])
def test_an_alarm_is_marked_with_its_time_or_input(visit, width):
    page = visit(alarm(), width)
    assert all(text in state(page) for text in ("11:50", "1,000,000", "80,644", "11:55:09"))
    assert page.locator("#state").evaluate(CONTRAST) >= 4.5
    assert (page.locator("#evidence circle").count(), page.locator(".changed").count()) == (3, 2)
    rows = [words(page, f"#flagged tbody tr:nth-child({n})") for n in (1, 2, 3)]
    assert [row[:8] for row in rows] == ["12:04:58", "12:03:00", "12:01:00"]
    status = alarm()
    status["monitor"]["alarms"] = [{"at": 5_200, "since": 5_000, "evidence": 1e6, "time": None}] * 6
    page = visit(status, width)
    assert "5,000" in state(page)
    assert page.locator(".changed").count() == 0


def test_no_input_yet(visit):
    page = visit(empty())
    assert "–" in words(page, "#tiles")
    assert (page.locator("#share .bar").count(), page.locator("#evidence circle").count()) == (0, 0)


@pytest.mark.parametrize("width", [390, 1280])
def test_a_guard_file_that_cannot_be_loaded(visit, width):
    status = reload_error()
    page = visit(status, width)
    first, *others = page.locator("#state h2").all_inner_texts()
    assert status["guard"]["reload_error"] in first
    assert len(others) == 2  # the queue, and inputs that could not be read
    page.locator("#state a").click()
    assert page.locator("#guard").bounding_box()["y"] < 900
    assert "KS distance 0.21" in words(page, "#guard")
    assert "class number 199" not in words(page, "#guard")
    page.locator("summary").press("Enter")
    later(page)
    assert "class number 199" in words(page, "#guard")  # still open


@pytest.mark.parametrize("width", [390, 1280])
def test_hostile_text_stays_text(visit, width):
    page = visit(hostile(), width)
    assert page.locator("h1").inner_text() == HOSTILE
    assert f"2: {HOSTILE}, yyy" in words(page, "#guard")
    assert page.locator("#flagged td").nth(3).inner_text() == HOSTILE
    assert page.locator("#flagged td").nth(4).inner_text().startswith(HOSTILE)
    assert HOSTILE in state(page)
    assert page.locator("img").count() == 0
    assert page.locator("script").count() == 1
    assert HOSTILE in page.title()


def test_bars_are_as_wide_as_the_traffic_asks(visit):
    status = empty()
    status["hour"]["inputs"] = [1 if i % 6 == 0 else 0 for i in range(360)]  # one a minute
    status["hour"]["ood"][6] = 1
    status["hour"]["evidence"][0] = 0.7
    status["monitor"]["inputs"], status["started"] = 60, NOW - 90_000
    page = visit(status)
    assert page.locator("#share .bar").count() == 6
    assert "1.7%" in state(page)


def test_a_lost_connection_is_told_and_found_again(visit, service):
    def is_stale():
        return "stale" in (page.locator("main").get_attribute("class") or "")

    page = visit(quiet())
    before = state(page)
    for answer in (None, (401, {}), (200, {"name": "not a status"})):
        service.answer = answer
        later(page)
        assert (is_stale(), state(page) != before) == (True, True)
    service.answer = (200, quiet())
    later(page)
    assert (is_stale(), state(page)) == (False, before)
    assert len(visit.troubles) >= 2
    assert all(text.startswith("Failed to load resource") for text in visit.troubles)
    assert visit(None).locator("main").is_hidden()
    visit.troubles.clear()


def test_the_state_is_announced_once_and_everything_has_a_name(visit):
    page = visit(alarm())
    page.evaluate("window.first = document.querySelector('#state h2')")
    later(page)
    assert page.evaluate("window.first === document.querySelector('#state h2')")
    assert page.locator("#state").get_attribute("role") == "status"
    levels = page.locator("h1, h2, h3").evaluate_all("all => all.map(e => Number(e.tagName[1]))")
    assert levels.count(1) == 1
    assert all(after - before <= 1 for before, after in itertools.pairwise(levels))
    table = page.locator("#flagged").get_by_role("table")
    assert table.get_by_role("columnheader").count() == 5
    assert table.get_by_role("cell").count() == 15


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_text_stands_out(visit, scheme):
    page = visit(alarm(), color_scheme=scheme)
    bright = page.evaluate("getComputedStyle(document.body).backgroundColor") == "rgb(255, 255, 255)"
    assert bright == (scheme == "light")
    for where in ("p", "h1", "h2", "dt", "dd", "td", "th", "li", "figcaption", "code", ".muted", "svg text"):
        contrasts = page.locator(where).evaluate_all(f"all => all.map({CONTRAST})")
        assert contrasts, where
        assert min(contrasts) >= 4.5, where
    warned = visit(reload_error(), color_scheme=scheme)
    assert min(warned.locator("strong, #state p, #state a").evaluate_all(f"all => all.map({CONTRAST})")) >= 4.5
