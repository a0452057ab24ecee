"""docs/pictures/surprise.svg and sum.svg: a term's surprise, and how the terms of three inputs add up.

make demo && python benchmarks/pictures.py
"""

import math
from pathlib import Path

import torch

import igeood
from igeood.bench import datasets
from igeood.bench.demo import BATCH, IMAGES, KNOWN
from igeood.bench.runs import load_network

ROOT = Path(__file__).parent.parent
OUT = ROOT / "docs" / "pictures"
LAYER = "layer1"
BLUE, RED, GREY, INK = "#0072B2", "#c2410c", "#8a8fa8", "#1f2544"
COLOURS = ("#08306b", "#2171b5", "#4a9bd0", "#7fbfdd", "#b5d9ec", "#D55E00")  # of places, from the input to the output
WIDTH = 360  # about that of a telephone's page, so that 13 are 13 pixels there


def text(x, y, words, anchor="start", colour=INK):
    return f'<text x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}" font-size="13" fill="{colour}">{words}</text>'


def line(points, colour=GREY, style=""):
    path = " L".join(f"{x:.1f} {y:.1f}" for x, y in points)
    return f'<path d="M{path}" stroke="{colour}" fill="none" {style}/>'


def box(x, y, width, height, colour, style=""):
    return f'<rect x="{x:.1f}" y="{y:.1f}" width="{width:.1f}" height="{height:.1f}" fill="{colour}" {style}/>'


def write(name, height, title, shapes):
    size = f'viewBox="0 0 {WIDTH} {height}" width="{1.3 * WIDTH:.0f}" height="{1.3 * height:.0f}"'
    head = f'<svg xmlns="http://www.w3.org/2000/svg" {size} role="img" font-family="system-ui, sans-serif">'
    page = [head, f"<title>{title}</title>", box(0, 0, WIDTH, height, "#ffffff", 'rx="10"'), *shapes, "</svg>"]
    (OUT / name).write_text("\n".join(page) + "\n", encoding="utf-8")


def surprise(detector):
    """One term: counted up to the 90th percentile, exponential beyond it."""
    place = detector.term_names.index(f"{LAYER}: distance")
    pairs = zip(detector.knots_[place].tolist(), detector.surprises_[place].tolist(), strict=True)
    knots = [(t, s) for t, s in pairs if math.isfinite(t)]
    excess, (last, level) = float(detector.excess_[place]), knots[-1]
    print(f"{LAYER}: {len(knots)} points, q90 {last:.3f}, surprise there {level:.3f}, excess {excess:.4f}")
    low, high = knots[0][0] - 0.05, last + 5.5 * excess

    def at(t, s):
        return 80 + 268 * (t - low) / (high - low), 290 - 32 * s

    shapes = [text(10, 20, "surprise s(t) in nats, and as a share")]
    for count in (1, 10, 100, 1000):
        y = at(low, math.log(count))[1]
        shapes.append(line([(80, y), (348, y)], "#dde0ea"))
        shapes += [text(74, y - 2, f"{math.log(count):.1f}", "end"), text(74, y + 13, f"1 in {count:,}", "end")]
    for quarter in range(math.ceil(4 * low), math.ceil(4 * high)):
        x, y = at(quarter / 4, 0)
        shapes += [line([(x, y), (x, y + 4)]), text(x, y + 18, f"{quarter / 4:.2f}", "middle")]
    shapes.append(line([at(last, 0), at(last, 5.7)], GREY, 'stroke-dasharray="4 3"'))
    shapes += [text(348, 328, f"t = log M of {LAYER}", "end"), text(*at(last, 5.9), f"q90 = {last:.2f}", "middle")]
    shapes.append(line([at(last, level), at(high, level + 5.5)], RED, 'stroke-width="2.5"'))
    corners = [(last + 2 * excess, level + 2), (last + 3 * excess, level + 2), (last + 3 * excess, level + 3)]
    left, right, _ = points = [at(*corner) for corner in corners]
    shapes += [line(points, INK), text(right[0] + 5, right[1] - 12, "1 nat"), text(left[0] + 4, left[1] + 16, "β")]
    shapes.append(line([at(*knot) for knot in knots], BLUE, 'stroke-width="2"'))
    shapes += ['<circle cx="{:.1f}" cy="{:.1f}" r="2.2" fill="#0072B2"/>'.format(*at(*knot)) for knot in knots]
    for row, words in enumerate(("counted:", f"{len(knots)} grid points")):
        shapes.append(text(92, 185 + 17 * row, words, colour=BLUE))
    for row, words in enumerate(("tail:", "slope 1/β", f"β = {excess:.3f}")):
        shapes.append(text(at(last, 0)[0] + 10, 238 + 17 * row, words, colour=RED))
    write("surprise.svg", 338, "The surprise of a term: counted up to the 90th percentile, exponential beyond", shapes)


def total(limit, places, rows):
    """Terms of inputs as stacked bars: of each place the distance, then the direction."""
    scale = 320 / max(row.sum() for row in rows.values())
    shapes = []
    for number, (title, row) in enumerate(rows.items()):
        top, start, score = 30 + 62 * number, 14.0, float(row.sum())
        shapes.append(text(14, top - 9, f"{title}: {score:.1f}, {'refused' if score > limit else 'kept'}"))
        for place, colour in zip(dict.fromkeys(places), COLOURS, strict=True):
            values = [float(value) for value, name in zip(row, places, strict=True) if name == place]
            print(f"{title}: {place} {' + '.join(f'{value:.2f}' for value in values)}")
            for value in values:
                shapes.append(box(start, top, scale * value, 26, colour, 'stroke="#fff" stroke-width="0.6"'))
                start += scale * value
        shapes.append(line([(14 + scale * limit, top - 4), (14 + scale * limit, top + 30)], INK, 'stroke-width="2.5"'))
    shapes.append(text(14 + scale * limit, 202, f"threshold: {limit:.1f} nats", "middle"))
    for number, (place, colour) in enumerate(zip(dict.fromkeys(places), COLOURS, strict=True)):
        left, top = 14 + 116 * (number % 3), 220 + 24 * (number // 3)
        shapes += [box(left, top, 14, 14, colour), text(left + 20, top + 12, place)]
    write("sum.svg", 270, "Terms of three inputs beside the threshold", shapes)


def main():
    folder = ROOT / "build" / "demo"
    network = load_network(str(folder / "weights.safetensors"))
    guard = igeood.load(folder / "guard.safetensors", network.model)
    places = [name.split(":")[0] for name in guard.detector.term_names]
    limit = guard.calibration.threshold
    sets = [datasets.load(name, limit=IMAGES) for name in (KNOWN, "demo:letters", "demo:left-out")]
    batches = [torch.cat([batch[0] for batch in network.batches(images, BATCH)]) for images in sets]
    digits, letters, others = (guard.explain(x).contributions for x in batches)
    letters, others = (rows[rows.sum(dim=1) > limit] for rows in (letters, others))
    first = torch.tensor([place in places[:2] for place in places])
    usual = digits[(digits.sum(dim=1) - digits.sum(dim=1).median()).abs().argmin()]
    early = letters[(letters[:, first].sum(dim=1) / letters.sum(dim=1)).argmax()]
    late = others[(others[:, -2:].sum(dim=1) / others.sum(dim=1)).argmax()]
    surprise(guard.detector)
    total(limit, places, {"a usual digit": usual, "a letter, strange early": early, "an 8 or 9, strange output": late})


if __name__ == "__main__":
    main()
