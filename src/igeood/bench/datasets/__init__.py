"""Images from their official files: uint8 arrays of shape (N, 3, 32, 32), read when asked for.

The sets of the paper are known by name; `folder:PATH` and `idx:PATH` read any other folder of images, or
MNIST-like files; `demo:NAME` are small sets that need no files.
"""

from igeood.bench.datasets.catalog import DATASETS, Dataset, Download, data_root
from igeood.bench.datasets.embedded import EMBEDDED
from igeood.bench.datasets.images import ImageSet
from igeood.bench.datasets.loading import canonical, load

__all__ = ["DATASETS", "EMBEDDED", "Dataset", "Download", "ImageSet", "canonical", "data_root", "load"]
