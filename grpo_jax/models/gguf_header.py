"""The header of a GGUF file: metadata and where each tensor lies.

The `gguf` package reads the same in seconds for a vocabulary of 50,000, as it slices a
memory map for every string; this takes a tenth of one. Format: the specification in
ggml's docs/gguf.md (little-endian, versions 2 and 3).
"""

import math
import mmap
import struct
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import gguf
import numpy as np

from grpo_jax.config import BadInput

MAGIC = b"GGUF"
VERSIONS = (2, 3)
STRING, ARRAY = 8, 9
# Value type -> struct code; 7 is a boolean.
SCALARS = dict(zip((0, 1, 2, 3, 4, 5, 6, 7, 10, 11, 12), "BbHhIif?Qqd", strict=True))


@dataclass(frozen=True)
class GGUFTensor:
    """One stored tensor.

    Attributes:
      name: its name in the file.
      shape: sizes, slowest axis first (the file lists them the other way round).
      kind: quantisation of its blocks.
      data: uint8 view of the file, [..., bytes of a row].
    """

    name: str
    shape: tuple[int, ...]
    kind: gguf.GGMLQuantizationType
    data: np.ndarray


def read_header(path: Path) -> tuple[dict[str, Any], list[GGUFTensor]]:
    """(metadata, tensors) of a GGUF file; BadInput if it is not a whole one."""
    try:
        with path.open("rb") as file:
            view = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
        cursor = _Cursor(view)
        if view[:4] != MAGIC or cursor.skip(4).number("I") not in VERSIONS:
            raise BadInput(f"{path}: not a GGUF file of version 2 or 3")
        num_tensors, num_entries = cursor.number("Q"), cursor.number("Q")
        metadata = {}
        for _ in range(num_entries):
            key = cursor.string()
            metadata[key] = cursor.value(cursor.number("I"))
        infos = [cursor.tensor_info() for _ in range(num_tensors)]
        alignment = metadata.get("general.alignment", 32)
        start = math.ceil(cursor.position / alignment) * alignment
        return metadata, [_tensor(view, start, *info) for info in infos]
    except (struct.error, ValueError, KeyError, OSError) as error:
        raise BadInput(f"{path}: damaged or cut-off GGUF file: {error}") from error


def _tensor(view, start, name, shape, kind, offset) -> GGUFTensor:
    kind = gguf.GGMLQuantizationType(kind)
    values, size = gguf.GGML_QUANT_SIZES[kind]
    stored = (*shape[:-1], shape[-1] // values * size)
    data = np.frombuffer(view, np.uint8, math.prod(stored), start + offset)
    return GGUFTensor(name, shape, kind, data.reshape(stored))


class _Cursor:
    """Reads values one after the other."""

    def __init__(self, view: mmap.mmap):
        self.view, self.position = view, 0

    def skip(self, size: int) -> "_Cursor":
        self.position += size
        return self

    def number(self, code: str) -> Any:
        (value,) = self.numbers(code, 1)
        return value

    def numbers(self, code: str, count: int) -> tuple:
        layout = f"<{count}{code}"
        values = struct.unpack_from(layout, self.view, self.position)
        self.position += struct.calcsize(layout)
        return values

    def string(self) -> str:
        size = self.number("Q")
        raw = self.view[self.position : self.position + size]
        if len(raw) != size:
            raise ValueError("a string runs past the end")
        self.position += size
        return raw.decode("utf-8")

    def value(self, kind: int) -> Any:
        if kind == STRING:
            return self.string()
        if kind == ARRAY:
            inner, count = self.number("I"), self.number("Q")
            if inner in SCALARS:
                return list(self.numbers(SCALARS[inner], count))
            return [self.value(inner) for _ in range(count)]
        return self.number(SCALARS[kind])

    def tensor_info(self) -> tuple[str, tuple[int, ...], int, int]:
        name = self.string()
        shape = self.numbers("Q", self.number("I"))[::-1]
        return name, shape, self.number("I"), self.number("Q")
