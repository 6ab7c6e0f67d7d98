"""Writes a GGUF file with the matrices of another one in Q8_0, and everything else unchanged.

python -m bench.parts.peers.gguf_requantized SOURCE FILE
"""

from __future__ import annotations

import sys


def main(source: str, file: str) -> None:
    """Write the file."""
    import gguf

    reader = gguf.GGUFReader(source)
    q8_0 = gguf.GGMLQuantizationType.Q8_0
    writer = gguf.GGUFWriter(file, reader.fields["general.architecture"].contents())
    for name, field in reader.fields.items():
        if name in ("general.architecture", "general.file_type") or name.startswith("GGUF."):
            continue
        value_type = field.types[0]
        element_type = field.types[-1] if value_type == gguf.GGUFValueType.ARRAY else None
        writer.add_key_value(name, field.contents(), value_type, sub_type=element_type)
    writer.add_file_type(gguf.LlamaFileType.MOSTLY_Q8_0)
    for tensor in reader.tensors:
        if len(tensor.shape) == 1:  # the weights of norms, and biases
            writer.add_tensor(tensor.name, tensor.data, raw_dtype=tensor.tensor_type)
        else:
            weights = gguf.quants.dequantize(tensor.data, tensor.tensor_type)
            writer.add_tensor(tensor.name, gguf.quants.quantize(weights, q8_0), raw_dtype=q8_0)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


if __name__ == "__main__":
    main(*sys.argv[1:])
