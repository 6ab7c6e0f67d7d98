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
# Quantized types whose weights take 4 bits each in the memory of a CPU. Weights of other quantized types take 8.
FOUR_BIT_TYPES = ("Q4_0", "Q4_1", "Q4_K")

# Types of metadata by their number in a file: the codes of `struct` for scalars, then strings and arrays.
_SCALARS = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "?", 10: "Q", 11: "q", 12: "d"}
_STRING, _ARRAY = 8, 9
_MAGIC = b"GGUF"
_LFS_START = b"version"  # of a text file that Git LFS leaves in place of a large file
_VERSIONS = (2, 3)
_MAX_DIMENSIONS = 4
_REMEDY = "download the file again"


def has_magic(path: Path) -> bool:
    """Whether a file begins with the magic number of GGUF. False if it cannot be read."""
    try:
        with open(path, "rb") as file:
            return file.read(len(_MAGIC)) == _MAGIC
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
            raise ConfigError(f"model.path: expected a GGUF file, got {path}, which is empty: {_REMEDY}") from error

    @property
    def architecture(self) -> str:
        """The family of the model, such as `llama`."""
        return str(self.metadata.get("general.architecture", ""))

    @property
    def num_bytes_by_type(self) -> dict[str, int]:
        """Bytes of the tensors of each type, the type with the most bytes first."""
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


class _DamagedHeader(Exception):
    """The header continues after the end of the file, or contains an impossible length or type."""


class _Reader:
    """Reads a header. The methods that read something continue at `_position`, and move it."""

    def __init__(self, path: Path, data: mmap.mmap) -> None:
        self._path = path
        self._data = data
        self._size = len(data)
        self._position = 0

    def read(self) -> GgufFile:
        num_tensors, num_keys = self._read_start()
        try:
            metadata = {}
            for _ in range(num_keys):
                key = self._read_string()
                metadata[key] = self._read_value(self._read_number("I"))
            self._require_language_model(metadata)
            entries = [self._read_entry() for _ in range(num_tensors)]
        except _DamagedHeader as error:
            raise self._error(f"which ends or is damaged in its header: {_REMEDY}") from error
        alignment = metadata.get("general.alignment", 32)
        if not isinstance(alignment, int) or alignment < 1:
            raise self._error(f"whose general.alignment is {alignment!r}: {_REMEDY}")
        data_start = -(-self._position // alignment) * alignment
        tensors = {name: self._tensor(name, shape, kind, data_start + offset) for name, shape, kind, offset in entries}
        data_end = max((each.offset + each.num_bytes for each in tensors.values()), default=0)
        if data_end > self._size:
            raise self._error(f"which is cut off after {self._size} of {data_end} bytes: {_REMEDY}")
        return GgufFile(self._path, metadata, tensors)

    def _read_start(self) -> tuple[int, int]:
        magic = self._data[: len(_MAGIC)]
        if magic != _MAGIC:
            problem = f"which begins with {magic!r} instead of GGUF"
            if self._data[: len(_LFS_START)] == _LFS_START:
                problem += "; it seems to be a pointer of Git LFS: run git lfs pull"
            raise self._error(problem)
        self._position = len(_MAGIC)
        try:
            version, num_tensors, num_keys = self._read_number("I"), self._read_number("Q"), self._read_number("Q")
        except _DamagedHeader as error:
            raise self._error(f"which ends in its header: {_REMEDY}") from error
        if version not in _VERSIONS:
            is_swapped = int.from_bytes(version.to_bytes(4, "little"), "big") in _VERSIONS
            problem = "of a big-endian machine" if is_swapped else f"of version {version}"
            raise self._error(f"{problem}: expected version 2 or 3, little-endian; convert the model again")
        return num_tensors, num_keys

    def _require_language_model(self, metadata: dict[str, Any]) -> None:
        """Refuse files that are not a complete language model."""
        count, kind = metadata.get("split.count", 0), metadata.get("general.type", "model")
        if isinstance(count, int) and count > 1:
            raise self._error(f"one of {count} parts of a model: join them with llama-gguf-split --merge")
        if kind != "model" or metadata.get("general.architecture") == "clip":
            raise self._error(f"which holds no language model but {kind if kind != 'model' else 'a vision encoder'}")

    def _read_entry(self) -> tuple[str, tuple[int, ...], int, int]:
        """Return name, shape, number of the type, and offset of a tensor from the beginning of all data."""
        name, num_dimensions = self._read_string(), self._read_number("I")
        if num_dimensions > _MAX_DIMENSIONS:
            raise _DamagedHeader
        shape = tuple(self._read_number("Q") for _ in range(num_dimensions))
        return name, shape[::-1], self._read_number("I"), self._read_number("Q")

    def _tensor(self, name: str, shape: tuple[int, ...], kind: int, offset: int) -> GgufTensor:
        if kind not in TENSOR_TYPES:
            supported = ", ".join(type_name for type_name, *_ in TENSOR_TYPES.values())
            raise self._error(f"whose tensor {name} has the type {kind}; supported are {supported}")
        type_name, per_block, block_bytes = TENSOR_TYPES[kind]
        if shape and shape[-1] % per_block:
            raise self._error(f"whose tensor {name} has rows of {shape[-1]} numbers, not of whole blocks: {_REMEDY}")
        return GgufTensor(shape, type_name, offset, prod(shape) // per_block * block_bytes)

    def _read_value(self, kind: int, *, is_nested: bool = False) -> Any:
        if kind in _SCALARS:
            return self._read_number(_SCALARS[kind])
        if kind == _STRING:
            return self._read_string()
        if kind != _ARRAY or is_nested:
            raise _DamagedHeader
        element_kind, count = self._read_number("I"), self._read_number("Q")
        if element_kind not in _SCALARS:
            if count > self._size // 8:  # each string begins with its length, in 8 bytes
                raise _DamagedHeader
            return tuple(self._read_value(element_kind, is_nested=True) for _ in range(count))
        struct_format = f"<{count}{_SCALARS[element_kind]}"
        if count > self._size or self._position + struct.calcsize(struct_format) > self._size:
            raise _DamagedHeader
        values = struct.unpack_from(struct_format, self._data, self._position)
        self._position += struct.calcsize(struct_format)
        return values

    def _read_number(self, type_code: str) -> Any:
        struct_format = f"<{type_code}"
        end = self._position + struct.calcsize(struct_format)
        if end > self._size:
            raise _DamagedHeader
        (value,) = struct.unpack_from(struct_format, self._data, self._position)
        self._position = end
        return value

    def _read_string(self) -> str:
        length = self._read_number("Q")
        if length > self._size - self._position:
            raise _DamagedHeader
        text = self._data[self._position : self._position + length].decode("utf-8", "replace")
        self._position += length
        return text

    def _error(self, problem: str) -> ConfigError:
        return ConfigError(f"model.path: expected a GGUF file of a language model, got {self._path}, {problem}")
