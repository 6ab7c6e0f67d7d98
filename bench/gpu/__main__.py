"""Runs one part of the GPU benchmarks, or all parts: `python -m bench.gpu --out FOLDER --part NAME`."""

from bench.gpu.run import run_and_exit

if __name__ == "__main__":
    run_and_exit()
