"""Killed at any point: files are whole, the same command finishes, little is done twice, and the end is the same."""

import json
import random
import shutil
import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent))  # for the helpers, which subprocesses run too

from jobs import Shop, archive, check_sound, check_units, tree
from kills import Fault, serving, warm

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="forks a process that has torch")
KILLED = -9
CASES = {  # of each job: in every run, and in the long one; each is a folder in which it is killed twice
    "fit": (1, 8),
    "calibrate": (1, 8),
    "tune": (1, 6),
    "save": (1, 10),
    "bench": (1, 12),
    "train": (1, 8),
    "data get": (2, 14),
}


@pytest.fixture(scope="module")
def shop(tmp_path_factory):
    folder = tmp_path_factory.mktemp("kills")
    (folder / "logs").mkdir()
    with serving(archive()) as served, warm(folder / "logs") as process:
        yield Shop(process, folder, served)


@pytest.fixture(scope="module")
def jobs(shop):
    return shop.jobs()


def cases():
    for name, (few, many) in CASES.items():
        for seed in range(many):
            yield pytest.param(name, seed, marks=[pytest.mark.slow] * (seed >= few), id=f"{name}-{seed}")


def kill_at_a_call(shop, job, folder, calls, draw):
    """Kill the job before, within or after a call to the disk drawn from the next `calls`; it may have fewer left."""
    at, when, copy = draw.randint(1, calls), draw.choice(["before", "half", "after"]), f"{folder}-copy"
    shutil.copytree(folder, copy)
    while True:
        ended = shop.run(job, folder, fault=Fault("kill", at, when))
        if ended.code == KILLED or at == 1:
            shutil.rmtree(copy)
            return ended
        at = (at + 1) // 2
        shutil.rmtree(folder)
        shutil.copytree(copy, folder)


def kill_at_a_time(shop, job, folder, seconds, draw):
    """Kill the job at a moment drawn from the time that it takes; earlier, if it was quicker this time."""
    after = draw.uniform(0.0, seconds)
    while True:
        ended = shop.run(job, folder, seconds=after)
        if ended.code == KILLED:
            return ended, folder
        folder, after = shop.fresh(job), after / 2


@pytest.mark.parametrize(("name", "seed"), list(cases()))
def test_killed_twice_and_given_again(shop, jobs, name, seed):
    job, draw = jobs[name], random.Random(f"{name} {seed}")
    ended, whole = shop.whole(job)
    folder = shop.fresh(job)
    if seed % 3 == 2:
        first, folder = kill_at_a_time(shop, job, folder, ended.seconds, draw)
    else:
        first = kill_at_a_call(shop, job, folder, len(ended.calls), draw)
    assert first.code == KILLED, first
    check_sound(shop, job, folder)
    left = len(ended.calls) - len(first.calls) if job.resumes else len(ended.calls)
    second = kill_at_a_call(shop, job, folder, max(1, left), draw)
    assert second.code == KILLED, second
    check_sound(shop, job, folder)
    last = shop.run(job, folder)
    assert last.code == 0, last
    assert tree(folder) == whole
    check_units(job, ended, [first, second, last], kills=2)


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=[pytest.mark.slow] * (name not in ("train", "data get"))) for name in CASES]
)
def test_killed_when_all_is_in_place_but_nothing_tidied(shop, jobs, name):
    """After the last file has got its name: the same command ends well, and leaves nothing but the result."""
    job = jobs[name]
    ended, whole = shop.whole(job)
    last = sum(call == "replace" for call, _ in ended.calls)
    folder = shop.fresh(job)
    killed = shop.run(job, folder, fault=Fault("kill", last, "after", "replace"))
    assert killed.code == KILLED, killed
    check_sound(shop, job, folder)
    again = shop.run(job, folder)
    assert again.code == 0, again
    assert tree(folder) == whole
    check_units(job, ended, [killed, again], kills=1)


def test_a_search_that_others_share_is_not_done_again(shop, jobs):
    """Killed after the last cell of a method: what it found for all sets is on disk, and the next method uses it."""
    job = jobs["bench"]
    ended, whole = shop.whole(job)
    lines = [json.loads(line) for line in whole["results/results.jsonl"].splitlines()]
    before = sum(record["method"] != "igeood+" for record in lines)
    appended = [
        i
        for i, (call, path) in enumerate(ended.calls, start=1)
        if (call, Path(path).name) == ("write", "results.jsonl")
    ]
    folder = shop.fresh(job)
    killed = shop.run(job, folder, fault=Fault("kill", appended[before - 1], "after"))
    assert killed.code == KILLED, killed
    again = shop.run(job, folder)
    assert tree(folder) == whole
    assert (killed.units["searches"], again.units["searches"]) == (ended.units["searches"], 0)
