"""The parts of a run on a GPU. Each is worth having alone, and its first rows are those that matter most.

look      30 s       the machine, and whether the specialized kernel runs at all
prefill   9 minutes  time to first token: fast mode, 64 tokens after 8,192, then the rest; exact mode; its bits
kernels   9 minutes  each kernel beside its twin: attention first; the kernels' own tests; recorded steps
peers     9 minutes  attention beside torch's, cuDNN, SGLang; exact mode's price; bookkeeping; flex and FlashInfer last
"""

from __future__ import annotations

from bench.gpu.stage import Stage
from radixkv.model.attention.refused_attention import FLASHINFER, SPECIALIZED, SPECIALIZED_DEQUANTIZED

_KERNEL_IMPORTS = ("numpy", "torch", "triton")
_TEST_IMPORTS = (*_KERNEL_IMPORTS, "pytest")
ENGINE_IMPORTS = (*_KERNEL_IMPORTS, "safetensors", "sortedcontainers", "transformers", "xxhash")
# modules of the service, which no stage needs, and of what is optional
OTHER_IMPORTS = ("flashinfer", "google.protobuf", "grpc", "grpc_health", "grpc_reflection", "pytest", "xdist")

_PEERS = "sdpa_flash sdpa_cudnn cudnn_merged sglang"

# Each kernel has its own process, since an illegal access ends all work of a process on a GPU.
_TRIALS = Stage(
    "trials",
    65,
    _KERNEL_IMPORTS,
    "-m bench.gpu.trials --limit-s 45",  # with the imports before them, so that each trial gets its verdict
    "-m bench.gpu.trials --limit-s 300 --dry-run",
    gives_verdicts=True,
)

_LOOK = (
    Stage("first_look", 35, (), "-m bench.gpu.first_look"),
    Stage(
        "trials",
        40,
        _KERNEL_IMPORTS,
        f"-m bench.gpu.trials --kernels '{SPECIALIZED}' --modes fast --limit-s 22",
        f"-m bench.gpu.trials --kernels '{SPECIALIZED}' --modes fast --limit-s 300 --dry-run",
        gives_verdicts=True,
    ),
)

_PREFILL = (
    _TRIALS,
    Stage("prefill_fast", 175, ENGINE_IMPORTS, "-m bench.gpu_prefill --modes fast --rounds 3", heeds_verdicts=True),
    Stage("prefill_exact", 195, ENGINE_IMPORTS, "-m bench.gpu_prefill --modes exact --rounds 3", heeds_verdicts=True),
    Stage(
        "exact_cases",
        100,
        ENGINE_IMPORTS,
        "-m tests.model.exact.exact_cases --device cuda --dtype bfloat16 --cases 80",
        "-m tests.model.exact.exact_cases --device cpu --models-of cuda --cases 64",
        heeds_verdicts=True,
    ),
)

_KERNELS = (
    _TRIALS,
    Stage(
        "attention",
        80,
        _KERNEL_IMPORTS,
        "-m bench.kernels --kernels paged_attention --peers --variants pointers",
        heeds_verdicts=True,
    ),
    Stage(
        "specialized",
        70,
        _KERNEL_IMPORTS,
        "-m bench.kernels --kernels paged_attention --peers --variants specialized",
        heeds_verdicts=True,
        needs_kernels=(SPECIALIZED, SPECIALIZED_DEQUANTIZED),
    ),
    Stage("write_kv", 35, _KERNEL_IMPORTS, "-m bench.kernels --kernels write_kv"),
    Stage("copy_blocks", 25, _KERNEL_IMPORTS, "-m bench.kernels --kernels copy_blocks"),
    Stage("rows", 25, _KERNEL_IMPORTS, "-m bench.kernels --kernels add_rms_norm swiglu"),
    Stage("shared_prefix", 40, _KERNEL_IMPORTS, "-m bench.kernels --kernels shared_prefix", heeds_verdicts=True),
    Stage(
        "kernel_tests",
        80,
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
        heeds_verdicts=True,
    ),
)

# Steps of 2,048 tokens: those of 512 may leave the device waiting for launches, which would pass for time of the model.
_COMPARISONS = (
    _TRIALS,
    Stage(
        "attention_peers",
        105,
        _KERNEL_IMPORTS,
        f"-m bench.kernels --kernels paged_attention --variants served --peers {_PEERS}",
        takes_sglang=True,
        heeds_verdicts=True,
    ),
    Stage(
        "exactness",
        75,
        ENGINE_IMPORTS,
        "-m bench.exactness --device cuda --shape 8b --layers 32 --dtypes bfloat16 --rounds 3 --step-tokens 2048",
        "-m bench.exactness --shape tiny --dtypes float32 --rounds 1 --prompts 70 --suffixes 3",
        heeds_verdicts=True,
    ),
    Stage(
        "bookkeeping",
        55,
        ENGINE_IMPORTS,
        "-m bench.bookkeeping --device cuda --shape 8b --layers 32 --dtype bfloat16 --rounds 3 --step-tokens 2048",
        "-m bench.bookkeeping --shape tiny --rounds 1 --prompts 100 --batches 4 --generations 2 --new-tokens 5",
        heeds_verdicts=True,
    ),
    # compiled anew for each shape, by torch.compile and by nvcc: each may take all of its time
    Stage(
        "flex",
        45,
        _KERNEL_IMPORTS,
        "-m bench.kernels --kernels paged_attention --variants served --peers flex",
        heeds_verdicts=True,
    ),
    Stage(
        "flashinfer_trial",
        105,
        (*_KERNEL_IMPORTS, "flashinfer"),
        f"-m bench.gpu.trials --kernels '{FLASHINFER}' --modes fast --limit-s 90",
        is_optional=True,
        gives_verdicts=True,
    ),
    Stage(
        "flashinfer",
        40,
        (*_KERNEL_IMPORTS, "flashinfer"),
        "-m bench.kernels --kernels paged_attention --variants served --peers flashinfer_fa3",
        heeds_verdicts=True,
        needs_kernels=(FLASHINFER,),
        is_optional=True,
    ),
    Stage(
        "flashinfer_prefill",
        50,
        (*ENGINE_IMPORTS, "flashinfer"),
        "-m bench.gpu_prefill --modes fast --rounds 3 --prefixes 8192 --suffixes 64",
        heeds_verdicts=True,
        needs_kernels=(FLASHINFER,),
        is_optional=True,
    ),
)

PARTS: dict[str, tuple[Stage, ...]] = {
    "look": _LOOK,
    "prefill": _PREFILL,
    "kernels": _KERNELS,
    "peers": _COMPARISONS,
}
