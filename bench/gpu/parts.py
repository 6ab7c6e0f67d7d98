"""The parts of a run on a GPU. Each is useful alone, and takes the most important measurements first.

product   9 minutes  real servers over gRPC: exactness, tiers, TTFT, decoding; prefill without a server; kernels and
                     their peers; a server out of memory; tests
look      2 minutes  the machine, and whether the warp-specialized kernel runs
prefill   9 minutes  time to first token in fast mode (first for 64 new tokens that follow 8,192 cached ones, then for
                     the other sizes), then in exact mode; checks that exact mode is exact
kernels   9 minutes  each kernel except linear layers, and its reference: attention first; the kernels' own tests; CUDA
                     graphs
peers     9 minutes  attention of torch, cuDNN, FlashAttention 3 and SGLang; the cost of exact mode; bookkeeping; flex
                     and FlashInfer last
"""

from __future__ import annotations

from bench.gpu.stage import Stage
from radixkv.model.attention.refused_attention import FLASHINFER, SPECIALIZED, SPECIALIZED_DEQUANTIZED

_KERNEL_IMPORTS = ("numpy", "torch", "triton")
_TEST_IMPORTS = (*_KERNEL_IMPORTS, "pytest")
ENGINE_IMPORTS = (*_KERNEL_IMPORTS, "safetensors", "sortedcontainers", "transformers", "xxhash")
_SERVER_IMPORTS = (*ENGINE_IMPORTS, "google.protobuf", "grpc")
# Further modules. A report names those that are missing; not every part needs them.
REPORTED_IMPORTS = ("flashinfer", "google.protobuf", "grpc", "grpc_health", "grpc_reflection", "pytest", "xdist")

# Peers of `bench.attention_peers` that need no compiler. If a package is missing, such as the wheel of fa3_fwd, the
# report has the reason.
_PEERS = "sdpa_flash sdpa_cudnn cudnn_merged fa3_fwd sglang"

# Each kernel has its own process, since after an illegal access a process cannot use the GPU any more. A first process
# warms the machine up, and a trial that timed out is repeated while no other trial runs. All of this has 85 s, less
# than the 95 s of the stage, so that the trial of every kernel ends before the stage is killed.
_TRIALS = Stage(
    "trials",
    95,
    _KERNEL_IMPORTS,
    "-m bench.gpu.trials --limit-s 30 --seconds 85",
    "-m bench.gpu.trials --limit-s 300 --dry-run",
    tries_kernels=True,
)

_LOOK = (
    Stage("first_look", 45, (), "-m bench.gpu.first_look"),
    Stage(
        "trials",
        75,
        _KERNEL_IMPORTS,
        f"-m bench.gpu.trials --kernels '{SPECIALIZED}' --modes fast --limit-s 22 --seconds 65",
        f"-m bench.gpu.trials --kernels '{SPECIALIZED}' --modes fast --limit-s 300 --dry-run",
        tries_kernels=True,
    ),
)

# The stages from `start` to `decode` share two servers. Those that check correctness come before those that measure.
_PRODUCT = (
    Stage("warm", 60, _SERVER_IMPORTS, "-m bench.gpu.product.warm", tries_kernels=True),
    Stage("start", 110, _SERVER_IMPORTS, "-m bench.gpu.product.start", uses_passed_kernels=True, servers="start"),
    Stage("bits", 55, _SERVER_IMPORTS, "-m bench.gpu.product.bits", servers="use"),
    Stage("tiers", 35, _SERVER_IMPORTS, "-m bench.gpu.product.tiers", servers="use"),
    Stage("quiet", 10, _SERVER_IMPORTS, "-m bench.gpu.product.quiet", servers="use"),
    Stage("replay", 40, _SERVER_IMPORTS, "-m bench.gpu.product.replay", servers="use"),
    Stage("decode", 30, _SERVER_IMPORTS, "-m bench.gpu.product.decode", servers="use"),
    Stage(
        "headline",
        100,
        ENGINE_IMPORTS,
        "-m bench.gpu_prefill --shape 8b --prefixes 8192 --suffixes 64 2048 --rounds 3 --modes fast exact",
        "-m bench.gpu_prefill --dry-run --suffixes 5 --prefixes 130 --modes fast exact",
        uses_passed_kernels=True,
    ),
    Stage(
        "attention",
        40,
        _KERNEL_IMPORTS,
        "-m bench.kernels --kernels paged_attention linear --attentions 2 --variants plain "
        "--peers sdpa_flash cudnn_merged fa3_fwd",
        "-m bench.kernels --dry-run --kernels paged_attention linear --variants plain --peers sdpa_flash",
        uses_passed_kernels=True,
    ),
    Stage("oom", 30, _SERVER_IMPORTS, "-m bench.gpu.product.oom", uses_passed_kernels=True),
    Stage(
        "gpu_tests",
        25,
        (*ENGINE_IMPORTS, "pytest"),
        "-m bench.gpu.counted_tests tests/model/layers/test_gpu_layers.py tests/model/test_exactness_on_gpu.py "
        "tests/model/attention/test_triton_kernels.py",
        "-m bench.gpu.counted_tests -n 0 tests/model/test_exactness_on_gpu.py",
    ),
)

_PREFILL = (
    _TRIALS,
    Stage(
        "prefill_fast", 165, ENGINE_IMPORTS, "-m bench.gpu_prefill --modes fast --rounds 3", uses_passed_kernels=True
    ),
    Stage(
        "prefill_exact", 185, ENGINE_IMPORTS, "-m bench.gpu_prefill --modes exact --rounds 3", uses_passed_kernels=True
    ),
    Stage(
        "exact_cases",
        95,
        ENGINE_IMPORTS,
        "-m tests.model.exact.exact_cases --device cuda --dtype bfloat16 --cases 80",
        "-m tests.model.exact.exact_cases --device cpu --models-of cuda --cases 64",
        uses_passed_kernels=True,
    ),
)

_KERNELS = (
    _TRIALS,
    Stage(
        "attention",
        75,
        _KERNEL_IMPORTS,
        "-m bench.kernels --kernels paged_attention --peers --variants pointers",
        uses_passed_kernels=True,
    ),
    Stage(
        "specialized",
        70,
        _KERNEL_IMPORTS,
        "-m bench.kernels --kernels paged_attention --peers --variants specialized",
        uses_passed_kernels=True,
        needs_kernels=(SPECIALIZED, SPECIALIZED_DEQUANTIZED),
    ),
    Stage("write_kv", 35, _KERNEL_IMPORTS, "-m bench.kernels --kernels write_kv"),
    Stage("copy_blocks", 25, _KERNEL_IMPORTS, "-m bench.kernels --kernels copy_blocks"),
    Stage("rows", 25, _KERNEL_IMPORTS, "-m bench.kernels --kernels add_rms_norm swiglu"),
    Stage("shared_prefix", 40, _KERNEL_IMPORTS, "-m bench.kernels --kernels shared_prefix", uses_passed_kernels=True),
    Stage(
        "kernel_tests",
        65,
        _TEST_IMPORTS,
        "-m bench.gpu.counted_tests tests/kernels/gpu/test_write_kv.py tests/kernels/gpu/test_copy_blocks.py "
        "tests/kernels/gpu/test_attention.py tests/kernels/gpu/test_dequantize_blocks.py "
        "tests/kernels/gpu/test_linear.py tests/kernels/gpu/test_norm.py tests/kernels/gpu/test_swiglu.py "
        "tests/kernels/gpu/test_low_rank.py tests/kernels/gpu/test_hadamard.py",
        "-m bench.gpu.counted_tests tests/kernels/gpu/test_copy_blocks.py",
    ),
    Stage(
        "specialized_tests",
        40,
        _TEST_IMPORTS,
        "-m bench.gpu.counted_tests tests/kernels/gpu/test_hopper_attention.py",
        "-m bench.gpu.counted_tests tests/kernels/gpu/test_hopper_attention.py -k 'softcap or support'",
        needs_kernels=(SPECIALIZED,),
    ),
    Stage(
        "graphs",
        70,
        (*ENGINE_IMPORTS, "pytest"),
        "-m bench.gpu.counted_tests tests/compute/graphs/test_graphs_on_gpu.py",
        "-m bench.gpu.counted_tests tests/compute/graphs/test_graphs.py -k smallest",
        uses_passed_kernels=True,
    ),
)

# `--step-tokens 2048`: in steps of 512 tokens the device may wait for launches, which would count as time of the model.
_COMPARISONS = (
    _TRIALS,
    Stage(
        "attention_peers",
        95,
        _KERNEL_IMPORTS,
        f"-m bench.kernels --kernels paged_attention --variants served --peers {_PEERS}",
        takes_sglang=True,
        uses_passed_kernels=True,
    ),
    Stage(
        "exactness",
        65,
        ENGINE_IMPORTS,
        "-m bench.exactness --device cuda --shape 8b --layers 32 --dtypes bfloat16 --rounds 3 --step-tokens 2048",
        "-m bench.exactness --shape tiny --dtypes float32 --rounds 1 --prompts 70 --suffixes 3",
        uses_passed_kernels=True,
    ),
    Stage(
        "bookkeeping",
        55,
        ENGINE_IMPORTS,
        "-m bench.bookkeeping --device cuda --shape 8b --layers 32 --dtype bfloat16 --rounds 3 --step-tokens 2048",
        "-m bench.bookkeeping --shape tiny --rounds 1 --prompts 100 --batches 4 --generations 2 --new-tokens 5",
        uses_passed_kernels=True,
    ),
    # The remaining stages compile kernels for each shape, with torch.compile or nvcc, and may need their whole limits.
    Stage(
        "flex",
        45,
        _KERNEL_IMPORTS,
        "-m bench.kernels --kernels paged_attention --variants served --peers flex",
        uses_passed_kernels=True,
    ),
    Stage(
        "flashinfer_trial",
        105,
        (*_KERNEL_IMPORTS, "flashinfer"),
        f"-m bench.gpu.trials --kernels '{FLASHINFER}' --modes fast --limit-s 90",
        is_optional=True,
        tries_kernels=True,
    ),
    Stage(
        "flashinfer",
        35,
        (*_KERNEL_IMPORTS, "flashinfer"),
        "-m bench.kernels --kernels paged_attention --variants served --peers flashinfer_fa3",
        uses_passed_kernels=True,
        needs_kernels=(FLASHINFER,),
        is_optional=True,
    ),
    Stage(
        "flashinfer_prefill",
        45,
        (*ENGINE_IMPORTS, "flashinfer"),
        "-m bench.gpu_prefill --modes fast --rounds 3 --prefixes 8192 --suffixes 64",
        uses_passed_kernels=True,
        needs_kernels=(FLASHINFER,),
        is_optional=True,
    ),
)

PARTS: dict[str, tuple[Stage, ...]] = {
    "product": _PRODUCT,
    "look": _LOOK,
    "prefill": _PREFILL,
    "kernels": _KERNELS,
    "peers": _COMPARISONS,
}
