"""What a guard costs, by counts and ratios: passes, hooks, hashes, functions and memory; never by the clock."""

import copy
import sys
from collections import Counter
from pathlib import Path
from unittest.mock import Mock

import pytest
from torch import nn

import igeood

HOME = str(Path(igeood.__file__).parent)
BUILDS = [  # with the forward passes for each batch
    (igeood.black_box, {}, 1),
    (igeood.white_box, {}, 1),
    (igeood.grey_box, {"epsilon": 0.001}, 2),
    (igeood.white_box, {"epsilon": 0.001, "method": "igeood"}, 2),
]


@pytest.fixture
def counted(model, monkeypatch):
    """A model that counts its forward passes, and the hooks that it gets."""
    mine, counts = copy.deepcopy(model), Counter()
    mine[0].register_forward_pre_hook(lambda *_: counts.update(["passes"]))
    register = nn.Module.register_forward_hook

    def counting(module, *args, **kwargs):
        counts.update(["hooks"])
        return register(module, *args, **kwargs)

    monkeypatch.setattr(nn.Module, "register_forward_hook", counting)
    return mine, counts


@pytest.mark.parametrize(("build", "options", "passes"), BUILDS)
def test_predict_is_one_pass_and_hashes_nothing(counted, data, build, options, passes, monkeypatch):
    """One more for the input step; a hook for each layer that is read; no look at all weights, nor at the content."""
    model, counts = counted
    guard = build(model, **options).fit(data.train).calibrate(data.held_out)
    for name in ("guard.source.fingerprint", "model.batch.row_keys", "outputs.row_keys"):
        monkeypatch.setattr(f"igeood.{name}", Mock(side_effect=AssertionError("hashed")))
    for step in (guard.predict, guard.score):
        counts.clear()
        step(data.test[:32])
        assert counts["passes"] == passes
        assert counts["hooks"] <= passes * len(guard.layers)


def test_fit_and_tune_read_each_batch_once(counted, data):
    model, counts = counted
    guard = igeood.white_box(model).fit(data.train)
    assert counts["passes"] <= len(data.train) + 1  # to find the layers, with their layouts
    counts.clear()
    guard.tune(data.held_out, data.ood)
    assert counts["passes"] == (batches := len(data.held_out) + len(data.ood))
    grey = igeood.grey_box(model, epsilon=0.0).fit(data.train)
    counts.clear()
    grey.tune(data.held_out, data.ood, epsilons=(0.0, 0.001, 0.002, 0.003))
    assert counts["passes"] == batches * (1 + 4)  # to tune the temperature; then clean, and three steps


def functions_run(step):
    """The library's functions that a step runs, by file; comprehensions and lambdas do not count."""
    seen = {}

    def note(frame, event, _):
        code = frame.f_code
        if event == "call" and code.co_filename.startswith(HOME) and not code.co_name.startswith("<"):
            seen.setdefault(code.co_filename.removeprefix(HOME), {})[code.co_firstlineno] = code.co_name

    sys.setprofile(note)
    try:
        step()
    finally:
        sys.setprofile(None)
    return seen


def test_few_functions_run_in_a_step(model, data, classifier):
    """Budgets: whoever debugs a step has to read these functions."""
    white = igeood.white_box(model, method="she").fit(data.train).calibrate(data.held_out)
    black = igeood.black_box(method="max-logit").fit(classifier.train).calibrate(classifier.held_out)
    batches, blocks, row = list(data.train)[:4], classifier.train.split(100), classifier.test[:1].numpy()
    budgets = {
        "one image": (lambda: white.predict(data.test[:1]), 44, 11),
        "one row of logits": (lambda: black.predict(row), 29, 8),
        "fit on four batches of images": (lambda: igeood.white_box(model, method="she").fit(batches), 146, 22),
        "fit on four blocks of logits": (lambda: igeood.black_box(method="max-logit").fit(blocks), 90, 17),
    }
    for name, (step, functions, files) in budgets.items():
        step()  # what is derived on first use stays
        seen = functions_run(step)
        assert sum(map(len, seen.values())) <= functions, (name, seen)
        assert len(seen) <= files, (name, seen)
