"""Damage to files: blind, and by the rules of a format, so that the damage gets past checksums and length fields."""

import gzip
import io
import json
import random
import re
import struct
import zipfile
import zlib
from collections.abc import Callable
from contextlib import suppress

Draw = random.Random
Repack = Callable[[bytes, Draw], bytes]

NUMBERS = (0, 1, 2, 7, 127, 128, 255, 256, 4095, 32767, 65535, 65536, 10**6, 2**31 - 1, 2**31, 2**32 - 1, 2**63 - 1)
TEXTS = ("", "x", "..", "/", "\0", "9" * 400, "a" * 5000, "NaN", "é" * 40, "logits", "\n")
VALUES = (
    None, True, False, -1, 0, 1, 2**31, 2**63, 10**30, 10**400, 0.5, -0.0, 1e308, float("nan"), float("inf"), [], {},
    [[]], [None], {"": None}, [0] * 300, *TEXTS,
)  # fmt: skip


def mutate(content: bytes, draw: Draw, other: bytes = b"") -> bytes:
    """One to four wounds."""
    for _ in range(draw.choice((1, 1, 1, 2, 4))):
        content = draw.choice(WOUNDS)(content, draw) if content else draw.randbytes(draw.randrange(1, 40))
        if other and draw.random() < 0.05:
            content = content[: draw.randrange(len(content) + 1)] + other[draw.randrange(len(other)) :]
    return content


def _flip(content: bytes, draw: Draw) -> bytes:
    changed = bytearray(content)
    changed[draw.randrange(len(changed))] ^= 1 << draw.randrange(8)
    return bytes(changed)


def _byte(content: bytes, draw: Draw) -> bytes:
    at = draw.randrange(len(content))
    return content[:at] + bytes([draw.choice((0, 1, 127, 128, 255, draw.randrange(256)))]) + content[at + 1 :]


def _cut(content: bytes, draw: Draw) -> bytes:
    return content[: draw.randrange(len(content))]


def _remove(content: bytes, draw: Draw) -> bytes:
    at = draw.randrange(len(content))
    return content[:at] + content[at + draw.choice((1, 2, 4, 8, 64, 512)) :]


def _insert(content: bytes, draw: Draw) -> bytes:
    at, n = draw.randrange(len(content) + 1), draw.choice((1, 2, 4, 8, 64))
    return content[:at] + draw.choice((bytes(n), b"\xff" * n, draw.randbytes(n))) + content[at:]


def _repeat(content: bytes, draw: Draw) -> bytes:
    at, n = draw.randrange(len(content)), draw.choice((4, 16, 64, 512))
    return content[: at + n] + content[at : at + n] * draw.choice((1, 1, 2, 50)) + content[at + n :]


def _field(content: bytes, draw: Draw) -> bytes:
    """A number of one to eight bytes, of either byte order."""
    code = draw.choice("BHIQ")
    form = draw.choice("<>") + code
    size = struct.calcsize(form)
    at = draw.randrange(max(1, len(content) - size + 1))
    return content[:at] + struct.pack(form, draw.choice(NUMBERS) % 256**size) + content[at + size :]


def _digits(content: bytes, draw: Draw) -> bytes:
    """A number that is written out."""
    found = list(re.finditer(rb"\d+", content))
    if not found:
        return _field(content, draw)
    match = draw.choice(found)
    number = draw.choice((*NUMBERS, -1, int(match[0][:9]) + 1, 10**12, 10**25))
    return content[: match.start()] + str(number).encode() + content[match.end() :]


def _deep(content: bytes, draw: Draw) -> bytes:
    """Brackets in brackets, which a parser follows until its stack ends."""
    at, n = draw.randrange(len(content) + 1), draw.choice((300, 450, 700, 990, 20_000))
    return content[:at] + b"[" * n + draw.choice((b"", b"]" * n, b"0" + b"]" * n)) + content[at:]


WOUNDS = (_deep, _flip, _flip, _byte, _byte, _cut, _remove, _insert, _repeat, _field, _field, _digits)


def tree(value: object, draw: Draw) -> object:
    """A JSON value with another one somewhere in it, or with something missing."""
    if isinstance(value, dict) and value and draw.random() < 0.9:
        return _object(value, draw)
    if isinstance(value, list) and value and draw.random() < 0.8:
        at = draw.randrange(len(value))
        middle = draw.choice(([], [value[at]] * 2, [tree(value[at], draw)], [tree(value[at], draw)]))
        return value[:at] + middle + value[at + 1 :]
    return _leaf(value, draw)


def _object(value: dict, draw: Draw) -> dict:
    key = draw.choice(list(value))
    rest = {k: v for k, v in value.items() if k != key}
    if draw.random() < 0.1:
        return rest
    return {**rest, draw.choice(TEXTS): value[key]} if draw.random() < 0.05 else {**value, key: tree(value[key], draw)}


def _leaf(value: object, draw: Draw) -> object:
    if isinstance(value, str) and value and draw.random() < 0.4:
        return mutate(value.encode(), draw).decode(errors="replace")
    if draw.random() < 0.05:
        for _ in range(draw.choice((40, 300, 450, 490))):
            value = [value]
        return value
    if isinstance(value, int | float) and draw.random() < 0.3:
        return draw.choice((value + 1, -value, str(value), [value], value * 1e9, float(value)))
    return draw.choice(VALUES)


def parts_of(content: bytes) -> tuple[dict, bytes]:
    """A safetensors file's header and data."""
    size = struct.unpack("<Q", content[:8])[0]
    return json.loads(content[8 : 8 + size]), content[8 + size :]


def safetensors(content: bytes, draw: Draw) -> bytes:
    """Another header, of the length that it says."""
    header, data = parts_of(content)
    if draw.random() < 0.3 and "igeood" in header.get("__metadata__", {}):
        said = tree(json.loads(header["__metadata__"]["igeood"]), draw)
        header["__metadata__"]["igeood"] = json.dumps(said, sort_keys=True)
    else:
        header = tree(header, draw)
    text = json.dumps(header).encode()
    text = mutate(text, draw) if draw.random() < 0.2 else text
    if draw.random() < 0.02:
        text = b"[" * draw.choice((100, 100_000)) + text
    return struct.pack("<Q", len(text)) + text + (mutate(data, draw) if draw.random() < 0.1 else data)


def zipped(content: bytes, draw: Draw) -> bytes:
    """Other members, each with the checksum of what it holds."""
    with zipfile.ZipFile(io.BytesIO(content)) as archive:
        members = {name: archive.read(name) for name in archive.namelist()}
    chosen = draw.choice(list(members))
    made = io.BytesIO()
    with zipfile.ZipFile(made, "w", draw.choice((zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED))) as archive:
        for name, member in members.items():
            if name != chosen:
                archive.writestr(name, member)
                continue
            what = draw.random()
            if what < 0.05:
                continue
            renamed = mutate(name.encode(), draw).decode(errors="replace") if what < 0.1 else name
            with suppress(ValueError, IndexError):  # a name that cannot be written
                archive.writestr(
                    renamed or "x", mutate(member[:128], draw) + member[128:] if what < 0.7 else mutate(member, draw)
                )
    return made.getvalue()


def zip_fields(content: bytes, draw: Draw) -> bytes:
    """Another number in one of the archive's own records: sizes, offsets, methods, flags."""
    found = [m.start() for m in re.finditer(rb"PK(\x01\x02|\x03\x04|\x05\x06)", content)] or [0]
    at = draw.choice(found) + draw.randrange(4, 46)
    form = draw.choice(("<H", "<I"))
    return (
        content[:at]
        + struct.pack(form, draw.choice(NUMBERS) % 256 ** struct.calcsize(form))
        + content[at + struct.calcsize(form) :]
    )


def gzipped(content: bytes, draw: Draw) -> bytes:
    """Damage below the compression."""
    return gzip.compress(mutate(gzip.decompress(content), draw), 1, mtime=0)


def tar(content: bytes, draw: Draw) -> bytes:
    """Another member header, with the right checksum."""
    heads = [at for at in range(0, len(content), 512) if content[at + 257 : at + 262] == b"ustar"]
    at = draw.choice(heads)
    head = bytearray(mutate(content[at : at + 512], draw)[:512].ljust(512, b"\0"))
    if draw.random() < 0.4:
        head[156:157] = bytes([draw.choice(b"01234567LKSxgX\0")])
    if draw.random() < 0.3:
        head[124:136] = draw.choice(
            (b"77777777777\0", b"\x80" + bytes(3) + b"\xff" * 8, b"-0000000001\0", b"\xff" * 12)
        )
    head[148:156] = b"%06o\0 " % (sum(head[:148]) + 8 * 32 + sum(head[156:]))
    return content[:at] + bytes(head) + content[at + 512 :]


def tar_gz(content: bytes, draw: Draw) -> bytes:
    """The same below gzip."""
    return gzip.compress(tar(gzip.decompress(content), draw), 1, mtime=0)


def png(content: bytes, draw: Draw) -> bytes:
    """Other chunks, with right checksums."""
    if not content.startswith(b"\x89PNG"):
        return mutate(content, draw)
    at, chunks = 8, []
    while at < len(content):
        size = struct.unpack(">I", content[at : at + 4])[0]
        chunks.append((content[at + 4 : at + 8], content[at + 8 : at + 8 + size]))
        at += 12 + size
    chosen = draw.randrange(len(chunks))
    kind, data = chunks[chosen]
    if kind == b"IDAT" and draw.random() < 0.5:
        data = zlib.compress(mutate(zlib.decompress(data), draw))
    else:
        data = mutate(data, draw)
    chunks[chosen] = (kind if draw.random() < 0.9 else draw.choice((b"iCCP", b"zTXt", b"acTL", b"fdAT", b"eXIf")), data)
    packed = (struct.pack(">I", len(d)) + k + d + struct.pack(">I", zlib.crc32(k + d)) for k, d in chunks)
    return content[:8] + b"".join(packed)


def mat(content: bytes, draw: Draw) -> bytes:
    """Damage below the compression of one of MATLAB's elements, most often in its head."""
    at, elements = 128, []
    while at < len(content):
        kind, size = struct.unpack("<II", content[at : at + 8])
        elements.append((kind, content[at + 8 : at + 8 + size]))
        at += 8 + size
    chosen = draw.randrange(len(elements))
    kind, data = elements[chosen]
    plain = zlib.decompress(data) if kind == 15 else data
    plain = mutate(plain[:96], draw) + plain[96:] if draw.random() < 0.8 else mutate(plain, draw)
    elements[chosen] = (15, zlib.compress(plain, 1)) if draw.random() < 0.8 else (14, plain[8:])
    return content[:128] + b"".join(struct.pack("<II", kind, len(data)) + data for kind, data in elements)


def lines(content: bytes, draw: Draw) -> bytes:
    """Another value somewhere in one of the JSON lines."""
    every = content.splitlines()
    at = draw.randrange(len(every))
    every[at] = json.dumps(tree(json.loads(every[at]), draw)).encode()
    return b"\n".join(every) + b"\n"


def tail(content: bytes, draw: Draw) -> bytes:
    """Damage to the footer of a Parquet file, which tells where everything is."""
    size = struct.unpack("<I", content[-8:-4])[0]
    start = len(content) - 8 - size
    footer = mutate(content[start:-8], draw)
    return content[:start] + footer + struct.pack("<I", len(footer)) + b"PAR1"
