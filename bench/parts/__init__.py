"""Parts of the benchmarks: workloads, servers, inputs, timing, reports, and peers in `peers`."""
