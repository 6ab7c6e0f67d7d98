import struct

import pytest

from radixkv.errors import ConfigError
from radixkv.model_files.gguf_file import TENSOR_TYPES, GgufFile, GgufTensor

STRING, ARRAY, UINT32, FLOAT32, UINT64 = 8, 9, 4, 6, 10


def text(value):
    encoded = value.encode() if isinstance(value, str) else value
    return struct.pack("<Q", len(encoded)) + encoded


def key(name, kind, value):
    return text(name) + struct.pack("<I", kind) + value


def tensor(name, shape, kind, offset=0):
    return text(name) + struct.pack(f"<I{len(shape)}QIQ", len(shape), *shape[::-1], kind, offset)


NAME = key("general.architecture", STRING, text("llama"))


def gguf_bytes(keys=(NAME,), tensors=(), data=b"", version=3):
    header = b"GGUF" + struct.pack("<IQQ", version, len(tensors), len(keys)) + b"".join((*keys, *tensors))
    return header + bytes(-len(header) % 32) + data


@pytest.fixture
def read(tmp_path):
    def read_bytes(data):
        (tmp_path / "model.gguf").write_bytes(data)
        return GgufFile.read(tmp_path / "model.gguf")

    return read_bytes


def test_metadata_and_tensors_are_read(read):
    keys = (
        NAME,
        key("a.number", UINT32, struct.pack("<I", 7)),
        key("a.float", FLOAT32, struct.pack("<f", 0.5)),
        key("a.large", UINT64, struct.pack("<Q", 2**40)),
        key("a.flag", 7, b"\1"),
        key("a.list", ARRAY, struct.pack("<IQ3i", 5, 3, -1, 0, 1)),
        key("a.texts", ARRAY, struct.pack("<IQ", STRING, 2) + text("x") + text(b"\xff")),
        key("a.empty", ARRAY, struct.pack("<IQ", STRING, 0)),
    )
    tensors = (tensor("m", (3, 64), 2), tensor("n", (5,), 0, 128))
    file = read(gguf_bytes(keys, tensors, bytes(128 + 20)))
    assert file.metadata == {
        "general.architecture": "llama",
        "a.number": 7,
        "a.float": 0.5,
        "a.large": 2**40,
        "a.flag": True,
        "a.list": (-1, 0, 1),
        "a.texts": ("x", "\ufffd"),
        "a.empty": (),
    }
    start = file.tensors["m"].offset
    assert start % 32 == 0
    assert file.tensors == {
        "m": GgufTensor((3, 64), "Q4_0", start, 3 * 2 * 18),
        "n": GgufTensor((5,), "F32", start + 128, 20),
    }
    assert file.architecture == "llama"
    assert file.num_bytes_by_type == {"Q4_0": 108, "F32": 20}


@pytest.mark.parametrize(
    ("kinds", "dtype"),
    [((0,), "float32"), ((1, 0), "float16"), ((1, 30), "bfloat16"), ((0, 14), "bfloat16"), ((), "float32")],
)
def test_the_dtype_is_that_of_the_matrices(read, kinds, dtype):
    tensors = [tensor(f"m{index}", (1, 256), kind) for index, kind in enumerate(kinds)]
    assert read(gguf_bytes((NAME,), (*tensors, tensor("n", (8,), 0)), bytes(4096))).dtype == dtype


def test_types_are_those_of_the_package_gguf():
    gguf = pytest.importorskip("gguf")
    sizes = {int(kind): (kind.name, *size) for kind, size in gguf.GGML_QUANT_SIZES.items()}
    assert {kind: sizes[kind] for kind in TENSOR_TYPES} == TENSOR_TYPES


def test_data_begins_at_the_alignment_of_the_file(read):
    keys = (NAME, key("general.alignment", UINT32, struct.pack("<I", 256)))
    assert read(gguf_bytes(keys, (tensor("n", (1,), 0),), bytes(300))).tensors["n"].offset == 256


@pytest.mark.parametrize(
    ("data", "message"),
    [
        (b"", "which is empty: download the file again"),
        (b"GG", r"which begins with b'GG' instead of GGUF$"),
        (b"<html>", "which begins with b'<htm' instead of GGUF"),
        (b"version https://git-lfs.github.com/spec/v1", "a pointer of Git LFS: run git lfs pull"),
        (b"GGUF\3\0\0", "which ends in its header: download the file again"),
        (gguf_bytes(version=1), "of version 1: expected version 2 or 3, little-endian"),
        (b"GGUF" + struct.pack(">IQQ", 3, 0, 0), "of a big-endian machine: expected version 2 or 3"),
        (gguf_bytes((key("split.count", 2, b"\2\0"),)), "one of 2 parts of a model: join them with llama-gguf-split"),
        (gguf_bytes((key("general.type", STRING, text("adapter")),)), "which holds no language model but adapter"),
        (gguf_bytes((key("general.architecture", STRING, text("clip")),)), "no language model but a vision encoder"),
        (gguf_bytes((NAME,), (tensor("t", (4,), 99),)), "whose tensor t has the type 99; supported are F32, F16, Q4_0"),
        (gguf_bytes((NAME,), (tensor("t", (33,), 2),)), "whose tensor t has rows of 33 numbers, not of whole blocks"),
        (gguf_bytes((NAME,), (tensor("t", (32, 32), 0),), bytes(100)), r"which is cut off after \d+ of \d+ bytes"),
        (gguf_bytes((key("general.alignment", UINT32, bytes(4)),)), "whose general.alignment is 0"),
    ],
)
def test_bad_files_are_refused_with_what_to_do(read, data, message):
    with pytest.raises(ConfigError, match=message) as caught:
        read(data)
    assert str(caught.value).startswith("model.path: expected a GGUF file")


@pytest.mark.parametrize(
    "damaged",
    [
        key("a", 77, b"1234"),
        key("a", ARRAY, struct.pack("<IQ", ARRAY, 1) + struct.pack("<IQ", UINT32, 1)),
        key("a", ARRAY, struct.pack("<IQ", STRING, 2**60)),
        key("a", ARRAY, struct.pack("<IQ", UINT64, 2**63)),
        struct.pack("<Q", 2**64 - 1),
    ],
)
def test_damaged_lengths_and_types_are_refused(read, damaged):
    with pytest.raises(ConfigError, match="which ends or is damaged in its header: download the file again"):
        read(gguf_bytes((damaged,)))
    with pytest.raises(ConfigError, match="which ends or is damaged in its header: download the file again"):
        read(gguf_bytes((NAME,), (text("t") + struct.pack("<I", 2**31),)))


def test_every_cut_of_a_file_is_refused(read):
    keys = (NAME, key("a.texts", ARRAY, struct.pack("<IQ", STRING, 2) + text("x") + text("yy")))
    whole = gguf_bytes(keys, (tensor("m", (2, 32), 2), tensor("n", (3,), 0, 64)), bytes(64 + 12))
    assert read(whole).tensors.keys() == {"m", "n"}
    for length in range(len(whole)):
        with pytest.raises(ConfigError):
            read(whole[:length])


def test_every_changed_byte_is_read_or_refused(read):
    """Only ConfigError is raised, and no memory is allocated for lengths beyond the end of the file."""
    whole = gguf_bytes((NAME,), (tensor("m", (2, 32), 2), tensor("n", (3,), 0, 64)), bytes(64 + 12))
    for position in range(len(whole) - (64 + 12)):  # of the header
        for value in (0, 1, 127, 255):
            data = bytearray(whole)
            data[position] = value
            try:
                read(bytes(data))
            except ConfigError as error:
                assert len(str(error)) < 1000  # noqa: PT017
