"""The queue: who waits, who is judged together, and what happens when judging fails."""

import asyncio
from threading import Event

import pytest
from starlette.exceptions import HTTPException

from igeood.serve.batching import Batcher, Job

PATIENCE = 20


class Judge:
    """Answers with what it got; it can be held up."""

    def __init__(self):
        self.batches, self.open, self.seen = [], Event(), Event()
        self.open.set()

    def __call__(self, jobs):
        self.seen.set()
        assert self.open.wait(PATIENCE)
        self.batches.append([job.data for job in jobs])
        if "raises" in self.batches[-1]:
            raise ValueError("judge")
        for job in jobs:
            job.future.set_result(f"{job.data}!")
        if jobs[0].data == "counting raises":
            raise OSError("full disk")


@pytest.fixture
def judge():
    return Judge()


@pytest.fixture
def batcher(judge):
    made = []

    def make(*, max_waiting=100, max_batch=4, max_delay=0.0):
        made.append(Batcher(judge, max_waiting, max_batch, max_delay))
        return made[-1]

    yield make
    judge.open.set()
    for one in made:
        one.close()


def submit(batcher, data, *, rows=1, key="k"):
    job = Job(data, rows, key)
    batcher.submit(job)
    return asyncio.wrap_future(job.future)


async def held_up(batcher, judge):
    """A first job, in whose judgement the worker is held up."""
    judge.open.clear()
    judge.seen.clear()
    first = submit(batcher, "first")
    assert await asyncio.to_thread(judge.seen.wait, PATIENCE)
    return first


async def answers(*futures):
    return await asyncio.wait_for(asyncio.gather(*futures, return_exceptions=True), PATIENCE)


def test_requests_that_come_while_it_is_busy_are_joined_in_order_up_to_the_limit(batcher, judge):
    async def scene():
        queue = batcher()
        futures = [await held_up(queue, judge)]
        futures += [submit(queue, str(i)) for i in range(10)]
        assert len(queue) == 10
        judge.open.set()
        assert await answers(*futures) == ["first!", *(f"{i}!" for i in range(10))]
        assert len(queue) == 0

    asyncio.run(scene())
    assert judge.batches == [["first"], ["0", "1", "2", "3"], ["4", "5", "6", "7"], ["8", "9"]]


def test_rows_count_and_keys_are_not_mixed(batcher, judge):
    async def scene():
        queue = batcher()
        futures = [await held_up(queue, judge)]
        for data, rows, key in (("a1", 1, "a"), ("b1", 1, "b"), ("a9", 9, "a"), ("a3", 3, "a"), ("b2", 2, "b")):
            futures.append(submit(queue, data, rows=rows, key=key))
        judge.open.set()
        assert await answers(*futures) == ["first!", "a1!", "b1!", "a9!", "a3!", "b2!"]

    asyncio.run(scene())
    assert judge.batches == [["first"], ["a1", "a3"], ["b1", "b2"], ["a9"]]  # 9 rows are more than the limit: alone


def test_an_idle_worker_never_waits(batcher, judge):
    async def scene():
        queue = batcher(max_delay=3600)
        for data in "ab":
            assert await answers(submit(queue, data)) == [f"{data}!"]

    asyncio.run(scene())
    assert judge.batches == [["a"], ["b"]]


def test_after_a_joined_batch_a_request_waits_for_others(batcher, judge):
    async def scene():
        queue = batcher(max_delay=PATIENCE, max_batch=3)
        futures = [await held_up(queue, judge), submit(queue, "a"), submit(queue, "b"), submit(queue, "c")]
        judge.open.set()
        await answers(*futures)
        futures = [submit(queue, "d")]
        await asyncio.sleep(0.1)
        futures += [submit(queue, "e")]
        await asyncio.sleep(0.1)
        assert len(judge.batches) == 2
        await answers(*futures, submit(queue, "f"))  # three: it waits no longer

    asyncio.run(scene())
    assert judge.batches == [["first"], ["a", "b", "c"], ["d", "e", "f"]]


def test_a_full_queue_says_when_to_come_again(batcher, judge):
    async def scene():
        queue = batcher(max_waiting=2)
        futures = [await held_up(queue, judge), submit(queue, "a"), submit(queue, "b")]
        with pytest.raises(HTTPException) as caught:
            submit(queue, "c")
        assert (caught.value.status_code, caught.value.headers) == (503, {"retry-after": "1"})
        judge.open.set()
        await answers(*futures)
        assert await answers(submit(queue, "d")) == ["d!"]

    asyncio.run(scene())
    assert [data for batch in judge.batches for data in batch] == ["first", "a", "b", "d"]


def test_close_finishes_what_waits_at_once_and_then_nothing_is_taken(batcher, judge):
    async def scene():
        queue = batcher(max_delay=3600)
        futures = [await held_up(queue, judge), *(submit(queue, str(i)) for i in range(6))]
        judge.open.set()
        await asyncio.wait_for(asyncio.to_thread(queue.close), PATIENCE)  # the last two wait for no others
        assert await answers(*futures) == ["first!", *(f"{i}!" for i in range(6))]
        with pytest.raises(HTTPException) as caught:
            submit(queue, "late")
        assert caught.value.status_code == 503

    asyncio.run(scene())
    assert len(judge.batches) == 3


def test_where_a_batch_fails_each_is_judged_alone(batcher, judge, caplog):
    async def scene():
        queue = batcher()
        futures = [await held_up(queue, judge), *(submit(queue, data) for data in ("a", "raises", "b"))]
        judge.open.set()
        first, a, error, b = await answers(*futures)
        assert (first, a, type(error), b) == ("first!", "a!", ValueError, "b!")
        assert await answers(submit(queue, "counting raises"), submit(queue, "next")) == ["counting raises!", "next!"]

    asyncio.run(scene())
    assert judge.batches[1:5] == [["a", "raises", "b"], ["a"], ["raises"], ["b"]]
    assert [record.exc_info[0] for record in caplog.records] == [OSError]  # answered; logged


def test_a_client_that_has_gone_takes_neither_another_nor_the_thread_with_it(batcher, judge):
    async def scene():
        queue = batcher()
        alone = [await held_up(queue, judge), submit(queue, "gone")]
        alone[1].cancel()
        judge.open.set()
        await answers(*alone)
        futures = [await held_up(queue, judge), submit(queue, "gone"), submit(queue, "b")]
        futures[1].cancel()
        judge.open.set()
        first, gone, other = await answers(*futures)
        assert (first, type(gone), other) == ("first!", asyncio.CancelledError, "b!")

    asyncio.run(scene())
