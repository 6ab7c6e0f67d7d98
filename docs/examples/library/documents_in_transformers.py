"""The same as documents.py with transformers alone: a cache per document, which is never evicted, and is copied."""

import copy
import sys

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, DynamicCache

MODEL = sys.argv[1]
DOCUMENTS = {
    "law": "And the Lord spake unto Moses, saying, Speak unto the children of Israel, and say unto them. " * 3,
    "novel": "Catherine was for some time in the house of her friend, and thought of nothing but the ball. " * 3,
}
QUESTIONS = [("law", "Then Moses said"), ("novel", "Her mother said"), ("law", "And the people"), ("novel", "The ball")]

tokenizer = AutoTokenizer.from_pretrained(MODEL)
model = AutoModelForCausalLM.from_pretrained(MODEL, dtype=torch.float32).eval()
caches: dict[str, tuple[list[int], DynamicCache]] = {}
cached = total = 0
for name, question in QUESTIONS:
    ids = tokenizer.encode(DOCUMENTS[name] + question)
    if name not in caches:
        # The last token of a document may be another one before a question.
        document = tokenizer.encode(DOCUMENTS[name])[:-1]
        cache = DynamicCache(config=model.config)
        with torch.inference_mode():
            model(torch.tensor([document]), cache=cache)
        caches[name] = document, cache
    else:
        cached += len(caches[name][0])
    document, cache = caches[name]
    if ids[: len(document)] != document:
        raise ValueError("the document has other tokens before this question")
    tokens = torch.tensor([ids])
    answer = model.generate(
        tokens,
        attention_mask=torch.ones_like(tokens),
        cache=copy.deepcopy(cache),
        do_sample=False,
        max_new_tokens=12,
        pad_token_id=0,
    )
    print(repr(tokenizer.decode(answer[0, len(ids) :], skip_special_tokens=True)))
    total += len(ids)
print(f"{cached} of {total} tokens reused")
