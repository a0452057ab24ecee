"""Figures as parts of a page: SVG that takes the page's colours."""

import re
from zlib import crc32

import numpy as np
from markupsafe import Markup, escape

from igeood.bench.figures.drawing import NARROW, OOD_LABEL, Figure, Values, render
from igeood.bench.figures.histograms import HistogramPanel, score_histograms

THEMED = {"#000000": "currentColor", "#0072b2": "var(--blue)", "#882255": "var(--wine)", "#f0e442": "var(--yellow)"}

Drawing = tuple[Markup, str]  # an SVG, which has its own text for those who don't see it; and the caption below


def draw(figure: Figure, alt: str, caption: str) -> Drawing:
    """A figure as SVG inside HTML; no two that differ have the same identifiers."""
    text = render(figure, "svg", letters=True).decode()
    text = re.sub(r"<!--.*?-->|<(metadata|style)\b.*?</\1>", "", text[text.index("<svg ") :], flags=re.DOTALL)
    text = re.sub(r">\s*\n\s*<", "><", text)
    text = re.sub(r'="[^"<>]*"', lambda value: _tidy(value[0]), text)
    text = re.sub(r'( id="|url\(#|href="#)', rf"\g<1>f{crc32((alt + text).encode()):x}-", text)
    label = f' role="img" aria-label="{escape(alt)}">'
    text = re.sub(r'<svg [^>]*?(viewBox="[^"]+")[^>]*>', lambda tag: f"<svg {tag[1]}{label}", text, count=1)
    return Markup(text), caption  # noqa: S704 (matplotlib escapes what it is given)


def _tidy(value: str) -> str:
    """An attribute with two digits after a point, and the page's colours where others are hard to see on some page."""
    value = re.sub(r"\d+\.\d{2,}", lambda n: f"{float(n[0]):.2f}".rstrip("0").rstrip("."), value)
    return re.sub(r"#[0-9a-f]{6}", lambda colour: THEMED.get(colour[0], colour[0]), value)


def histogram(name: str, known: Values, foreign: Values, threshold: float) -> Drawing:
    """Scores of an OOD set beside known ones, with a threshold."""
    kept = 100 * np.mean(known <= threshold)
    refused = 100 * np.mean(foreign > threshold)
    alt = (
        f"Histogram of scores: in-distribution median {number(np.median(known))}, {name} median "
        f"{number(np.median(foreign))}; the threshold {number(threshold)} keeps {kept:.1f}% of {len(known):,} known "
        f"images and refuses {refused:.1f}% of {len(foreign):,} foreign ones."
    )
    figure = score_histograms([HistogramPanel("", known, {OOD_LABEL: foreign}, threshold)], NARROW)
    return draw(figure, alt, f"{name}: {refused:.1f}% refused")


def number(value: float) -> str:
    """A score in four digits, with a minus sign.

    >>> number(-1.62412)
    '−1.624'
    """
    return f"{value:.4g}".replace("-", "−")
