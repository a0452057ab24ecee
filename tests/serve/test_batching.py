"""The queue: who waits, who is answered together, and what happens when answering fails."""

from concurrent.futures import CancelledError
from threading import Event

import pytest

from igeood.serve.batching import Batcher, Job

PATIENCE = 20


class Answers:
    """Answers with what it got; it can be held up."""

    def __init__(self):
        self.batches, self.open, self.seen = [], Event(), Event()

    def __call__(self, jobs):
        self.seen.set()
        assert self.open.wait(PATIENCE)
        self.batches.append([job.data for job in jobs])
        for job in jobs:
            job.future.set_result(f"{job.data}!")
        if jobs[0].data == "counting raises":
            raise OSError("full disk")


@pytest.fixture
def answers():
    return Answers()


@pytest.fixture
def batcher(answers):
    """Makes a queue whose thread is held up in a job, `first`, until `answers.open` is set."""
    queues = []

    def make(*, max_batch=4, max_delay=0.0):
        queues.append(Batcher(answers, 100, max_batch, max_delay))
        first = submit(queues[-1], "first")
        assert answers.seen.wait(PATIENCE)
        return queues[-1], first

    yield make
    answers.open.set()
    for queue in queues:
        queue.close()


def submit(queue, data, rows=1, key="k"):
    job = Job(data, rows, (key,))
    queue.submit(job)
    return job.future


def results(*futures):
    return [future.result(PATIENCE) for future in futures]


def test_jobs_that_wait_are_joined_in_order_up_to_the_limit_of_rows_and_keys_are_not_mixed(batcher, answers):
    queue, _ = batcher()
    jobs = [("a1", 1, "a"), ("b1", 1, "b"), ("a9", 9, "a"), ("a3", 3, "a"), ("b2", 2, "b")]
    futures = [submit(queue, *job) for job in jobs]
    answers.open.set()
    assert results(*futures) == ["a1!", "b1!", "a9!", "a3!", "b2!"]
    assert answers.batches == [["first"], ["a1", "a3"], ["b1", "b2"], ["a9"]]  # 9 rows are more than the limit: alone


def test_an_idle_thread_never_waits_and_a_busy_one_waits_for_a_full_batch(batcher, answers):
    queue, first = batcher(max_delay=3600, max_batch=3)
    futures = [submit(queue, data) for data in "abc"]
    answers.open.set()
    assert results(first, *futures) == ["first!", "a!", "b!", "c!"]
    late = [submit(queue, data) for data in "def"]  # after a joined batch, three: it waits no longer
    assert results(*late) == ["d!", "e!", "f!"]
    assert answers.batches == [["first"], ["a", "b", "c"], ["d", "e", "f"]]


def test_answers_that_cannot_be_counted_stand(batcher, answers, caplog):
    queue, _ = batcher()
    answers.open.set()
    assert results(submit(queue, "counting raises"), submit(queue, "next")) == ["counting raises!", "next!"]
    queue.close()
    assert [record.exc_info[0] for record in caplog.records] == [OSError]


def test_a_client_that_has_gone_takes_neither_another_nor_the_thread_with_it(batcher, answers):
    queue, first = batcher()
    gone, other = submit(queue, "gone"), submit(queue, "b")
    gone.cancel()
    answers.open.set()
    assert results(first, other) == ["first!", "b!"]
    with pytest.raises(CancelledError):
        gone.result(PATIENCE)
    assert answers.batches == [["first"], ["b"]]
