"""docs/comparison.md from the figures of comparison.py: every figure of its text is filled in here."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from statistics import mode
from typing import Any

import numpy as np

import igeood
from subjects import FAULTS, WHOLE

OURS = "evidence"
BLACK = "evidence (logits)"
PEER = "gen"  # the strongest other method of logits
SHOWN_GAP = 0.05  # of TNR: pairs on which the default loses more are listed
BODIES = {"MiniLM": "MiniLM, CLINC150", "EfficientNet": "EfficientNet, Tiny-ImageNet", "DenseNet": "DenseNet, CIFAR-10"}
LEADERS = 8  # methods in the tables of single networks, beside those that read logits alone
KNOWN = ("gen", "energy", "msp")
Values = np.ndarray


@dataclass(frozen=True)
class Pair:
    """A network with one of its OOD sets."""

    network: str
    ood: str
    is_near: bool
    is_real: bool


class Figures:
    """TNR and AUROC of each method over all pairs, real networks first."""

    def __init__(self, networks: dict[str, Any], keep: Callable[[str], bool] = lambda _: True) -> None:
        self.pairs = [
            Pair(name, ood, ood in result["near"], result["real"])
            for name, result in networks.items()
            for ood in (*result["near"], *result["far"])
        ]
        everywhere = set.intersection(*(set(result["methods"]) for result in networks.values()))
        listed = next(iter(networks.values()))["methods"]

        def values(metric: str) -> dict[str, Values]:
            rows = {m: [networks[p.network]["methods"][m][f"{metric} {p.ood}"] for p in self.pairs] for m in methods}
            return {method: np.array(row) for method, row in rows.items()}

        methods = [method for method in listed if method in everywhere and keep(method)]
        self.tnr = values("tnr")
        self.auroc = values("auroc")
        self.methods = sorted(methods, key=lambda method: -self.tnr[method].mean())

    def chosen(self, test: Callable[[Pair], bool]) -> Values:
        return np.array([test(pair) for pair in self.pairs])

    @property
    def groups(self) -> dict[str, Values]:
        def of(body: str) -> Values:
            return self.chosen(lambda pair: pair.is_real and pair.network.startswith(body))

        groups = {
            **{title: of(body) for body, title in BODIES.items()},
            "small networks": self.chosen(lambda pair: not pair.is_real),
            "near sets": self.chosen(lambda pair: pair.is_near),
            "far sets": self.chosen(lambda pair: not pair.is_near),
            "all pairs": np.full(len(self.pairs), True),
        }
        return {name: group for name, group in groups.items() if group.any()}

    def mean(self, method: str, group: Values) -> str:
        return f"{100 * self.tnr[method][group].mean():.1f} / {100 * self.auroc[method][group].mean():.1f}"

    def ranks(self) -> dict[str, float]:
        """The mean rank of each method by TNR over all pairs; equals share the mean of their ranks."""
        rates = np.array([self.tnr[method] for method in self.methods])
        above = (rates[None] > rates[:, None]).sum(axis=1)
        equal = (rates[None] == rates[:, None]).sum(axis=1) - 1
        return dict(zip(self.methods, (1 + above + equal / 2).mean(axis=1).tolist(), strict=True))

    def worst(self, method: str) -> Pair:
        return self.pairs[int(self.tnr[method].argmin())]

    def best_other(self, method: str, group: Values) -> str:
        others = [other for other in self.methods if other != method]
        return max(others, key=lambda other: self.tnr[other][group].mean())


def reads_logits_alone(method: str) -> bool:
    known = igeood.METHODS.get(method)
    return method.endswith("(logits)") if known is None else not known.needs.reads_layers


def table(header: Sequence[str], lines: Sequence[Sequence[str]]) -> str:
    rule = "|---|" + "---:|" * (len(header) - 1)
    rows = ["| " + " | ".join(line) + " |" for line in lines]
    return "\n".join(["| " + " | ".join(header) + " |", rule, *rows]) + "\n"


def percent(value: float | None) -> str:
    return "–" if value is None else f"{100 * value:.1f}"


def means(figures: Figures, ours: str) -> str:
    """Methods by their mean TNR, with mean rank, worst pair, and on how many pairs the default is ahead or behind."""
    ranks = figures.ranks()
    groups = figures.groups
    lines = []
    for method in figures.methods:
        cells = [figures.mean(method, group) for group in groups.values()]
        ahead = int((figures.tnr[ours] > figures.tnr[method]).sum())
        behind = int((figures.tnr[ours] < figures.tnr[method]).sum())
        duel = "" if method == ours else f"{ahead} : {behind}"
        lines.append([f"`{method}`", *cells, f"{ranks[method]:.1f}", percent(figures.tnr[method].min()), duel])
    return table(["method", *groups, "mean rank", "worst pair", f"`{ours}` ahead : behind"], lines)


def headline(figures: Figures, ours: str) -> str:
    """What the means say of the default, beside the best other method of each group."""
    ranks = figures.ranks()
    by_rank = sorted(ranks, key=ranks.__getitem__)
    lines = []
    for name, group in figures.groups.items():
        other = figures.best_other(ours, group)
        beside = f"the best other method there, `{other}`, {figures.mean(other, group)}"
        lines.append(f"- {name} ({group.sum()}): `{ours}` {figures.mean(ours, group)}; {beside}.")
    places = ", ".join(f"`{method}` {ranks[method]:.1f}" for method in by_rank[:4])
    lines.append(f"- mean rank of {len(ranks)} methods: {places}; `{ours}` is number {by_rank.index(ours) + 1}.")
    worst = figures.worst(ours)
    lines.append(f"- its worst pair: {worst.network}, {worst.ood}: {percent(figures.tnr[ours].min())}.")
    return "\n".join(lines) + "\n"


def gap(figures: Figures, ours: str, peer: str) -> str:
    """Points of TNR and AUROC that the default has more than a peer."""
    lines = []
    for name, group in figures.groups.items():
        tnr, auroc = (100 * (of[ours] - of[peer])[group].mean() for of in (figures.tnr, figures.auroc))
        better = int((figures.tnr[ours] > figures.tnr[peer])[group].sum())
        lines.append([name, f"{tnr:+.1f}", f"{auroc:+.1f}", f"{better} of {group.sum()}"])
    return table([f"`{ours}` less `{peer}`", "TNR, points", "AUROC, points", "ahead on"], lines)


def losses(figures: Figures, ours: str) -> str:
    """By network, on how many pairs any other method is ahead; then the pairs where it is far ahead."""
    others = [method for method in figures.methods if method != ours]
    best = [max(others, key=lambda m: figures.tnr[m][place]) for place in range(len(figures.pairs))]
    gaps = np.array([figures.tnr[m][place] for place, m in enumerate(best)]) - figures.tnr[ours]
    lost = gaps > 0
    large = gaps > SHOWN_GAP
    behind = {method: int((figures.tnr[method] > figures.tnr[ours]).sum()) for method in others}
    most = max(behind, key=behind.__getitem__)
    text = (
        f"On {lost.sum()} of {len(lost)} pairs at least one of the {len(others)} other methods refuses more than "
        f"`{ours}`, on {large.sum()} by more than {100 * SHOWN_GAP:.0f} points.\n"
        f"The single method that is ahead of it most often is `{most}`, on {behind[most]} pairs.\n\n"
    )
    networks = list(dict.fromkeys(pair.network for pair in figures.pairs))
    counts = []
    for name in networks:
        own = figures.chosen(lambda pair, name=name: pair.network == name)
        near = own & figures.chosen(lambda pair: pair.is_near)
        far = own & ~near
        cells = [f"{(lost & part).sum()} of {part.sum()}" for part in (near, far)]
        counts.append([name, *cells, str((large & own).sum()), percent(max(0.0, gaps[own].max()))])
    header = ["network", "near pairs lost", "far pairs lost", f"by over {100 * SHOWN_GAP:.0f} points", "largest gap"]
    text += table(header, counts)
    rows = []
    for place in sorted(np.flatnonzero(large), key=lambda place: -gaps[place]):
        pair = figures.pairs[place]
        kind = "near" if pair.is_near else "far"
        rates = [percent(figures.tnr[ours][place]), f"`{best[place]}`", percent(figures.tnr[best[place]][place])]
        rows.append([pair.network, pair.ood, kind, *rates])
    header = ["network", "OOD set", "", f"`{ours}`", "best method", "its TNR"]
    return text + "\n" + table(header, rows) if rows else text


def costs(networks: dict[str, Any], methods: Sequence[str]) -> str:
    """Of the first network of each kind."""
    names = list({name.split(" ")[0].rstrip(","): name for name in reversed(networks)}.values())[::-1]
    lines = [["forward pass, µs", *(f"{networks[name]['forward']:,.0f}" for name in names)]]
    for method in methods:
        shares = (networks[n]["methods"][method]["microseconds"] / networks[n]["forward"] for n in names)
        lines.append([f"`{method}`", *(f"{100 * share:.1f}%" for share in shares)])
    return table(["method", *names], lines)


def each_network(networks: dict[str, Any], methods: Sequence[str]) -> str:
    parts = []
    for name, result in networks.items():
        counts = result["counts"]
        numbers = f"{counts['train']:,} training inputs, {counts['held out']:,} held out, {result['classes']:,} classes"
        parts += [f"### {name}", "", f"{numbers}; accuracy {100 * result['accuracy']:.2f}%.", ""]
        sets = [(ood, kind) for kind in ("near", "far") for ood in result[kind]]
        keys = [*(f" {ood}" for ood, _ in sets), ""]
        rows = ((method, result["methods"][method]) for method in methods)
        body = [
            [f"`{method}`", *(f"{percent(row['tnr' + k])} / {percent(row['auroc' + k])}" for k in keys)]
            for method, row in rows
        ]
        parts.append(table(["method", *(f"{ood} ({kind}, {counts[ood]:,})" for ood, kind in sets), "mean"], body))
        parts += [f"`{method}` is left out: {reason}.\n" for method, reason in result["left_out"].items()]
    return "\n".join(parts)


def every_figure(networks: dict[str, Any]) -> str:
    """One line of CSV for each method on each pair of a network and an OOD set."""
    lines = ["network,ood,kind,inputs,method,tnr,auroc,microseconds"]
    for name, result in networks.items():
        for ood in (*result["near"], *result["far"]):
            kind = "near" if ood in result["near"] else "far"
            about = f'"{name}","{ood}",{kind},{result["counts"][ood]}'
            for method, row in result["methods"].items():
                figures = f"{row[f'tnr {ood}']:.4f},{row[f'auroc {ood}']:.4f},{row['microseconds']:.1f}"
                lines.append(f"{about},{method},{figures}")
    return "\n".join(lines) + "\n"


def few_table(few: dict[str, dict[str, float | None]]) -> str:
    counts = list(next(iter(few.values())))
    lines = [[f"`{method}`", *(percent(row[count]) for count in counts)] for method, row in few.items()]
    return table(["method", *counts], lines)


def fault_table(faults: dict[str, Any], methods: Sequence[str]) -> str:
    chosen = ((method, faults["methods"][method]) for method in methods)
    rows = sorted(chosen, key=lambda entry: -entry[1]["tnr"])
    lines = [[f"`{method}`", *(percent(row[f"tnr {fault}"]) for fault in faults["far"])] for method, row in rows]
    return table(["method", *faults["far"]], lines)


def page(template: str, results: dict[str, Any], ours: str = OURS, black: str = BLACK) -> str:
    """The template with every `<!-- name -->` filled in."""
    networks = {name: result for name, result in results.items() if name != FAULTS}
    every = Figures(networks)
    logits = Figures(networks, reads_logits_alone)
    shown = [m for m in every.methods if m in (*every.methods[:LEADERS], ours, black, *KNOWN)]
    near = sum(pair.is_near for pair in every.pairs)
    usual = mode(result["counts"][ood] for result in networks.values() for ood in (*result["near"], *result["far"]))
    texts = {
        "counts": f"{len(networks)} networks, {sum(r['real'] for r in networks.values())} of them real; "
        f"{len(every.pairs)} pairs of a network and an OOD set, {near} near and {len(every.pairs) - near} far",
        "limit": f"{usual:,}",
        "error": f"{100 * (0.8 * 0.2 / usual) ** 0.5:.1f}",
        "default": f"`{ours}`",
        "headline": headline(every, ours),
        "means": means(every, ours),
        "logits headline": headline(logits, black),
        "logits": means(logits, black),
        "gap": gap(logits, black, PEER),
        "losses": losses(every, ours),
        "few": few_table(results[WHOLE]["few rows"]) if WHOLE in results else "",
        "faults": fault_table(results[FAULTS], shown) if FAULTS in results else "",
        "costs": costs(networks, shown),
        "networks": each_network(networks, shown),
    }
    for name, text in texts.items():
        template = template.replace(f"<!-- {name} -->", text.rstrip("\n"))
    return template.rstrip("\n") + "\n"
