"""The same as evaluation.py with transformers alone: the cache of the examples is copied for each answer."""

import copy
import sys

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, DynamicCache

MODEL = sys.argv[1]
SHOTS = "".join(f"Question: Who went into the {place}?\nAnswer: the people\n\n" for place in ("city", "land", "house"))
QUESTIONS = [f"Question: Who spoke unto {name}?\nAnswer:" for name in ("Moses", "the king", "Catherine")]
ANSWERS = [" the Lord", " her mother", " the people", " no man"]

tokenizer = AutoTokenizer.from_pretrained(MODEL)
model = AutoModelForCausalLM.from_pretrained(MODEL, dtype=torch.float32).eval()
# The last token of the examples may be another one before a question.
shots = tokenizer.encode(SHOTS)[:-1]
cached = total = 0
with torch.inference_mode():
    shots_cache = DynamicCache(config=model.config)
    model(torch.tensor([shots]), cache=shots_cache)
    for question in QUESTIONS:
        context = tokenizer.encode(SHOTS + question)
        logprobs = []
        for answer in ANSWERS:
            whole = tokenizer.encode(SHOTS + question + answer)
            if whole[: len(shots)] != shots:
                raise ValueError("the examples have other tokens before this question")
            own_cache = copy.deepcopy(shots_cache)
            logits = model(torch.tensor([whole[len(shots) :]]), cache=own_cache).logits[0]
            rows = logits.log_softmax(-1)[len(context) - len(shots) - 1 : -1]
            logprobs.append(sum(row[token].item() for row, token in zip(rows, whole[len(context) :], strict=True)))
            cached += len(shots)
            total += len(context)
        print(ANSWERS[max(range(len(ANSWERS)), key=lambda index: logprobs[index])])
print(f"{cached} of {total} tokens reused")
