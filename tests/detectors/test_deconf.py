"""DeConf-C: the head is the formula, the score is the largest cosine, and the step is chosen without OOD samples."""

import pytest
import torch
from torch import nn

import igeood
from igeood.bench.networks import build
from igeood.bench.networks.catalog import DeConfHead
from igeood.errors import InputError, UnsuitedError
from igeood.guard.guard import EPSILONS
from igeood.outputs import Outputs


@pytest.fixture(scope="module")
def net(model):
    """The small classifier with its head decomposed: the weights of h are the linear head's."""
    torch.manual_seed(0)
    *body, linear = model
    head = DeConfHead(64, 4)
    head.h.weight.data = linear.weight.data.clone()
    return nn.Sequential(*body, head).eval()


def test_the_head_is_the_formula():
    torch.manual_seed(1)
    head, z = DeConfHead(6, 3).double().eval(), torch.randn(5, 6, dtype=torch.float64)
    head.g[1].running_mean += 0.3
    output, w, v = head(z), head.h.weight, head.g[0]
    cosine = torch.stack([row @ w.T / ((row.norm() + 1e-4) * (w.norm(dim=1) + 1e-4)) for row in z])
    g = torch.sigmoid((z @ v.weight[0] + v.bias - 0.3) / (1 + head.g[1].eps) ** 0.5)
    torch.testing.assert_close(output, {"logits": cosine / g[:, None], "h": cosine})
    names = {"h.weight", "g.0.weight", "g.0.bias", "g.1.weight", "g.1.bias"}
    assert {name for name, _ in head.named_parameters()} == names
    assert [name for name, p in head.named_parameters() if hasattr(p, "no_decay")] == ["h.weight"]
    assert build("densenet-bc-100", 7, head="deconf-c")(torch.zeros(2, 3, 32, 32))["h"].shape == (2, 7)
    with pytest.raises(InputError, match=r"^head: no 'deconf'; did you mean 'deconf-c'\? there are linear, deconf-c"):
        build("resnet-10-16", head="deconf")


@pytest.mark.parametrize("box", [igeood.black_box, igeood.grey_box])
def test_the_score_is_minus_the_largest_cosine(net, data, box, tmp_path):
    guard = box(net, method="deconf-c").fit(data.train)
    guard.inputs.epsilon = 0.0
    with torch.no_grad():
        output = net(data.test)
    torch.testing.assert_close(guard.score(data.test), -output["h"].double().amax(dim=1))
    guard.calibrate(data.held_out).save(tmp_path / "guard")
    verdict = igeood.load(tmp_path / "guard", net).predict(data.test)
    assert torch.equal(verdict.score, guard.score(data.test))
    assert torch.equal(verdict.label, output["logits"].argmax(dim=1))


def test_the_step_has_the_lowest_mean_score_of_in_distribution_samples(net, data):
    guard = igeood.grey_box(net, method="deconf-c").fit(data.train)
    tuning = guard.tune(data.held_out, share=1.0).tuning
    x = torch.cat([batch for batch, _ in data.held_out]).requires_grad_()
    (slope,) = torch.autograd.grad(net(x)["h"].amax(dim=1).sum(), x)
    with torch.no_grad():
        means = {e: float(net(x + e * slope.sign())["h"].amax(dim=1).mean()) for e in guard.detector.id_steps}
    assert {step["epsilon"]: step["tnr"] for step in tuning.steps} == pytest.approx(means, abs=1e-6)
    assert guard.epsilon == tuning.epsilon == max(means, key=means.get) > 0
    assert (tuning.n_id, tuning.n_ood, tuning.temperature, tuning.strength) == (400, 0, None, None)
    assert "400 in-distribution samples" in repr(tuning)
    guard.tune(data.held_out, data.ood)  # with OOD samples as any other
    assert [step["epsilon"] for step in guard.tuning.steps] == list(EPSILONS)


def test_what_it_needs_is_said(model, net, data, known):
    cure = r"give a model that returns 'h' beside its logits \(igeood train --head deconf-c\), or arrays with '\|h'"
    with pytest.raises(UnsuitedError, match=f"^outputs: no features to learn from; {cure}"):
        igeood.grey_box(model, method="deconf-c").fit(data.train)
    with pytest.raises(InputError, match=r"^ood: MaxSoftmax needs OOD samples to tune on; give some, or ood='fgsm'"):
        igeood.grey_box(net, method="msp").fit(data.train).tune(data.held_out)
    few = igeood.grey_box(net, method="deconf-c").fit(data.train)
    with pytest.raises(InputError, match=r"^id_data: 8 samples in the share that tune uses; tuning needs at least 20"):
        few.tune(data.test[:8], share=1.0)
    guard = igeood.black_box(method="deconf-c").fit(Outputs(known.train.logits, {"|h": known.train.logits.tanh()}))
    with pytest.raises(InputError, match=r"no features of layer '\|h', which the guard reads"):
        guard.score(known.test.logits)
    compared = igeood.compare(net, data.train, data.held_out, data.ood, methods=("deconf-c", "msp"))
    assert set(compared.tnr) == {"deconf-c", "msp"}
    assert "deconf-c" not in igeood.compare(model, data.train, data.held_out, data.ood).tnr
