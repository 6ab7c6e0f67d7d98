"""The embedded model was trained: it predicts text that it never saw, and what it writes reads like text."""

from __future__ import annotations

import re

import numpy as np
import pytest
import torch
from transformers import LlamaForCausalLM, PreTrainedTokenizerBase

from bench.perplexity.bigram import Bigram
from bench.perplexity.model_bits import model_bits
from bench.training.corpus import held_out_documents, training_documents
from bench.training.tokenizer import load_tokenizer
from radixkv.compute.forward import Chunk
from radixkv.compute.runner import Runner
from radixkv.config import ModelConfig
from radixkv.model.attention.torch_kernels import TorchKernels
from radixkv.model.loading import load_model
from radixkv.model.tiny_model import build_tiny_model
from radixkv.storage.device_pool import KVStorage

MOST_BITS_A_BYTE = 2.0
NUM_CHARACTERS = 8000


@pytest.fixture(scope="module")
def module() -> LlamaForCausalLM:
    return build_tiny_model("sdpa").eval()


@pytest.fixture(scope="module")
def tokenizer() -> PreTrainedTokenizerBase:
    return load_tokenizer()


@pytest.fixture(scope="module")
def known_words() -> set[str]:
    """Words of the training text that come at least twice."""
    words = re.findall(r"[a-z]+", " ".join(document.text for document in training_documents()).lower())
    names, counts = np.unique(words, return_counts=True)
    return set(names[counts > 1].tolist())


def written(module: LlamaForCausalLM, tokenizer: PreTrainedTokenizerBase, prompt: str, **options: float) -> str:
    """Text that the model adds to a prompt: 200 tokens, or fewer if it ends."""
    ids = torch.tensor([tokenizer.encode(prompt)])
    torch.manual_seed(0)
    answer = module.generate(ids, do_sample=True, max_new_tokens=200, pad_token_id=509, **options)
    return str(tokenizer.decode(answer[0, ids.shape[1] :]))


def test_it_predicts_text_that_it_never_saw(module: LlamaForCausalLM, tokenizer: PreTrainedTokenizerBase) -> None:
    for document in held_out_documents():
        text = document.text[-NUM_CHARACTERS:]
        ids = tokenizer.encode(text)
        bits = model_bits(module, torch.tensor(ids)) / len(text.encode())
        assert bits < MOST_BITS_A_BYTE
        assert bits < 0.75 * Bigram(512).bits(ids) / len(text.encode())


@pytest.mark.long
def test_what_it_writes_is_made_of_words(
    module: LlamaForCausalLM, tokenizer: PreTrainedTokenizerBase, known_words: set[str]
) -> None:
    prompts = ("The next morning", "And the king said unto", "She was", "In the beginning", "It was not till")
    text = " ".join(written(module, tokenizer, prompt, temperature=0.7) for prompt in prompts)
    words = re.findall(r"[a-z]+", text.lower())
    assert len(words) > 250
    assert sum(word in known_words for word in words) > 0.9 * len(words)
    assert len(set(words)) > 0.25 * len(words), "it says more than one thing"


def test_an_answer_in_a_chat_ends(module: LlamaForCausalLM, tokenizer: PreTrainedTokenizerBase) -> None:
    messages = [{"role": "user", "content": "How do you do?"}]
    prompt = tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
    answers = [written(module, tokenizer, prompt, temperature=0.7, top_k=top_k) for top_k in (20, 30, 40)]
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


def test_it_is_loaded_as_transformers_would(module: LlamaForCausalLM) -> None:
    ids = np.random.default_rng(0).integers(0, 509, 40).astype("<u4")
    model = load_model(ModelConfig(device="cpu"))
    runner = Runner(model, KVStorage(8, 16, model.kv_shape, model.device), TorchKernels())
    got = runner.run([Chunk(ids.tobytes(), 0, 40, np.arange(3, dtype=np.int32), None, wants_logits=True)]).logits[0]
    with torch.inference_mode():
        expected = module(torch.from_numpy(ids.astype(np.int64))[None]).logits[0, -1]
    assert (got - expected).abs().max() < 1e-3


def test_building_it_leaves_random_numbers_alone() -> None:
    torch.manual_seed(0)
    expected = torch.rand(3)
    torch.manual_seed(0)
    build_tiny_model("sdpa")
    assert torch.equal(torch.rand(3), expected)
