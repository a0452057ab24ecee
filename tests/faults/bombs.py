"""Small files that claim to be large, or become so when they are unpacked; each is read under the fuzzer's limits.

python tests/faults/bombs.py told.json
"""

import gzip
import io
import json
import struct
import sys
import tempfile
import zipfile
import zlib
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))
import fuzzer
import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import readers
from picture_seeds import pictures
from PIL import Image
from safetensors.torch import save

MANY = 10**12


def npy(shape, kind="<f4", data=b"", version=(1, 0)):
    text = f"{{'descr': '{kind}', 'fortran_order': False, 'shape': {shape}, }}\n".encode()
    return b"\x93NUMPY" + bytes(version) + len(text).to_bytes(2 if version[0] == 1 else 4, "little") + text + data


def npz(member, name="logits.npy"):
    made = io.BytesIO()
    with zipfile.ZipFile(made, "w", zipfile.ZIP_DEFLATED) as archive:
        archive.writestr(name, member)
    return made.getvalue()


def parquet(width):
    lists = pa.FixedSizeListArray.from_arrays(pa.array(np.zeros(width, np.float32)), width)
    made = io.BytesIO()
    pq.write_table(pa.table({"logits": lists}), made, compression="zstd")
    return made.getvalue()


def png(width, height, data=b"", kind=0, depth=1):
    def chunk(name, content):
        return struct.pack(">I", len(content)) + name + content + struct.pack(">I", zlib.crc32(name + content))

    head = struct.pack(">IIBBBBB", width, height, depth, kind, 0, 0, 0)
    return b"\x89PNG\r\n\x1a\n" + chunk(b"IHDR", head) + chunk(b"IDAT", data) + chunk(b"IEND", b"")


def blank(kind, side, mode="L", **options):
    made = io.BytesIO()
    Image.new(mode, (side, side)).save(made, kind, **options)
    return made.getvalue()


def jpeg(side):
    content = pictures(".jpg")[0]
    at = content.index(b"\xff\xc0") + 5
    return content[:at] + struct.pack(">HH", side, side) + content[at + 4 :]


def safetensors(shape, end, name="w"):
    text = json.dumps({name: {"dtype": "F32", "shape": shape, "data_offsets": [0, end]}}).encode()
    return struct.pack("<Q", len(text)) + text


def mat(count, data, claimed=None):
    """SVHN's X with so many images, and y; compressed."""

    def element(kind, content, size=None):
        return struct.pack("<II", kind, len(content) if size is None else size) + content + bytes(-len(content) % 8)

    def matrix(name, shape, content, size):
        body = element(6, struct.pack("<II", 9, 0)) + element(5, np.array(shape, "<i4").tobytes())
        body += element(1, name) + element(2, content, size)
        packed = zlib.compress(struct.pack("<II", 14, len(body)) + body)
        return struct.pack("<II", 15, len(packed)) + packed

    x = matrix(b"X", (32, 32, 3, count), data, claimed)
    return bytes(124) + b"\0\1IM" + x + matrix(b"y", (count, 1), b"\1" * min(count, 1000), count)


def idx_gz(count, data):
    return gzip.compress(bytes([0, 0, 8, 3]) + np.array([count, 28, 28], ">u4").tobytes() + data, mtime=0)


def bombs():
    """By the reader's name: what it is, and the file."""
    deep = b"[" * 100_000
    return {
        "logits .npz": {
            "10^12 rows in the header": npz(npy((MANY, 10))),
            "10^12 values in a row": npz(npy((1, MANY))),
            "a row of 2^63": npz(npy((1, 2**63))),
            "less than nothing": npz(npy((-5, 3), data=bytes(600))),
            "100 MB of zeros in a row": npz(npy((1, 25 * 10**6), data=bytes(10**8))),
            "a header of 100 MB": npz(b"\x93NUMPY\2\0" + struct.pack("<I", 10**8) + b" " * 10**8),
            "a header of nested brackets": npz(npy("(" * 20_000 + ")" * 20_000)),
        },
        "logits .parquet": {
            "10^7 values in a row of fixed length": parquet(10**7),
        },
        "weights .safetensors": {
            "10^12 values": safetensors([MANY], 4 * MANY),
            "a header of 2^60 bytes": struct.pack("<Q", 2**60) + b"{}",
            "a header of nested brackets": struct.pack("<Q", len(deep)) + deep,
            "a shape that overflows": safetensors([2**62, 8], 0),
        },
        "guard": {
            "10^12 values": safetensors([MANY], 4 * MANY),
            "JSON of nested brackets": save({}, {"igeood": deep.decode()}),
        },
        "image .png": {
            "a million by a million": png(10**6, 10**6),
            "64 million pixels of zeros": png(8192, 8192, zlib.compress(bytes(8192 * 1025))),
            "a row of two billion": png(2**31 - 1, 1),
            "text of 20 MB": png(8, 8).replace(b"\0\0\0\0IDAT", _text(20_000_000) + b"\0\0\0\0IDAT", 1),
        },
        "image .jpg": {"65,535 by 65,535": jpeg(65535), "8,000 by 8,000": jpeg(8000)},
        "image .gif": {"16 million pixels of one colour": blank("GIF", 4000)},
        "image .webp": {"16 million pixels of one colour": blank("WEBP", 4000, "RGB", lossless=True, method=0)},
        "image .tif": {"16 million pixels of one colour": blank("TIFF", 4000, compression="tiff_deflate")},
        "dataset svhn": {
            "a million images, and no more": mat(10**6, b"", 3072 * 10**6),
            "an element of 4 GB": mat(3, b"", 2**32 - 1),
            "30,000 images of zeros": mat(30_000, bytes(3072 * 30_000)),
        },
        "idx .gz": {
            "4 billion images": idx_gz(2**32 - 1, b""),
            "100,000 images of zeros": idx_gz(10**5, bytes(784 * 10**5)),
        },
        "results": {"nested brackets": deep + b"\n"},
        "half download": {"nested brackets": deep},
        "manifest": {"nested brackets": deep},
    }  # fmt: skip


def _text(size):
    content = b"Comment\0\0" + zlib.compress(bytes(size))
    return struct.pack(">I", len(content)) + b"zTXt" + content + struct.pack(">I", zlib.crc32(b"zTXt" + content))


def main():
    told, known = {}, {reader.name: reader for reader in readers.readers()}
    fuzzer.TIMES_COMPRESSED = fuzzer.TIMES  # no right file is among these
    for name, files in bombs().items():
        readers.damaged = lambda *given, files=files: list(files.values())[given[2]]
        with tempfile.TemporaryDirectory() as folder:
            runner = fuzzer.Fuzzer([name], 1, 1, 0, Path(folder))
            runner.counts[name] = len(files)
            runner.go()
        why = {failure["number"]: failure["why"] for failure in runner.failures}
        for number, (what, content) in enumerate(files.items()):
            found = {"outcome": runner.each[name, number], "why": why.get(number, ""), "bytes": len(content)}
            told[f"{name}: {what}"] = {**found, "tolerant": known[name].tolerant}
    Path(sys.argv[1]).write_text(json.dumps(told))


if __name__ == "__main__":
    main()
