"""Each method of the last layer and of the logits beside a plain float64 loop over its formula."""

import math

import numpy as np
import pytest
import torch

import igeood
from igeood.geometry.categorical import centroids
from igeood.outputs import HEAD, Outputs

from .oracles import inverse_covariance

N, C, K = 300, 4, 9


def draw(seed, rows=N, spread=1.0):
    """Outputs of a linear head on ReLU features: (N, K) and (N, C)."""
    generator = torch.Generator().manual_seed(seed)
    means = 2.0 * torch.rand(C, K, generator=torch.Generator().manual_seed(9), dtype=torch.float64)
    labels = torch.arange(rows) % C
    z = (means[labels] + spread * torch.randn(rows, K, generator=generator, dtype=torch.float64)).clamp(min=0)
    weight = torch.randn(C, K, generator=torch.Generator().manual_seed(8), dtype=torch.float64)
    bias = torch.linspace(-1, 1, C, dtype=torch.float64)
    return Outputs(z @ weight.T + bias, {"z": z}, labels), weight.numpy(), bias.numpy()


@pytest.fixture(scope="module")
def world():
    train, weight, bias = draw(0)
    return train, draw(1, 40, spread=2.0)[0], weight, bias


def rows_of(outputs):
    return outputs.features["z"].numpy(), outputs.logits.numpy(), outputs.labels.numpy()


def logsumexp(values):
    return math.log(sum(math.exp(v - max(values)) for v in values)) + max(values)


def softmax(f):
    return [math.exp(v - logsumexp(f)) for v in f]


def unit(z):
    return z / np.linalg.norm(z)


def shaped(z, percentile):
    """Which entries are among the largest, and exp(s₁/s₂)."""
    kept = max(1, K - round(K * percentile / 100))
    floor = sorted(z, reverse=True)[kept - 1]
    mask = np.array([v >= floor for v in z])
    return mask, math.exp(sum(z) / max(sum(z[mask]), 1e-30))


def fisher_rao(train, reduce):
    """Distances (Eq. 2) from a row's softmax to the centroids, whose own test is that of the geometry."""
    centres = centroids(train.logits, train.labels, C).exp().sqrt().tolist()

    def score(_, f):
        overlaps = [sum(math.sqrt(q) * c for q, c in zip(softmax(f), centre, strict=True)) for centre in centres]
        return reduce([2 * math.acos(min(1, overlap)) for overlap in overlaps])

    return score


def neighbours(train, most, *, is_guided):
    z, f, _ = rows_of(train)
    rows = [unit(row) for row in z]
    if not is_guided:
        return lambda z, _: sorted(math.dist(unit(z), row) for row in rows)[most - 1]
    guided = [row * logsumexp(logits) for row, logits in zip(rows, f, strict=True)]
    return lambda z, f: -logsumexp(f) * np.mean(sorted(unit(z) @ row for row in guided)[-most:])


def she(train, *_):
    z, f, labels = rows_of(train)
    right = f.argmax(1) == labels
    pattern = np.stack([z[(labels == c) & right].mean(0) for c in range(C)])
    return lambda z, f: -(z @ pattern[f.argmax()])


def fdbd(train, weight, _):
    mean = rows_of(train)[0].mean(0)

    def score(z, f):
        y = f.argmax()
        others = [(f[y] - f[c]) / math.dist(weight[y], weight[c]) for c in range(C) if c != y]
        return -np.mean(others) / math.dist(z, mean)

    return score


def of_unit_rows(train, *_):
    z, _, labels = rows_of(train)
    rows = np.stack([unit(row) for row in z])
    means = np.stack([rows[labels == c].mean(0) for c in range(C)])
    inverse = inverse_covariance(rows, labels)
    return lambda z, _: min((unit(z) - m) @ inverse @ (unit(z) - m) for m in means)


def relative_of_unit_rows(train, *_):
    z, _, _ = rows_of(train)
    rows = np.stack([unit(row) for row in z])
    mean, inverse = rows.mean(0), inverse_covariance(rows, np.zeros(len(rows), dtype=int))
    near = of_unit_rows(train)
    return lambda z, f: near(z, f) - (unit(z) - mean) @ inverse @ (unit(z) - mean)


def cadref(train, weight, _):
    z, f, labels = rows_of(train)
    level = np.mean([logsumexp(row) for row in f])

    def score(z_, f_):
        c = int(np.argmax(f_))
        sided = (z_ - z[labels == c].mean(0)) * np.sign(weight[c])
        for_it, against = (np.abs(part[part > 0]).sum() for part in (sided, -sided))
        return (for_it / logsumexp(f_) + against / level) / np.abs(z_).sum()

    return score


def nci(train, weight, _):
    mean = rows_of(train)[0].mean(0)

    def score(z, f):
        apart = z - mean
        return -(weight[int(np.argmax(f))] @ apart / np.linalg.norm(apart) + 1e-4 * np.abs(z).sum())

    return score


def vim(train, weight, bias):
    z, f, _ = rows_of(train)
    origin = -np.linalg.pinv(weight) @ bias
    _, directions = np.linalg.eigh((z - origin).T @ (z - origin))
    residual = directions[:, : K - K // 2]
    alpha = f.max(1).mean() / np.mean([np.linalg.norm((row - origin) @ residual) for row in z])
    return lambda z, f: alpha * np.linalg.norm((z - origin) @ residual) - logsumexp(f)


def react(train, weight, bias):
    z, f, _ = rows_of(train)
    ceilings = [np.quantile(z, p, method="inverted_cdf") for p in (0.85, 0.9, 0.95, 0.99)]
    changed = [((np.minimum(z, c) @ weight.T + bias).argmax(1) != f.argmax(1)).mean() for c in ceilings]
    ceiling = next((c for c, share in zip(ceilings, changed, strict=True) if share <= 0.01), ceilings[-1])
    return lambda z, _: -logsumexp(weight @ np.minimum(z, ceiling) + bias)


def ash(_, weight, bias):
    return lambda z, _: -logsumexp(weight @ (np.where(shaped(z, 90)[0], z, 0) * shaped(z, 90)[1]) + bias)


# for each method a function of training outputs, weight and bias, to one of a row's features and logits
ORACLES = {
    "msp": lambda *_: lambda _, f: -max(softmax(f)),
    "odin": lambda *_: lambda _, f: -max(softmax(f / 1000)),
    "energy": lambda *_: lambda _, f: -logsumexp(f),
    "igeood-logits": lambda train, *_: fisher_rao(train, lambda distances: -sum(distances)),
    "igeood-logits-min": lambda train, *_: fisher_rao(train, min),
    "max-logit": lambda *_: lambda _, f: -max(f),
    "entropy": lambda *_: lambda _, f: -sum(q * math.log(q) for q in softmax(f)),
    "gen": lambda *_: lambda _, f: sum(q**0.1 * (1 - q) ** 0.1 for q in softmax(f)),
    "knn": lambda train, *_: neighbours(train, 25, is_guided=False),
    "nnguide": lambda train, *_: neighbours(train, 10, is_guided=True),
    "she": she,
    "fdbd": fdbd,
    "mahalanobis++": of_unit_rows,
    "relative-mahalanobis++": relative_of_unit_rows,
    "cadref": cadref,
    "nci": nci,
    "vim": vim,
    "react": react,
    "ash": ash,
    "scale": lambda _, weight, bias: lambda z, _: -logsumexp(weight @ (z * shaped(z, 85)[1]) + bias),
}


@pytest.mark.parametrize("method", ORACLES)
def test_scores_are_those_of_the_formula(method, world):
    train, test, weight, bias = world
    score = ORACLES[method](train, weight, bias)
    z, f, _ = rows_of(test)
    expected = [score(*row) for row in zip(z, f, strict=True)]
    tolerance = 1e-6 if method in ("knn", "nnguide") else 1e-9  # a bank is kept in float32
    np.testing.assert_allclose(igeood.detector(method).fit(train)(test), expected, rtol=tolerance, atol=tolerance)


def test_confident_rows_do_not_tie_in_gen():
    logits = torch.tensor([[30.0, 0, 0], [40.0, 0, 0], [50.0, 0, 0]])
    assert (igeood.detector("gen").fit(logits)(logits).diff() < -1e-3).all()


def test_the_head_is_the_models_or_else_found_from_the_rows(world, refused):
    train, test, weight, bias = world
    fitted = igeood.detector("react").fit(train)
    np.testing.assert_allclose(fitted.weight_.numpy(), weight, atol=1e-9)
    np.testing.assert_allclose(fitted.bias_.numpy(), bias, atol=1e-9)
    summary = igeood.Summary.of(train, fitted.needs)
    summary.head = 2 * fitted.weight_, fitted.bias_
    assert torch.equal(igeood.detector("react").learn(summary).weight_, 2 * fitted.weight_)
    still = train.replace(features={"z": torch.cat([train.features["z"], torch.ones(N, 2)], dim=1)})
    findings = igeood.detector("ash").fit(still).findings_
    assert [(finding.code, "9 of 11" in finding.message) for finding in findings] == [("head-partly-known", True)]
    bent = train.replace(logits=train.logits**2)
    with refused("head"):
        igeood.detector("react").fit(bent)
    assert igeood.detector("she").fit(bent)(test).isfinite().all()


def test_a_class_that_is_never_right_and_a_residual_of_nothing(world, refused):
    train, test, *_ = world
    wrong = train.replace(labels=torch.where(train.logits.argmax(1) == 2, 0, 2 * (train.labels // 2)))
    wrong.labels[:4] = torch.arange(4)
    fitted = igeood.detector("she").fit(wrong)
    assert [finding.code for finding in fitted.findings_] == ["never-correct"]
    assert fitted(test).isfinite().all()
    with refused("dimension"):
        igeood.detector("vim", dimension=9).fit(train)


class Bent(torch.nn.Sequential):
    """A classifier whose logits are no linear layer's output."""

    def forward(self, x):
        return torch.nn.functional.normalize(super().forward(x), dim=1)


def test_the_last_layer_is_the_input_of_the_head_where_there_is_one(model, data, refused):
    guards = {method: igeood.white_box(model, method=method).fit(data.train) for method in ("react", "vim", "knn")}
    assert {guard.layers[-1] for guard in guards.values()} == {HEAD}
    assert torch.equal(guards["react"].detector.weight_, model[-1].weight.detach().double())
    assert torch.equal(guards["react"].detector.bias_, model[-1].bias.detach().double())
    linear = torch.nn.Sequential(torch.nn.Flatten(), torch.nn.Linear(192, 4))  # its input is all there is to read
    assert igeood.white_box(linear, method="knn").fit(data.train).layers == [HEAD]
    unsuited = [("layers", linear, "igeood"), ("layers", linear, "probe"), ("head", Bent(model), "react")]
    for argument, other, method in unsuited:
        with refused(argument):
            igeood.white_box(other, method=method).fit(data.train)
    assert HEAD not in igeood.white_box(Bent(model)).fit(data.train).layers
