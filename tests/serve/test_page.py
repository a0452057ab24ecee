"""The service's page in a real browser, on canned answers."""

import copy
import json
import math
import random

import numpy as np
import pytest

from igeood.images import picture
from igeood.serve import Options
from igeood.serve import service as serve
from igeood.serve.app import _page

HOME = "http://127.0.0.1:9/pets/"
NOW = 1_772_539_509  # 3 March 2026, 12:05:09 UTC
HOSTILE = "<img src=x onerror=\"document.title='owned'\"><script>document.title='owned'</script>"


@pytest.fixture(scope="module")
def base(guards, tmp_path_factory):
    """The status of a service that has just started."""
    path = tmp_path_factory.mktemp("page") / "guard"
    path.write_bytes(guards.named.path.read_bytes())
    service = serve.Service(path, options=Options(name="pets"))
    service.close()
    return json.loads(json.dumps(service.record()))


def quiet(base):
    """Steady traffic, and nothing wrong."""
    status, draw = copy.deepcopy(base), random.Random(0)
    inputs = [draw.randint(6, 14) for _ in range(360)]
    ood = [sum(draw.random() < 0.05 for _ in range(n)) for n in inputs]
    evidence = [math.exp(5 + 2.5 * math.sin(i / 23) + draw.random()) for i in range(360)]
    status |= {"now": NOW, "started": NOW - 90_000, "queue": {"waiting": 3, "limit": 256}}
    status["guard"] |= {"threshold": 0.7312, "loaded": NOW - 90_000, "health": []}
    status["hour"] |= {"start": NOW // 10 * 10 - 3590, "inputs": inputs, "ood": ood, "evidence": evidence}
    status["scores"]["latest"] = [draw.randint(0, 99) for _ in range(40)]
    status["monitor"] |= {"evidence": 123.4, "inputs": 81_234}
    return status


def alarm(base):
    """A change 15 minutes ago, found 10 minutes ago; a broken guard file, a nearly full queue, kept inputs."""
    status = quiet(base)
    hour, monitor = status["hour"], status["monitor"]
    starts = [monitor["inputs"] - sum(hour["inputs"][i:]) for i in (270, 300)]
    hour["ood"][270:] = [n // 2 for n in hour["inputs"][270:]]
    monitor["alarms"] = [{"at": starts[1] + 1, "since": starts[0] + 1, "evidence": 1.04e6}]
    monitor |= {"evidence": 4.2, "alarm": True, "since": starts[0] + 1, "alarm_count": 5}
    finding = {"code": "swapped", "level": "warning", "message": "AUROC 0.31", "cure": "give OOD second"}
    status["guard"] |= {"reload_error": "SHA-256 differs", "health": [finding]}
    status["queue"]["waiting"] = 250
    kept = {"p_value": 0.000999, "label": 3, "name": None, "score": 3.1217, "explanation": "score 3.12, usual 1"}
    kept |= {"reason": "layer3: 1 in 900", "picture": picture(np.zeros((3, 20, 96), np.uint8))}
    latest = [{**kept, "file": f"{n}.safetensors", "time": NOW - 11 - 60 * n} for n in range(3)]
    status["flagged"] = {"folder": "/var/lib/igeood/flagged", "kept": 3, "limit": 100, "latest": latest}
    return status


def hostile(base):
    """Text that would be markup, wherever text comes from outside; long words without a space."""
    status = alarm(base)
    finding = {"code": HOSTILE, "level": "warning", "message": HOSTILE, "cure": HOSTILE}
    status["name"] = status["flagged"]["folder"] = HOSTILE
    status["guard"] |= {"classes": [HOSTILE, "y" * 300], "n_classes": 2, "reload_error": HOSTILE + "x" * 300}
    status["guard"] |= {"title": HOSTILE, "promise": HOSTILE, "health": [finding]}
    for kept in status["flagged"]["latest"]:
        kept |= {"name": HOSTILE, "explanation": HOSTILE, "reason": HOSTILE, "picture": None, "file": "z" * 300}
    return status


@pytest.fixture
def visit(open_page):
    """Opens the page on an answer."""
    document = _page()

    def opened(status, width=1280):
        def prepare(page):
            def route(asked):
                if asked.request.url == HOME:
                    asked.fulfill(body=document.body, headers=dict(document.headers))
                elif asked.request.url == HOME + "monitor/acknowledge":
                    asked.fulfill(status=page.acknowledging)
                elif asked.request.url != HOME + "status" or page.answer is None:
                    asked.abort()  # of which the browser complains
                else:
                    status, content = page.answer
                    asked.fulfill(status=status, body=json.dumps(content), content_type="application/json")

            page.answer = (200, status)
            page.route("http*://**/*", route)
            page.clock.install(time=NOW)

        return settled(open_page(HOME, width, prepare=prepare, timezone_id="UTC"))

    return opened


def settled(page):
    """The page, once it has its answer; its policy allows no polling within it."""
    for _ in range(500):
        if not page.evaluate("asked !== null"):
            return page
        page.wait_for_timeout(20)
    raise TimeoutError


def words(page, where):
    return " ".join(page.locator(where).inner_text().split())


@pytest.mark.parametrize("width", [390, 1280])
@pytest.mark.parametrize("state", [dict, quiet, alarm, hostile])
def test_it_fits_and_letters_are_legible(visit, base, state, width):
    page = visit(base if state is dict else state(base), width)
    assert page.evaluate("document.documentElement.scrollWidth") <= width
    boxes = page.locator("body *:visible").evaluate_all("all => all.map(e => e.getBoundingClientRect().toJSON())")
    assert [box for box in boxes if box["left"] < 0 or box["right"] > width] == []
    charts = page.locator("figure svg[role=img]")
    assert charts.count() == 3
    sizes = "all => all.map(e => parseFloat(getComputedStyle(e).fontSize) * e.getScreenCTM().a)"
    assert min(charts.locator("text").evaluate_all(sizes)) >= 11.5


def test_an_alarm_and_other_troubles_are_marked_with_their_time(visit, base):
    page = visit(alarm(base))
    assert all(text in words(page, "#state") for text in ("11:50", "11:55", "1,000,000", "SHA-256 differs"))
    assert page.locator("#state h2").count() == 4  # the alarm, the file, the queue, and too many refused
    assert (page.locator("#evidence circle").count(), page.locator(".changed").count()) == (1, 2)
    assert [words(page, f"#flagged tbody tr:nth-child({n})")[:8] for n in (1, 2)] == ["12:04:58", "12:03:58"]
    assert all(text in words(page, "#guard") for text in ("AUROC 0.31", "0.7312", "ant, bee, cat, dog"))
    assert all(text in words(page, "#tiles") for text in ("3,527", "4.2", "250"))


def test_hostile_text_stays_text(visit, base):
    page = visit(hostile(base))
    assert page.locator("h1").inner_text() == page.locator("#flagged td").nth(3).inner_text() == HOSTILE
    assert (page.locator("img").count(), page.locator("script").count()) == (0, 1)
    assert HOSTILE in page.title()


def test_a_lost_connection_is_shown_and_found_again(visit, open_page, base):
    page = visit(quiet(base))
    before = words(page, "#state")
    for answer in (None, (401, {}), (200, {"name": "not a status"}), (200, quiet(base))):
        page.answer = answer
        page.clock.run_for(5_000)
        settled(page)
        is_lost = answer is None or "now" not in answer[1]
        assert ("stale" in (page.locator("main").get_attribute("class") or "")) == is_lost
        assert (words(page, "#state") != before) == is_lost
    assert all(text.startswith("Failed to load resource") for text in open_page.troubles)
    open_page.troubles.clear()


@pytest.mark.parametrize("status", [401, 503])
def test_a_refused_acknowledgement_is_said_and_the_button_stays_in_focus(visit, open_page, base, status):
    page = visit(alarm(base))
    button, said = page.locator("#acknowledge"), page.locator("#acknowledged")
    page.acknowledging = status
    button.press("Enter")
    said.filter(has_text=" ").wait_for()
    page.answer[1]["queue"]["waiting"] = 251  # the text beside the button changes
    page.clock.run_for(5_000)
    settled(page)
    assert page.evaluate("document.activeElement.id") == "acknowledge"
    before, page.acknowledging = said.inner_text(), 200
    page.answer[1]["monitor"] |= {"alarm": False, "alarms": [], "acknowledged": NOW - 3}
    button.press("Enter")
    button.wait_for(state="hidden")
    assert "12:05:06" in said.inner_text()
    assert before != said.inner_text()
    assert len(open_page.troubles) == 1  # the browser complains of the refusal
    open_page.troubles.clear()


@pytest.mark.parametrize("key", [None, "k"])
def test_pictures_are_shown_and_the_button_acknowledges_with_and_without_a_key(
    guards, copied, serving, data, open_page, tmp_path, key
):
    options = {"keys": [key] if key else [], "keep_flagged": tmp_path / "kept", "run_length": 10}
    with serving(copied(guards.images), guards.images.model, **options) as running:
        assert running.client(key).post("/predict", data.foreign[:40].tolist())[0] == 200
        running.counted(40)
        running.until(lambda: len(running.service.flagged.record()["latest"]) == 10)
        credentials = {"http_credentials": {"username": "", "password": key}} if key else {}
        page = settled(open_page(f"http://127.0.0.1:{running.port}/", 390, **credentials))
        widths = page.locator("#flagged img").evaluate_all("all => all.map(e => e.naturalWidth)")
        assert widths == [data.foreign.shape[-1]] * 10
        assert page.evaluate("document.documentElement.scrollWidth") <= 390
        assert running.service.served.monitor.alarm
        page.locator("#acknowledge").press("Enter")
        page.locator("#acknowledge").wait_for(state="hidden")
        assert not running.service.served.monitor.alarm
        assert page.evaluate("document.activeElement.id") == "acknowledged"
        assert page.locator("#acknowledged").inner_text()
