"""The stages of `python -m bench.gpu --part product`, which run real servers over gRPC on a GPU."""
