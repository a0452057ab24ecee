"""What a guard costs, by counts and ratios: passes, hooks, hashes and memory; never by the clock."""

import copy
import subprocess
import sys
from collections import Counter
from unittest.mock import Mock

import pytest
from torch import nn

import igeood

BUILDS = [  # with the forward passes for each batch
    (igeood.black_box, {}, 1),
    (igeood.white_box, {}, 1),
    (igeood.grey_box, {"epsilon": 0.001}, 2),
    (igeood.white_box, {"epsilon": 0.001}, 2),
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
    hashes = ("guard.inputs.fingerprint", "model.fingerprint.fingerprint", "model.batches.row_keys", "outputs.row_keys")
    for name in hashes:
        monkeypatch.setattr(f"igeood.{name}", Mock(side_effect=AssertionError("hashed")))
    for step in (guard.predict, guard.score):
        counts.clear()
        step(data.test[:32])
        assert counts["passes"] == passes
        assert counts["hooks"] <= passes * len(guard.layers)


def test_fit_and_tune_read_each_batch_once(counted, data):
    model, counts = counted
    guard = igeood.white_box(model).fit(data.train)
    assert counts["passes"] <= len(data.train) + 2  # to find the layers, and their layouts
    counts.clear()
    guard.tune(data.held_out, data.ood)
    assert counts["passes"] == (batches := len(data.held_out) + len(data.ood))
    grey = igeood.grey_box(model, epsilon=0.0).fit(data.train)
    counts.clear()
    grey.tune(data.held_out, data.ood, epsilons=(0.0, 0.001, 0.002, 0.003))
    assert counts["passes"] == batches * (1 + 4)  # to tune the temperature; then clean, and three steps


FIT = """
import resource, sys, torch, igeood
from igeood.outputs import Outputs

def blocks(n):
    draw = torch.Generator().manual_seed(0)
    for start in range(0, n, 1000):
        labels = (start + torch.arange(1000)) % 20
        logits = torch.randn(1000, 20, generator=draw)
        logits[torch.arange(1000), labels] += 6
        yield Outputs(logits, {"a": torch.randn(1000, 60, generator=draw)}, labels)

igeood.white_box().fit(blocks(5_000), budget=4 << 20)
before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
guard = igeood.white_box().fit(blocks(int(sys.argv[1])), budget=4 << 20)
print((resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) / 1024, len(guard.summary.samples["features"]))
"""


@pytest.mark.skipif(sys.platform != "linux", reason="ru_maxrss is in other units elsewhere")
def test_the_memory_of_fit_does_not_grow_with_the_rows():
    """200,000 rows of 80 values are 64 MB; keys of the rows, 8 bytes each, are held for up to a million of them."""
    commands = ([sys.executable, "-c", FIT, rows] for rows in ("50_000", "200_000"))
    done = (subprocess.run(command, capture_output=True, text=True, check=True).stdout.split() for command in commands)
    (few, kept), (many, still_kept) = done
    assert int(kept) == int(still_kept) < 20_000
    assert float(many) < float(few) + 10
    assert float(few) < 30
