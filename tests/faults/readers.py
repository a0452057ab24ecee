"""Every reader of files that the library has, with its seeds, and the damage that is done to them.

Readers come from the catalogues where there is one: a new data set, image format, kind of archive or method gets its
seeds here, or `test_every_reader_has_seeds` fails.
"""

import ast
import random
import re
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path

import mutations as m
import picture_seeds as p
import seeds as s

import igeood
from igeood.datasets import DATASETS, Dataset, load
from igeood.datasets.loading import SUFFIXES
from igeood.datasets.unpack import ARCHIVES

PACKAGE = Path(igeood.__file__).parent


@dataclass(frozen=True)
class Reader:
    """Something that reads files.

    Attributes
    ----------
    name : str
    place : str
        The file that is damaged, below a folder of its own.
    seeds : function
        Right files.
    read : function
        Reads the file, and fails if what it gives cannot be right.
    ways : tuple
        Damage by the rules of the format, beside the blind one.
    covers : tuple of str
        The functions that open the file.
    beside : mapping
        Other files that have to be there.
    share : float
        Of the inputs.
    compressed : bool
        Whether the format compresses so well that right files may need many times their size in memory.
    blind : bool
        Whether it gets blind damage too.
    foreign : bool
        Whether even the seeds are refused: a format that users take for one of ours.
    seconds : float
        Of processor time that an input may take; pages with pictures need more.
    tolerant : bool
        Whether a damaged file counts as none.
    """

    name: str
    place: str
    seeds: Callable[[], list[bytes]]
    read: Callable[[Path], object]
    ways: tuple[m.Repack, ...] = ()
    covers: tuple[str, ...] = ()
    beside: Mapping[str, bytes] = field(default_factory=dict)
    share: float = 1.0
    compressed: bool = False
    blind: bool = True
    foreign: bool = False
    seconds: float = 1.0
    tolerant: bool = False


GUARD, KEPT, NETWORK = "g.safetensors", "set/000000.safetensors", "n.safetensors"


def _guards() -> list[bytes]:
    return list(s.guards().values())


def _sealed() -> list[Reader]:
    """Files with a seal: damaged, and forged by somebody who knows how to seal them."""
    sealed, forged = (m.safetensors,), (s.forged,)
    told, resumed = ("report.promise.promises",), ("networks.training.load",)
    recalled = ("benchmark.observing.recall", "benchmark.observing._read")
    return [
        Reader("guard", GUARD, _guards, s.read_guard, sealed, ("storage.read", "storage._record"), share=6),
        Reader("guard, forged", GUARD, _guards, s.read_forged_guard, forged, ("access.load",), share=1.5, blind=False),
        Reader("guard, promised", GUARD, _guards, s.read_promise, forged, told, share=0.3, blind=False),
        Reader("checkpoint", "c.training", s.checkpoints, s.read_checkpoint, sealed, resumed, share=0.05),
        Reader("checkpoint, forged", "c.training", s.checkpoints, s.read_checkpoint, forged, share=0.05, blind=False),
        Reader("kept outputs", KEPT, s.kept, s.read_kept, sealed, recalled, tolerant=True),
        Reader("kept outputs, forged", KEPT, s.kept, s.read_kept, forged, blind=False, tolerant=True),
    ]  # fmt: skip


def _models() -> list[Reader]:
    weights, shown = ("networks.weights.read_weights", "networks.weights._vetted"), ("demo._trained",)
    logits = tuple(f"logits_files.{name}" for name in ("read_logits", "_opened", "_head", "_take"))
    npz, parquet = (lambda suffix=suffix: s.logits_files(suffix) for suffix in (".npz", ".parquet"))
    zipped, tensors = (m.zipped, m.zip_fields), (m.safetensors,)
    return [
        Reader("weights .safetensors", "w.safetensors", s.weights, s.read_weights, tensors, weights, share=3),
        Reader("weights .pt", "w.pt", s.state_dicts, s.read_weights, zipped, share=4),
        Reader("network", NETWORK, s.networks, s.read_network, tensors, share=0.1),
        Reader("demonstration", NETWORK, s.demo_weights, s.read_demo, tensors, shown, share=0.05, foreign=True),
        Reader("logits .npz", "x.npz", npz, s.read_logits_file, zipped, logits, share=4),
        Reader("logits .npy", "x.npy", s.npy_files, s.read_logits_file, share=0.5, foreign=True),
        Reader("logits .parquet", "x.parquet", parquet, s.read_logits_file, (m.tail,), share=4, compressed=True),
    ]  # fmt: skip


def _records() -> list[Reader]:
    """Our own JSON."""
    manifest = {"cifar-10-batches-bin/test_batch.bin": p.cifar(DATASETS["cifar-10"])[0][:3073]}
    stored, part = ("datasets.store._compare", "datasets.download.file_digest"), ("datasets.download._resumable",)
    half, lines, own = b'{"url": "http://x/y", "validator": "v"}\n', (m.lines,), {"tolerant": True, "share": 0.5}
    written = ("results.jsonl", "tunings.jsonl", "networks.jsonl", "commands.jsonl", "scores/msp-svhn.safetensors")
    return [
        Reader("manifest", ".igeood/cifar-10.json", s.manifests, s.read_manifest, lines, stored, manifest, **own),
        Reader("half download", "y.part.json", lambda: [half], s.read_part, lines, part, {"y.part": b"a"}, **own),
        Reader("results", "results.jsonl", lambda: [s.results()["results.jsonl"]], s.read_lines, (m.lines,), share=2),
        *map(_report, written),
    ]  # fmt: skip


def _report(file: str) -> Reader:
    beside = {name: content for name, content in s.results().items() if name != file}
    if not file.startswith("results"):  # a small table is soon drawn; scores are what takes time
        beside["results.jsonl"] = s.results()["results.jsonl"].splitlines()[0] + b"\n"
    scores = file.startswith("scores")
    beside = {name: content for name, content in beside.items() if scores or not name.startswith("scores")}
    ways = (s.forged,) if scores else (m.lines,)
    covers = ("report.evidence.scores",) if scores else ("benchmark.results._read",)
    name = f"report {Path(file).parts[0].removesuffix('.jsonl')}"
    limits = {"share": 0.005, "blind": False, "seconds": 10.0}
    return Reader(name, file, lambda: [s.results()[file]], s.read_report, ways, covers, beside, **limits)


KINDS: dict[str, tuple[Callable[[Dataset], list[bytes]], tuple[m.Repack, ...], tuple[str, ...]]] = {
    "cifar": (p.cifar, (), ("datasets.records._mapped",)),
    "mat": (p.mat, (m.mat,), ("datasets.records.read_mat", "datasets.records._matrix")),
    "images": (p.photographs, (m.png,), ("datasets.images.prepare_file", "datasets.images._bytes")),
}


def _dataset(dataset: Dataset) -> Reader:
    seeds, ways, covers = KINDS[dataset.kind]
    images = dataset.kind == "images"
    place = dataset.layouts["test"][0][0] + ("/a.png" if images else "")

    def read(path: Path) -> None:
        found = load(dataset.name, root=path.parents[place.count("/")])
        p.check(found)
        found.digest()

    name, share = f"dataset {dataset.name}", 0.4 if images else 2
    return Reader(name, place, lambda: seeds(dataset), read, ways, covers, share=share, compressed=images)


def _image(suffix: str) -> Reader:
    ways = (m.png,) if suffix == ".png" else ()
    return Reader(
        f"image {suffix}", f"a{suffix}", lambda: p.pictures(suffix), p.read_folder, ways, share=1.5, compressed=True
    )


def _archive(suffix: str) -> Reader:
    covers = ("datasets.unpack._tar", "datasets.unpack._zip")
    ways = {".zip": (m.zipped, m.zip_fields), ".tar": (m.tar,)}.get(suffix, (m.tar_gz, m.gzipped))
    return Reader(f"archive {suffix}", f"x{suffix}", lambda: p.archives(suffix), p.read_archive, ways, covers, share=2)


def _idx() -> list[Reader]:
    plain, covers = p.idx(2, 5, 4), ("datasets.records.read_idx", "datasets.records._read_idx")
    labels, images = "t10k-labels-idx1-ubyte", {"t10k-images-idx3-ubyte": plain}
    return [
        Reader("idx", "x-idx3-ubyte", lambda: [plain, p.idx(3, 32, 32)], p.read_idx, (), covers, share=2),
        Reader("idx .gz", "x.gz", lambda: [p.gz(plain)], p.read_idx, (m.gzipped,), share=2),
        Reader("idx labels", labels, lambda: [p.idx(2)], p.read_idx_folder, beside=images),
    ]


@cache
def readers() -> tuple[Reader, ...]:
    sets = [_dataset(dataset) for dataset in DATASETS.values() if dataset.kind != "noise"]
    pictures = [*map(_image, sorted(SUFFIXES)), *map(_archive, ARCHIVES)]
    return (*_sealed(), *_models(), *_idx(), *_records(), *sets, *pictures)


OPENERS = re.compile(
    r"(\b(safe_open|load_file|loadmat|whosmat|memmap|fromfile|frombuffer|loadtxt|genfromtxt|read_bytes|read_text|"
    r"ParquetFile|read_table|ZipFile|GzipFile|read_magic|Unpickler|literal_eval)"
    r"|^(torch|np|numpy|json|pickle|marshal|tarfile|gzip|bz2|lzma|image|Image|storage|csv|yaml|tomllib)"
    r"\.(load|loads|open|read|reader))$"
)
OWN = {  # what reads only what the package itself carries, or has just made
    "report.page._render": "the package's template",
    "paper.reported.load": "the package's table",
    "cli._guards.load_guard": "only through storage.read, and a guard's loader",
    "paper.plots.histograms": "only through storage.read",
    "benchmark.results.find": "its own JSON",
    "benchmark.results.append": "its own JSON",
}


def opening_functions() -> set[str]:
    """Functions of the package that open or decode a file, by their names in its sources."""
    found = set()
    for path in PACKAGE.rglob("*.py"):
        module = ".".join(path.relative_to(PACKAGE).with_suffix("").parts)
        for function in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(function, ast.FunctionDef):
                calls = (node for node in ast.walk(function) if isinstance(node, ast.Call))
                if any(OPENERS.search(ast.unparse(call.func)) or _binary(call) for call in calls):
                    found.add(f"{module}.{function.name}")
    return found


def _binary(call: ast.Call) -> bool:
    """`path.open("rb")`."""
    return (
        isinstance(call.func, ast.Attribute)
        and call.func.attr == "open"
        and any(isinstance(a, ast.Constant) and a.value in ("r", "rb") for a in call.args)
    )


def damaged(reader: Reader, seeds: list[bytes], number: int, run: int) -> bytes:
    """The input of this number: always the same."""
    draw = random.Random(f"{run} {reader.name} {number}")
    seed = draw.choice(seeds)
    if reader.ways and (not reader.blind or draw.random() < 0.5):
        with suppress(Exception):  # a way that does not suit this seed, as torch's older format is no zip
            return draw.choice(reader.ways)(seed, draw)
    return m.mutate(seed, draw, draw.choice(seeds))
