import json
import re
import subprocess
import sys

import pytest

from radixkv.service.cli.main import main
from tests.patience import PATIENCE_S
from tests.service.command_line import usage_error
from tests.service.serving import WITHOUT_ENGINE

LLAMA_8B = ("--layers", "32", "--query-heads", "32", "--kv-heads", "8", "--head-dim", "128")
CARD = ("--memory-gb", "24", "--weights-gb", "16", "--overhead-gb", "1")


def plan(capsys, *arguments):
    assert main(["plan", *arguments]) == 0
    out, err = capsys.readouterr()
    assert err == ""
    return out


def plan_json(capsys, *arguments):
    return json.loads(plan(capsys, *arguments, "--json"))


def refusal(capsys, *arguments):
    assert main(["plan", *arguments]) == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert err.count("\n") == 1
    return err.removeprefix("radixkv: ").rstrip("\n")


@pytest.fixture
def model(tmp_path):
    fields = {
        "hidden_size": 8192,
        "num_attention_heads": 64,
        "num_hidden_layers": 80,
        "num_key_value_heads": 8,
        "dtype": "float16",
    }
    (tmp_path / "config.json").write_text(json.dumps(fields))
    (tmp_path / "model.safetensors.index.json").write_text('{"metadata": {"total_size": 141107412992}}')
    return tmp_path


def test_a_plan_prints_a_table_for_each_question(capsys):
    arguments = ("--batch", "16", "--block-size", "16", "--context", "35", *CARD, "--shared-prefix", "2Ki")
    out = plan(capsys, *LLAMA_8B, *arguments, "--requests", "1000", "--params-b", "8", "--new-tokens", "128")
    assert (
        out
        == """\
bytes per token
  stored     32 layers x 2 x 8 KV heads x 128, bf16
  per token  131,072 bytes, 128.00 KiB (131.07 kB)
  per rank   131,072 bytes, 128.00 KiB (131.07 kB), tp 1

cache size
  per sequence  35 tokens, 4.38 MiB (4.59 MB)
  the batch     16 sequences, 73,400,320 bytes, 70.00 MiB (73.40 MB)
  per rank      73,400,320 bytes, 70.00 MiB (73.40 MB)

users that fit on one device
  memory                 22.35 GiB (24.00 GB)
    weights              14.90 GiB (16.00 GB)
    overhead             953.67 MiB (1.00 GB)
    left for K/V         6.52 GiB (7.00 GB)
  per user               6.00 MiB (6.29 MB)
  users                  1,112
  cache.capacity_tokens  53,392

attention kinds, 560 tokens
       stored per layer  bytes per token  cache
  MHA  2 x 32 x 128      524,288          280.00 MiB (293.60 MB)
  GQA  2 x 8 x 128       131,072          70.00 MiB (73.40 MB)    this model
  MQA  2 x 1 x 128       16,384           8.75 MiB (9.18 MB)
  MLA  512 + 64          36,864           19.69 MiB (20.64 MB)

blocks and waste
  per block     16 tokens, 2.00 MiB (2.10 MB)
  per sequence  35 tokens in 3 blocks
  last block    3 used, 13 free
  waste         1.62 MiB (1.70 MB), 27.08 %

sharing a prefix of 2,048 tokens, 1,000 requests
                   shared                  unshared
  tokens computed  2,048                   2,048,000
  blocks           128                     128,000
  memory           256.00 MiB (268.44 MB)  250.00 GiB (268.44 GB)

load or recompute
  load         3.28 us per token, PCIe at 40 GB/s
  recompute    16.18 us per token, 8B params at 989 TFLOP/s
  HBM to PCIe  83.8x, HBM at 3350 GB/s

decoding 128 tokens after 35, one attention layer
  without K/V cache  1,715.427 GFLOP
  with K/V cache     21.969 GFLOP
  ratio              78.08x
"""
    )


def test_states_of_sequences_are_counted(capsys, tmp_path):
    """LFM2 with 1.2 billion parameters: 6 layers have attention, 10 keep two inputs of 2,048 numbers."""
    fields = {
        "conv_L_cache": 3,
        "full_attn_idxs": [2, 5, 8, 10, 12, 14],
        "hidden_size": 2048,
        "num_attention_heads": 32,
        "num_hidden_layers": 16,
        "num_key_value_heads": 8,
        "dtype": "bfloat16",
    }
    (tmp_path / "config.json").write_text(json.dumps(fields))
    options = ("--model", str(tmp_path), "--batch", "8", "--context", "1000", "--weights-gb", "2.34")
    out = plan(capsys, *options, "--memory-gb", "4")
    assert (
        """
states of sequences
  per state  81,920 bytes, 80.00 KiB (81.92 kB)
  the batch  8 running sequences, 640.00 KiB (655.36 kB)
  snapshots  120, 9.38 MiB (9.83 MB), cache.state_bytes by default
"""
        in out
    )
    numbers = plan_json(capsys, *options, "--memory-gb", "4")
    state_bytes = 10 * 2 * 2048 * 2  # layers, inputs, numbers per input, bytes per number
    assert (numbers["state_bytes"], numbers["batch_state_bytes"]) == (state_bytes, 8 * state_bytes)
    assert numbers["snapshots"] == 120
    token_bytes = 6 * 2 * 8 * 64 * 2  # layers, K and V, KV heads, numbers per head, bytes per number
    assert numbers["token_bytes"] == token_bytes
    assert numbers["user_bytes"] == 1024 * token_bytes + state_bytes  # 1,000 tokens in whole blocks of 64
    free_bytes = 1_660_000_000  # 4 GB of memory without 2.34 GB of weights
    users = free_bytes // numbers["user_bytes"]
    assert numbers["users"] == users
    # The capacity is as large as possible: one block more would not fit. Snapshots get a tenth of the bytes of K/V.
    kv_bytes = numbers["capacity_tokens"] * token_bytes
    needed_bytes = kv_bytes * 1.1 + users * state_bytes
    assert needed_bytes <= free_bytes < needed_bytes + 64 * token_bytes * 1.1


TIERS = ("--tier", "host=16GB,disk=200GB,redis=unbounded")


def test_tiers_have_tokens_and_whether_loading_is_faster(capsys):
    rates = ("--tier-gb-s", "host=25,redis=2.5", "--tier-ms", "disk=1,redis=20", "--prefill-tokens-per-s", "20000")
    out = plan(capsys, *LLAMA_8B, *TIERS, *rates)
    assert out.endswith(
        """\
tiers, blocks of 64 tokens
         tokens     load a block                           compute it  same time at      faster to load
  host   122,048    335.5 us, 25 GB/s                      3,200.0 us  190,735 tokens/s  always
  disk   1,525,120  2,796.2 us, 3 GB/s + 1 ms per call     3,200.0 us  22,888 tokens/s   from 192 tokens on
  redis  unbounded  3,355.4 us, 2.5 GB/s + 20 ms per call  3,200.0 us  19,073 tokens/s   never
"""
    )


def test_json_has_the_numbers_of_each_tier(capsys):
    tree = plan_json(
        capsys, *LLAMA_8B, "--tier", "host=16GB", "--tier", "disk=1k", "--params-b", "8", "--block-size", "16"
    )
    assert {name: value for name, value in tree.items() if name.startswith("tier_")} == {
        "tier_host_capacity_tokens": 122_048,
        "tier_host_load_us_per_block": pytest.approx(16 * 3.2768),
        "tier_host_compute_us_per_block": pytest.approx(16 * 16.178, abs=0.1),
        "tier_host_latency_us": 0.0,
        "tier_host_break_even_tokens_per_s": pytest.approx(305_175.8, abs=0.1),
        "tier_host_least_loaded_tokens": 16,
        "tier_disk_capacity_tokens": 1000,
        "tier_disk_load_us_per_block": pytest.approx(16 * 43.69, abs=0.1),
        "tier_disk_compute_us_per_block": pytest.approx(16 * 16.178, abs=0.1),
        "tier_disk_latency_us": 0.0,
        "tier_disk_break_even_tokens_per_s": pytest.approx(22_888.2, abs=0.1),
        "tier_disk_least_loaded_tokens": None,
    }


def test_without_a_rate_of_prefills_tiers_have_the_rate_below_which_loading_is_faster(capsys):
    out = plan(capsys, *LLAMA_8B, "--tier", "host=16GB")
    assert re.search(r"^  host  122,048  209\.7 us, 40 GB/s  \? +305,176 tokens/s  below that rate$", out, re.MULTILINE)
    tree = plan_json(capsys, *LLAMA_8B, "--tier", "host=16GB")
    assert tree["tier_host_compute_us_per_block"] is tree["tier_host_least_loaded_tokens"] is None


def test_json_is_flat_and_names_units(capsys):
    tree = plan_json(capsys, *LLAMA_8B, "--batch", "64", "--context", "8Ki", "--tp", "2", *CARD, "--block-size", "16")
    assert tree == {
        "num_layers": 32,
        "num_query_heads": 32,
        "num_kv_heads": 8,
        "head_dim": 128,
        "mla_rank": None,
        "rope_dim": None,
        "dtype": "bf16",
        "has_scales": False,
        "tp": 2,
        "token_bytes": 131_072,
        "rank_token_bytes": 65_536,
        "batch": 64,
        "context_tokens": 8192,
        "sequence_bytes": 2**30,
        "sequence_gib": 1.0,
        "cache_bytes": 68_719_476_736,
        "cache_gib": 64.0,
        "cache_gb": 68.719476736,
        "rank_cache_bytes": 34_359_738_368,
        "rank_cache_gib": 32.0,
        "rank_cache_gb": 34.359738368,
        "memory_bytes": 24_000_000_000,
        "rank_weights_bytes": 8_000_000_000,
        "overhead_bytes": 1_000_000_000,
        "kv_memory_bytes": 15_000_000_000,
        "user_bytes": 2**29,
        "users": 27,
        "capacity_tokens": 228_880,
        "mha_token_bytes": 524_288,
        "mha_cache_bytes": 256 * 2**30,
        "mha_cache_gib": 256.0,
        "gqa_token_bytes": 131_072,
        "gqa_cache_bytes": 64 * 2**30,
        "gqa_cache_gib": 64.0,
        "mqa_token_bytes": 16_384,
        "mqa_cache_bytes": 8 * 2**30,
        "mqa_cache_gib": 8.0,
        "mla_token_bytes": 36_864,
        "mla_cache_bytes": 18 * 2**30,
        "mla_cache_gib": 18.0,
        "block_size": 16,
        "block_bytes": 2**21,
        "num_blocks": 512,
        "last_block_tokens": 16,
        "waste_tokens": 0,
        "waste_bytes": 0,
    }


def test_json_has_the_optional_groups_that_are_requested(capsys):
    arguments = ("--shared-prefix", "2040", "--requests", "10", "--block-size", "16", "--params-b", "8")
    tree = plan_json(capsys, *LLAMA_8B, *arguments, "--new-tokens", "2", "--context", "1")
    optional = list(tree)[list(tree).index("waste_bytes") + 1 :]
    # Decoding: 8 x 4096 x 4096 FLOP per computed token for the projections, and 4 x 4096 per pair of a query and a key.
    # Without a cache, the steps compute 1 + 2 tokens and 1 + 4 pairs; with one, 1 + 1 tokens and 1 + 2 pairs.
    assert {name: tree[name] for name in optional} == {
        "requests": 10,
        "shared_prefix_tokens": 2040,
        "shared_blocks": 127,
        "prefix_blocks": 137,
        "prefix_blocks_unshared": 1280,
        "prefix_computed_tokens": 2040,
        "prefix_computed_tokens_unshared": 20_400,
        "prefix_bytes": 137 * 2**21,
        "prefix_bytes_unshared": 1280 * 2**21,
        "load_us_per_token": pytest.approx(3.2768),
        "recompute_us_per_token": pytest.approx(16.178, abs=1e-3),
        "hbm_to_pcie_ratio": 83.75,
        "new_tokens": 2,
        "decode_naive_flops": 8 * 3 * 4096**2 + 4 * 5 * 4096,
        "decode_cached_flops": 8 * 2 * 4096**2 + 4 * 3 * 4096,
        "decode_flops_ratio": pytest.approx(1.5, abs=1e-3),
    }


@pytest.mark.parametrize(("context", "user_gb", "users"), [("8Ki", "1.2", 5), ("32Ki", "5", 1)])
def test_users_may_have_a_given_size(capsys, context, user_gb, users):
    tree = plan_json(capsys, *LLAMA_8B, *CARD, "--context", context, "--user-gb", user_gb)
    assert tree["users"] == users


def test_a_user_occupies_whole_blocks(capsys):
    tree = plan_json(capsys, *LLAMA_8B, *CARD, "--context", "65")
    assert tree["user_bytes"] == 2 * 64 * 131_072


def test_weights_that_do_not_fit_are_reported(capsys):
    out = plan(capsys, *LLAMA_8B, "--memory-gib", "24", "--weights-gb", "16", "--overhead-gb", "16")
    assert "left for K/V         0 B, 5.80 GiB (6.23 GB) short\n" in out


def test_memory_may_be_given_in_gib(capsys):
    assert plan_json(capsys, *LLAMA_8B, "--memory-gib", "80", "--weights-gb", "0")["kv_memory_bytes"] == 80 * 2**30


@pytest.mark.parametrize(
    ("text", "tokens"), [("8k", 8000), ("128Ki", 131_072), ("128000", 128_000), ("1.5m", 1_500_000)]
)
def test_a_k_is_1000_tokens_and_a_ki_1024(capsys, text, tokens):
    assert plan_json(capsys, *LLAMA_8B, "--context", text)["context_tokens"] == tokens


@pytest.mark.parametrize(("dtype", "name"), [("float32", "fp32"), ("bfloat16", "bf16"), ("fp8", "fp8")])
def test_dtypes_are_accepted_by_the_names_of_torch_too(capsys, dtype, name):
    assert plan_json(capsys, *LLAMA_8B, "--dtype", dtype)["dtype"] == name


def test_scales_are_counted(capsys):
    tree = plan_json(capsys, *LLAMA_8B, "--dtype", "int8", "--scales")
    assert (tree["token_bytes"], tree["has_scales"]) == (65_536 + 2048, True)
    assert "int8, a float32 scale per vector" in plan(capsys, *LLAMA_8B, "--dtype", "int8", "--scales")


def test_a_model_directory_has_all_sizes(capsys, model):
    tree = plan_json(capsys, "--model", str(model), "--context", "128Ki", "--memory-gib", "80", "--tp", "4")
    assert (tree["token_bytes"], tree["cache_gib"], tree["dtype"]) == (327_680, 40.0, "fp16")
    assert tree["rank_weights_bytes"] == 141_107_412_992 // 4
    assert tree["rank_cache_gib"] == 10.0


def test_the_embedded_model_has_a_name(capsys):
    planned = plan_json(capsys, "--model", "tiny", "--memory-gb", "1")
    assert planned["token_bytes"] == 2 * 4 * 2 * 32 * 4
    assert planned["rank_weights_bytes"] == pytest.approx(4 * 3.93e6, rel=0.01)


def test_weights_of_8_bits_leave_more_for_users(capsys, model):
    name, shape = "model.layers.0.self_attn.q_proj.weight", (1024, 512)
    header = json.dumps({name: {"dtype": "F16", "shape": shape, "data_offsets": [0, 2 * 1024 * 512]}}).encode()
    (model / "model.safetensors.index.json").unlink()
    (model / "model.safetensors").write_bytes(len(header).to_bytes(8, "little") + header + bytes(2 * 1024 * 512))
    options = ("--model", str(model / "config.json"), "--memory-gib", "1")
    assert plan_json(capsys, *options)["rank_weights_bytes"] == 2 * 1024 * 512 + len(header) + 8
    num_bytes = 1024 * 512 + 1024 * 8  # a byte per weight, and 8 bytes per output feature
    assert plan_json(capsys, *options, "--weights", "int8")["rank_weights_bytes"] == num_bytes


def test_windowed_layers_need_the_blocks_of_their_window(capsys, model):
    fields = json.loads((model / "config.json").read_text())
    fields |= {"layer_types": (["sliding_attention"] * 3 + ["full_attention"]) * 20, "sliding_window": 512}
    (model / "config.json").write_text(json.dumps(fields))
    arguments = ("--model", str(model), "--context", "16Ki")
    out = plan(capsys, *arguments)
    assert "60 of 80, a window of 512 tokens" in out
    assert "9 of 256 blocks in these layers, 1.38 GiB (1.48 GB) in all layers" in out
    numbers = plan_json(capsys, *arguments)
    block_bytes = 64 * numbers["token_bytes"]
    # A quarter of the layers needs all 256 blocks of 16 Ki tokens. The others need the 8 blocks of the window, and one
    # more.
    assert numbers["windowed_sequence_bytes"] == block_bytes * 256 // 4 + block_bytes * 9 * 3 // 4
    assert numbers["windowed_blocks"] == 9
    assert numbers["other_share"] == 4, "the other layers may get the memory of all layers"
    assert numbers["windowed_share"] == 1


def test_layers_of_two_shapes_count_by_their_own_bytes(capsys, model):
    fields = json.loads((model / "config.json").read_text())
    fields |= {"model_type": "gemma4_text", "global_head_dim": 512, "num_key_value_heads": 8, "head_dim": 256}
    fields |= {"layer_types": (["sliding_attention"] * 3 + ["full_attention"]) * 20, "sliding_window": 512}
    (model / "config.json").write_text(json.dumps(fields))
    arguments = ("--model", str(model), "--context", "16Ki")
    assert "60 layers x 2 x 8 KV heads x 256 + 20 layers x 2 x 8 KV heads x 512" in plan(capsys, *arguments)
    numbers = plan_json(capsys, *arguments)
    sliding, other = 60 * 2 * 8 * 256 * 2, 20 * 2 * 8 * 512 * 2
    assert numbers["token_bytes"] == sliding + other
    assert numbers["windowed_sequence_bytes"] == 64 * (other * 256 + sliding * 9)
    assert numbers["other_share"] == (sliding + other) / other
    assert "can't be combined with a --model whose sliding layers" in refusal(capsys, *arguments, "--kv-heads", "4")


def test_options_override_the_model(capsys, model):
    tree = plan_json(capsys, "--model", str(model / "config.json"), "--kv-heads", "64", "--dtype", "fp8")
    assert (tree["token_bytes"], tree["num_kv_heads"], tree["dtype"]) == (1_310_720, 64, "fp8")


def test_kv_heads_default_to_the_query_heads(capsys):
    assert plan_json(capsys, "--layers", "1", "--query-heads", "4", "--head-dim", "8")["num_kv_heads"] == 4


def test_without_query_heads_there_is_nothing_to_compare(capsys):
    arguments = ("--layers", "32", "--kv-heads", "8", "--head-dim", "128")
    assert "attention kinds\n  requires --query-heads and --head-dim\n" in plan(capsys, *arguments)
    tree = plan_json(capsys, *arguments)
    assert tree["token_bytes"] == 131_072
    assert "mha_token_bytes" not in tree


def test_the_latent_of_mla_is_counted(capsys):
    arguments = ("--layers", "61", "--mla-rank", "512", "--rope-dim", "64", "--query-heads", "128", "--head-dim", "128")
    tree = plan_json(capsys, *arguments, "--tp", "8")
    assert tree["token_bytes"] == tree["rank_token_bytes"] == tree["mla_token_bytes"] == 70_272
    assert tree["mha_token_bytes"] == 61 * 2 * 128 * 128 * 2
    out = plan(capsys, *arguments)
    assert "61 layers x (latent of 512 + rotary key of 64), bf16" in out
    assert re.search(r"^  MLA .* this model$", out, re.MULTILINE)


def test_gqa_and_mla_are_compared_with_the_sizes_of_the_model_if_it_has_them(capsys):
    heads = ("--query-heads", "12", "--head-dim", "32")
    tree = plan_json(capsys, "--layers", "1", *heads, "--kv-heads", "3")
    assert tree["gqa_token_bytes"] == 2 * 3 * 32 * 2
    tree = plan_json(capsys, "--layers", "1", *heads, "--mla-rank", "7", "--rope-dim", "5")
    assert tree["mla_token_bytes"] == (7 + 5) * 2


def test_small_sizes_are_bytes(capsys):
    arguments = ("--layers", "1", "--kv-heads", "1", "--head-dim", "4", "--context", "1", "--block-size", "1")
    assert "per sequence  1 tokens, 16 B" in plan(capsys, *arguments)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (
            (),
            "plan: requires --layers, --kv-heads, --head-dim, or a --model whose config.json has num_hidden_layers, "
            "num_key_value_heads, head_dim",
        ),
        (
            ("--layers", "3", "--mla-rank", "4"),
            "plan: requires --rope-dim, or a --model whose config.json has qk_rope_head_dim",
        ),
        (
            (*LLAMA_8B, "--memory-gb", "24"),
            "plan: --memory-gb and --memory-gib require --weights-gb, or a --model with weight files",
        ),
        (
            (*LLAMA_8B, "--user-gb", "0"),
            "plan: --weights, --weights-gb, --overhead-gb and --user-gb require --memory-gb or --memory-gib",
        ),
        (
            (*LLAMA_8B, *CARD, "--weights", "int8"),
            "plan: --weights int8 requires --model and no --weights-gb, got --weights-gb",
        ),
        (
            (*LLAMA_8B, "--weights", "int8"),
            "plan: --weights int8 requires --model and no --weights-gb, got no --model",
        ),
        ((*LLAMA_8B, *CARD, "--user-gb", "0"), "user_bytes: expected at least 1, got 0"),
        (
            (*LLAMA_8B, "--shared-prefix", "8"),
            "plan: --shared-prefix and --requests require each other, got only --shared-prefix",
        ),
        (
            (*LLAMA_8B, "--requests", "8"),
            "plan: --shared-prefix and --requests require each other, got only --requests",
        ),
        (
            ("--layers", "1", "--kv-heads", "1", "--head-dim", "1", "--new-tokens", "1"),
            "plan: --new-tokens requires --query-heads and --head-dim",
        ),
        ((*LLAMA_8B, "--tp", "3"), "num_query_heads: expected a multiple of tp 3, got 32"),
        ((*LLAMA_8B, "--kv-heads", "5"), "num_query_heads: expected a multiple of num_kv_heads 5, got 32"),
        ((*LLAMA_8B, "--dtype", "fp7"), "dtype: expected one of fp32, bf16, fp16, fp8, int8, k8v4, fp4, int4, got fp7"),
        ((*LLAMA_8B, "--tier", "host=1kB"), "tier host: expected room for a block, 8389056 bytes, got 1000"),
        (
            (*LLAMA_8B, "--tier", "host=1GB", "--tier-ms", "hots=1"),
            "--tier-ms: expected names of --tier, got hots",
        ),
        ((*LLAMA_8B, "--tier-gb-s", "disk=1"), "--tier-gb-s: expected names of --tier, got disk"),
        ((*LLAMA_8B, "--scales"), "scales: expected a dtype below 16 bits, got bf16"),
        (
            ("--model", "nowhere"),
            "model: expected a directory with a config.json, or such a file, got nowhere: No such file or directory",
        ),
    ],
)
def test_a_missing_or_wrong_option_is_one_line_and_exit_code_2(capsys, arguments, message):
    assert refusal(capsys, *arguments) == message


def test_a_model_that_names_no_dtype_needs_one(capsys, tmp_path):
    (tmp_path / "config.json").write_text('{"n_layer": 2, "n_head": 4, "n_embd": 32}')
    assert refusal(capsys, "--model", str(tmp_path)) == (
        "dtype: requires --dtype, or float32, bfloat16 or float16 in the config.json"
    )
    assert plan_json(capsys, "--model", str(tmp_path), "--dtype", "fp32")["token_bytes"] == 2 * 2 * 32 * 4


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (("--context", "0"), "--context: expected a whole number from 1, such as 8192, 8k (8000) or 8Ki (8192), got 0"),
        (("--context", "8kb"), "got 8kb"),
        (("--context", "1.0005k"), "got 1.0005k"),
        (("--context", "k"), "got k"),
        (("--context", ""), "--context: expected a whole number"),
        (("--context", "²"), "--context: expected a whole number"),
        (("--context", "9" * 5000), "--context: expected a whole number"),
        (("--batch=-1",), "got -1"),
        (("--memory-gb", "x"), "--memory-gb: expected a number from 0, got x"),
        (("--memory-gb", "nan"), "--memory-gb: expected a number from 0, got nan"),
        (("--memory-gb", "1e999999999"), "--memory-gb: expected a number from 0"),
        (("--memory-gib=-1",), "--memory-gib: expected a number from 0, got -1"),
        (("--memory-gb", "1", "--memory-gib", "1"), "not allowed with"),
        (("--tflops", "0"), "--tflops: expected a positive number, got 0"),
        (("--pcie-gb-s", "x"), "--pcie-gb-s: expected a positive number, got x"),
    ],
)
def test_a_wrong_number_is_one_line_and_exit_code_2(capsys, arguments, words):
    assert words in usage_error(capsys, "plan", *arguments)


def test_planning_works_where_the_engine_is_not_installed(model):
    program = WITHOUT_ENGINE + "from radixkv.service.cli.main import main\nsys.exit(main(sys.argv[1:]))"
    command = [sys.executable, "-P", "-c", program, "plan", "--model", str(model), "--json"]
    completed = subprocess.run(command, capture_output=True, text=True, timeout=PATIENCE_S, check=False)
    assert (completed.returncode, completed.stderr) == (0, "")
    assert json.loads(completed.stdout)["token_bytes"] == 327_680


LONGROPE = {"rope_type": "longrope", "short_factor": [1.0], "long_factor": [4.0]}


def test_users_are_counted_with_the_longest_sequences_that_are_served(capsys, model):
    """Beyond the original length, longrope changes the K/V of all tokens, so the server refuses longer sequences."""
    config = json.loads((model / "config.json").read_text())
    lengths = {"max_position_embeddings": 131_072, "original_max_position_embeddings": 4096}
    (model / "config.json").write_text(json.dumps({**config, **lengths, "rope_scaling": LONGROPE}))
    arguments = ("--model", str(model), "--memory-gb", "200", "--context", "131072")
    limited = plan_json(capsys, *arguments)
    assert limited["max_sequence_tokens"] == 4096
    assert "longrope" in limited["limit_reason"]
    at_limit = plan_json(capsys, "--model", str(model), "--memory-gb", "200", "--context", "4096")
    assert {**at_limit, "limit_reason": limited["limit_reason"]} == limited
    text = plan(capsys, *arguments)
    assert "131,072 tokens requested; 4,096 are counted below" in text
    assert 'model.longrope = "long"' in text
    long = plan_json(capsys, *arguments, "--longrope", "long")
    assert "max_sequence_tokens" not in long
    assert long["users"] < limited["users"]


def test_a_context_beyond_the_limit_of_the_model_is_shortened(capsys, model):
    config = json.loads((model / "config.json").read_text())
    (model / "config.json").write_text(json.dumps({**config, "max_position_embeddings": 2048}))
    out = plan(capsys, "--model", str(model))
    assert "at most 2,048 tokens" in out
    assert "8,192 tokens requested; 2,048 are counted below" in out


def test_long_factors_of_a_model_without_longrope_are_refused(capsys, model):
    assert "expected a model with longrope" in refusal(capsys, "--model", str(model), "--longrope", "long")
