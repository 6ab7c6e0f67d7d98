"""The embedded model was trained: it predicts held-out text, and its output resembles text."""

from __future__ import annotations

import re
import subprocess
import tomllib
from pathlib import Path

import numpy as np
import pytest
import torch
from transformers import LlamaForCausalLM, PreTrainedTokenizerBase

from bench.training.bigram import Bigram
from bench.training.corpus import held_out_documents, training_documents
from bench.training.model_bits import model_bits
from bench.training.tokenizer import load_tokenizer
from radixkv.compute.forward import Chunk
from radixkv.compute.runner import Runner
from radixkv.config import ModelConfig
from radixkv.errors import ConfigError
from radixkv.model import tiny_model
from radixkv.model.attention.torch_kernels import TorchKernels
from radixkv.model.loading import load_model
from radixkv.model.tiny_model import build_tiny_model, load_weights, shipped_weights, write_weights
from radixkv.storage.device_pool import KVStorage

MAX_BITS_PER_BYTE = 2.0
NUM_CHARACTERS = 8000


@pytest.fixture(scope="module")
def module() -> LlamaForCausalLM:
    return build_tiny_model("sdpa").eval()


@pytest.fixture(scope="module")
def tokenizer() -> PreTrainedTokenizerBase:
    return load_tokenizer()


@pytest.fixture(scope="module")
def known_words() -> set[str]:
    """The words that occur at least twice in the training text."""
    words = re.findall(r"[a-z]+", " ".join(document.text for document in training_documents()).lower())
    names, counts = np.unique(words, return_counts=True)
    return set(names[counts > 1].tolist())


def generate_text(module: LlamaForCausalLM, tokenizer: PreTrainedTokenizerBase, prompt: str, **options: float) -> str:
    """Return the text that the model generates after a prompt: 200 tokens, or fewer if the text ends."""
    ids = torch.tensor([tokenizer.encode(prompt)])
    torch.manual_seed(0)
    answer = module.generate(ids, do_sample=True, max_new_tokens=200, pad_token_id=509, **options)
    return str(tokenizer.decode(answer[0, ids.shape[1] :]))


def test_the_model_predicts_held_out_text(module: LlamaForCausalLM, tokenizer: PreTrainedTokenizerBase) -> None:
    for document in held_out_documents():
        text = document.text[-NUM_CHARACTERS:]
        ids = tokenizer.encode(text)
        bits = model_bits(module, torch.tensor(ids)) / len(text.encode())
        assert bits < MAX_BITS_PER_BYTE
        assert bits < 0.75 * Bigram(512).bits(ids) / len(text.encode())


@pytest.mark.long
def test_generated_text_consists_of_words(
    module: LlamaForCausalLM, tokenizer: PreTrainedTokenizerBase, known_words: set[str]
) -> None:
    prompts = ("The next morning", "And the king said unto", "She was", "In the beginning", "It was not till")
    text = " ".join(generate_text(module, tokenizer, prompt, temperature=0.7) for prompt in prompts)
    words = re.findall(r"[a-z]+", text.lower())
    assert len(words) > 250
    assert sum(word in known_words for word in words) > 0.9 * len(words)
    assert len(set(words)) > 0.25 * len(words), "the text does not repeat itself"


def test_an_answer_in_a_chat_ends(module: LlamaForCausalLM, tokenizer: PreTrainedTokenizerBase) -> None:
    messages = [{"role": "user", "content": "How do you do?"}]
    prompt = tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
    answers = [generate_text(module, tokenizer, prompt, temperature=0.7, top_k=top_k) for top_k in (20, 30, 40)]
    assert sum(answer.endswith("<|im_end|>") for answer in answers) >= 2
    assert all(len(answer) > 20 for answer in answers)


def test_a_prompt_of_2048_tokens_is_read_to_its_end(module: LlamaForCausalLM) -> None:
    """The last tokens of long windows are predicted as well as those in the middle."""
    ids = torch.tensor(load_tokenizer().encode(held_out_documents()[0].text[:9000]))[:2049]
    assert ids.numel() == 2049
    with torch.inference_mode():
        logits = module(ids[None, :-1]).logits[0]
    losses = torch.nn.functional.cross_entropy(logits, ids[1:], reduction="none").view(4, 512).mean(1)
    assert losses[3] < 1.1 * losses[1]


def test_the_loaded_model_gives_the_logits_of_transformers(module: LlamaForCausalLM) -> None:
    ids = np.random.default_rng(0).integers(0, 509, 40).astype("<u4")
    model = load_model(ModelConfig(device="cpu"))
    runner = Runner(model, KVStorage(8, 16, model.kv_shape, model.device), TorchKernels())
    got = runner.run([Chunk(ids.tobytes(), 0, 40, np.arange(3, dtype=np.int32), None, wants_logits=True)]).logits[0]
    with torch.inference_mode():
        expected = module(torch.from_numpy(ids.astype(np.int64))[None]).logits[0, -1]
    assert (got - expected).abs().max() < 1e-3


def test_building_the_model_does_not_change_the_state_of_the_random_generator() -> None:
    torch.manual_seed(0)
    expected = torch.rand(3)
    torch.manual_seed(0)
    build_tiny_model("sdpa")
    assert torch.equal(torch.rand(3), expected)


MAX_FILE_BYTES = 8_000_000
ROOT = Path(__file__).parents[2]


@pytest.fixture
def weights_copy(tmp_path: Path) -> Path:
    for name in ("weights.safetensors", "weights.safetensors.sha256"):
        (tmp_path / name).write_bytes((Path(str(shipped_weights())).parent / name).read_bytes())
    return tmp_path / "weights.safetensors"


def test_the_shipped_file_is_small_and_bfloat16() -> None:
    assert len(shipped_weights().read_bytes()) < MAX_FILE_BYTES
    assert {tensor.dtype for tensor in load_weights(shipped_weights()).values()} == {torch.bfloat16}


def test_the_digest_is_one_that_sha256sum_checks(weights_copy: Path) -> None:
    command = ["sha256sum", "--check", "--strict", "weights.safetensors.sha256"]
    assert subprocess.run(command, cwd=weights_copy.parent, capture_output=True, check=False).returncode == 0


def test_weights_that_are_written_are_read_again(tmp_path: Path, weights_copy: Path) -> None:
    folder = tmp_path / "again"
    folder.mkdir()
    write_weights(build_tiny_model("eager"), folder / "weights.safetensors")
    assert (folder / "weights.safetensors").read_bytes() == weights_copy.read_bytes()
    assert load_weights(folder / "weights.safetensors").keys() == load_weights(weights_copy).keys()


@pytest.mark.parametrize("position", [0, 5_000, -1])
def test_a_damaged_file_is_refused_by_name(weights_copy: Path, monkeypatch: pytest.MonkeyPatch, position: int) -> None:
    content = bytearray(weights_copy.read_bytes())
    content[position] ^= 1
    weights_copy.write_bytes(content)
    monkeypatch.setattr(tiny_model, "shipped_weights", lambda: weights_copy)
    with pytest.raises(ConfigError, match=rf"^model\.path: tiny: expected {weights_copy} with sha256 \w+, got \w+"):
        load_model(ModelConfig(device="cpu"))


def test_a_file_that_is_cut_short_is_refused(weights_copy: Path) -> None:
    weights_copy.write_bytes(weights_copy.read_bytes()[:-1000])
    with pytest.raises(ConfigError, match="with sha256"):
        load_weights(weights_copy)


@pytest.mark.parametrize("missing", ["weights.safetensors", "weights.safetensors.sha256"])
def test_a_missing_file_is_named(weights_copy: Path, missing: str) -> None:
    (weights_copy.parent / missing).unlink()
    with pytest.raises(ConfigError, match=rf"^model\.path: tiny: expected {weights_copy} and its digest"):
        load_weights(weights_copy)


def test_an_empty_digest_file_is_refused(weights_copy: Path) -> None:
    weights_copy.with_name(weights_copy.name + ".sha256").write_text("")
    with pytest.raises(ConfigError, match="and its digest"):
        load_weights(weights_copy)


def test_the_package_ships_the_folder() -> None:
    with (ROOT / "pyproject.toml").open("rb") as file:
        (pattern,) = tomllib.load(file)["tool"]["setuptools"]["package-data"]["radixkv.model"]
    shipped = {path.name for path in (ROOT / "radixkv" / "model").glob(pattern)}
    assert shipped == {"NOTICE", "weights.safetensors", "weights.safetensors.sha256"}
