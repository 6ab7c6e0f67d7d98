"""Generates questions about one document, like the traffic of an assistant that answers from a handbook."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from bench.parts.workloads import WorkItem

if TYPE_CHECKING:
    from radixkv.service.text.tokenizer import Tokenizer

_DOCUMENT = Path(__file__).with_name("garden.txt")
_INSTRUCTION = "Answer questions about the following guide in one or two sentences.\n\n"

_SUBJECTS = (
    "soil",
    "clay",
    "compost",
    "seedlings",
    "tomatoes",
    "zucchini",
    "lettuce",
    "potatoes",
    "onions",
    "watering",
    "rainwater",
    "weeds",
    "slugs",
    "aphids",
    "bees",
    "the harvest",
    "rotation",
    "garlic",
    "the winter",
)
QUESTIONS = (
    "How do I get rid of aphids?",
    "What should I do with a compost heap?",
    "Which vegetables are easy to grow?",
    *(
        f"{question} {subject}?"
        for subject in _SUBJECTS
        for question in ("What does the guide say about", "Why does it mention", "What is a common mistake with")
    ),
)


def document() -> str:
    """Return a guide of 1,200 words: 1,482 tokens of SmolLM2."""
    return _DOCUMENT.read_text(encoding="utf-8")


def conversation(question: str) -> list[dict[str, str]]:
    """Return the messages that ask a question about the document."""
    return [{"role": "system", "content": _INSTRUCTION + document()}, {"role": "user", "content": question}]


def document_questions(tokenizer: Tokenizer, num_requests: int) -> list[WorkItem]:
    """Build prompts that all begin with the same document.

    Args:
        tokenizer: the model's tokenizer, with its chat template.
        num_requests: number of prompts; the questions repeat after `len(QUESTIONS)`.

    Returns:
        Items that all arrive at the same time.
    """
    prompts = [tokenizer.encode_chat(conversation(question)) for question in QUESTIONS[:num_requests]]
    return [WorkItem(0.0, np.array(prompts[index % len(prompts)], dtype=np.uint32)) for index in range(num_requests)]
