"""Reads the header of a GGUF file: its metadata, and the position of each tensor.

The reader of the package gguf is not used because it creates several arrays for each string: it took 4.1 s of CPU time
for a vocabulary of 49,000 tokens, and this one 0.09 s.

    offset 0   GGUF, version, number of tensors, number of keys
               keys and values: hyperparameters, vocabulary, chat template
               name, shape, type and offset of each tensor
    aligned    data of the tensors
"""

from __future__ import annotations

import mmap
import struct
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import Any, NamedTuple

from radixkv.errors import ConfigError

# Types by their number in a file: name, numbers per block, bytes per block. The format never renumbers them.
TENSOR_TYPES = {
    0: ("F32", 1, 4),
    1: ("F16", 1, 2),
    2: ("Q4_0", 32, 18),
    3: ("Q4_1", 32, 20),
    6: ("Q5_0", 32, 22),
    7: ("Q5_1", 32, 24),
    8: ("Q8_0", 32, 34),
    10: ("Q2_K", 256, 84),
    11: ("Q3_K", 256, 110),
    12: ("Q4_K", 256, 144),
    13: ("Q5_K", 256, 176),
    14: ("Q6_K", 256, 210),
    16: ("IQ2_XXS", 256, 66),
    17: ("IQ2_XS", 256, 74),
    18: ("IQ3_XXS", 256, 98),
    19: ("IQ1_S", 256, 50),
    20: ("IQ4_NL", 32, 18),
    21: ("IQ3_S", 256, 110),
    22: ("IQ2_S", 256, 82),
    23: ("IQ4_XS", 256, 136),
    29: ("IQ1_M", 256, 56),
    30: ("BF16", 1, 2),
    34: ("TQ1_0", 256, 54),
    35: ("TQ2_0", 256, 66),
    39: ("MXFP4", 32, 17),
}
# Types that are not quantized.
FLOAT_TYPES = ("F32", "F16", "BF16")
# Quantized types that take 4 bits in the memory of a CPU. Other quantized types take 8.
FOUR_BIT_TYPES = ("Q4_0", "Q4_1", "Q4_K")

_SCALARS = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "?", 10: "Q", 11: "q", 12: "d"}
_STRING, _ARRAY = 8, 9
_MAGIC = b"GGUF"
_VERSIONS = (2, 3)
_MAX_DIMENSIONS = 4
_AGAIN = "download the file again"


def has_magic(path: Path) -> bool:
    """Whether a file begins with the magic number of GGUF. False if it cannot be read."""
    try:
        with open(path, "rb") as file:
            return file.read(4) == _MAGIC
    except OSError:
        return False


class GgufTensor(NamedTuple):
    """The position and the format of a tensor in a file.

    Attributes:
        shape: dimensions in the order of torch.
        type: one of `TENSOR_TYPES`, such as `Q4_K`.
        offset: bytes from the beginning of the file.
        num_bytes: size in the file.
    """

    shape: tuple[int, ...]
    type: str
    offset: int
    num_bytes: int


@dataclass(frozen=True, slots=True)
class GgufFile:
    """The header of a GGUF file.

    Attributes:
        path: the file.
        metadata: values by key. Arrays are tuples.
        tensors: the tensors by name, in the order of the file.
    """

    path: Path
    metadata: dict[str, Any]
    tensors: dict[str, GgufTensor]

    @classmethod
    def read(cls, path: str | Path) -> GgufFile:
        """Read the header, and check that the file is complete. The data of tensors is not read.

        Raises:
            ConfigError: the file cannot be read, is not a GGUF file, is truncated, is one part of several, or has
                tensors of an unknown type. The message contains the reason, and a remedy if there is one.
        """
        try:
            with open(path, "rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as data:
                return _Reader(Path(path), data).read()
        except OSError as error:
            raise ConfigError(f"model.path: expected a readable GGUF file, got {path}: {error.strerror}") from error
        except ValueError as error:  # an empty file can't be mapped
            raise ConfigError(f"model.path: expected a GGUF file, got {path}, which is empty: {_AGAIN}") from error

    @property
    def architecture(self) -> str:
        """The family of the model, such as `llama`."""
        return str(self.metadata.get("general.architecture", ""))

    @property
    def num_bytes_by_type(self) -> dict[str, int]:
        """Bytes of the tensors of each type, in descending order."""
        sizes: dict[str, int] = {}
        for each in self.tensors.values():
            sizes[each.type] = sizes.get(each.type, 0) + each.num_bytes
        return dict(sorted(sizes.items(), key=lambda item: -item[1]))

    @property
    def dtype(self) -> str:
        """The dtype for computing: bfloat16 if matrices are quantized, otherwise that of the matrices."""
        types = {each.type for each in self.tensors.values() if len(each.shape) > 1}
        if types <= {"F32"}:
            return "float32"
        return "float16" if types <= {"F32", "F16"} else "bfloat16"


class _CutOff(Exception):
    """The header continues after the end of the file, or a length in it is damaged."""


class _Reader:
    def __init__(self, path: Path, data: mmap.mmap) -> None:
        self._path = path
        self._data = data
        self._size = len(data)
        self._at = 0

    def read(self) -> GgufFile:
        num_tensors, num_keys = self._read_start()
        try:
            metadata = {self._string(): self._value(self._number("I")) for _ in range(num_keys)}
            self._require_whole(metadata)
            entries = [self._entry() for _ in range(num_tensors)]
        except _CutOff as error:
            raise self._error(f"which ends or is damaged in its header: {_AGAIN}") from error
        alignment = metadata.get("general.alignment", 32)
        if not isinstance(alignment, int) or alignment < 1:
            raise self._error(f"whose general.alignment is {alignment!r}: {_AGAIN}")
        start = -(-self._at // alignment) * alignment
        tensors = {name: self._tensor(name, shape, kind, start + offset) for name, shape, kind, offset in entries}
        end = max((each.offset + each.num_bytes for each in tensors.values()), default=0)
        if end > self._size:
            raise self._error(f"which is cut off after {self._size} of {end} bytes: {_AGAIN}")
        return GgufFile(self._path, metadata, tensors)

    def _read_start(self) -> tuple[int, int]:
        magic = self._data[:4]
        if magic != _MAGIC:
            what = f"which begins with {magic!r} instead of GGUF"
            if self._data[:7] == b"version":
                what += "; it seems to be a pointer of Git LFS: run git lfs pull"
            raise self._error(what)
        self._at = 4
        try:
            version, num_tensors, num_keys = self._number("I"), self._number("Q"), self._number("Q")
        except _CutOff as error:
            raise self._error(f"which ends in its header: {_AGAIN}") from error
        if version not in _VERSIONS:
            is_swapped = int.from_bytes(version.to_bytes(4, "little"), "big") in _VERSIONS
            what = "of a big-endian machine" if is_swapped else f"of version {version}"
            raise self._error(f"{what}: expected version 2 or 3, little-endian; convert the model again")
        return num_tensors, num_keys

    def _require_whole(self, metadata: dict[str, Any]) -> None:
        """Refuse files that are not a complete language model."""
        count, kind = metadata.get("split.count", 0), metadata.get("general.type", "model")
        if isinstance(count, int) and count > 1:
            raise self._error(f"one of {count} parts of a model: join them with llama-gguf-split --merge")
        if kind != "model" or metadata.get("general.architecture") == "clip":
            raise self._error(f"which holds no language model but {kind if kind != 'model' else 'a vision encoder'}")

    def _entry(self) -> tuple[str, tuple[int, ...], int, int]:
        name, num_dimensions = self._string(), self._number("I")
        if num_dimensions > _MAX_DIMENSIONS:
            raise _CutOff
        shape = tuple(self._number("Q") for _ in range(num_dimensions))
        return name, shape[::-1], self._number("I"), self._number("Q")

    def _tensor(self, name: str, shape: tuple[int, ...], kind: int, offset: int) -> GgufTensor:
        if kind not in TENSOR_TYPES:
            known = ", ".join(each for each, *_ in TENSOR_TYPES.values())
            raise self._error(f"whose tensor {name} has the type {kind}; supported are {known}")
        type_name, per_block, block_bytes = TENSOR_TYPES[kind]
        if shape and shape[-1] % per_block:
            raise self._error(f"whose tensor {name} has rows of {shape[-1]} numbers, not of whole blocks: {_AGAIN}")
        return GgufTensor(shape, type_name, offset, prod(shape) // per_block * block_bytes)

    def _value(self, kind: int, *, is_nested: bool = False) -> Any:
        if kind in _SCALARS:
            return self._number(_SCALARS[kind])
        if kind == _STRING:
            return self._string()
        if kind != _ARRAY or is_nested:
            raise _CutOff
        kind, count = self._number("I"), self._number("Q")
        if kind not in _SCALARS:
            if count > self._size // 8:  # a length of 8 bytes each
                raise _CutOff
            return tuple(self._value(kind, is_nested=True) for _ in range(count))
        form = f"<{count}{_SCALARS[kind]}"
        if count > self._size or self._at + struct.calcsize(form) > self._size:
            raise _CutOff
        values = struct.unpack_from(form, self._data, self._at)
        self._at += struct.calcsize(form)
        return values

    def _number(self, form: str) -> Any:
        form = f"<{form}"
        end = self._at + struct.calcsize(form)
        if end > self._size:
            raise _CutOff
        (value,) = struct.unpack_from(form, self._data, self._at)
        self._at = end
        return value

    def _string(self) -> str:
        length = self._number("Q")
        if length > self._size - self._at:
            raise _CutOff
        text = self._data[self._at : self._at + length].decode("utf-8", "replace")
        self._at += length
        return text

    def _error(self, what: str) -> ConfigError:
        return ConfigError(f"model.path: expected a GGUF file of a language model, got {self._path}, {what}")
