"""The plots that reports and the paper's figures share: plain arrays in, a matplotlib figure out, and `save`.

A figure is 6.3 inches wide, a page's column, or `NARROW`, a telephone's, where that is asked for; its letters have 8
points or more. A method has one colour everywhere.
"""

from igeood.figures.curves import (
    Curve,
    CurvePanel,
    contributions,
    precision_recall_curves,
    roc_curves,
    tuning_curve,
    tuning_curves,
)
from igeood.figures.drawing import (
    ID_COLOUR,
    ID_LABEL,
    NARROW,
    OOD_LABEL,
    SMALL,
    STYLE,
    TITLE,
    Values,
    blank,
    label,
    legend,
    ood_colours,
    render,
    save,
)
from igeood.figures.histograms import (
    GaussianPanel,
    HistogramPanel,
    LayerPanel,
    LayerRow,
    gaussianity,
    histogram,
    layer_histograms,
    score_histograms,
)

__all__ = [
    "ID_COLOUR", "ID_LABEL", "NARROW", "OOD_LABEL", "SMALL", "STYLE", "TITLE", "Curve", "CurvePanel", "GaussianPanel",
    "HistogramPanel", "LayerPanel", "LayerRow", "Values", "blank", "contributions", "gaussianity",
    "histogram", "label", "layer_histograms", "legend", "ood_colours", "precision_recall_curves", "render",
    "roc_curves", "save", "score_histograms", "tuning_curve", "tuning_curves",
]  # fmt: skip
