"""The same as agent.py with transformers alone: one cache, cut to the tokens that the next prompt shares with it."""

import sys

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, DynamicCache

MODEL = sys.argv[1]
OBSERVATIONS = ["Where is my father?", "The door is shut.", "There is no man in the house.", "Night has come."]

tokenizer = AutoTokenizer.from_pretrained(MODEL)
model = AutoModelForCausalLM.from_pretrained(MODEL, dtype=torch.float32).eval()
cache = DynamicCache(config=model.config)
known: list[int] = []  # the tokens whose K/V are in the cache
messages = []
cached = total = 0
for observation in OBSERVATIONS:
    messages.append({"role": "user", "content": observation})
    text = tokenizer.apply_chat_template(messages, add_generation_prompt=True, tokenize=False)
    ids = tokenizer.encode(text, add_special_tokens=False)
    # An answer may be encoded as other tokens than the model generated.
    shared = next(
        (index for index, pair in enumerate(zip(known, ids[:-1], strict=False)) if pair[0] != pair[1]),
        min(len(known), len(ids) - 1),
    )
    cache.crop(shared - len(known))
    tokens = torch.tensor([ids])
    answer = model.generate(
        tokens,
        attention_mask=torch.ones_like(tokens),
        cache=cache,
        do_sample=False,
        max_new_tokens=16,
        pad_token_id=0,
    )
    known = answer[0, :-1].tolist()
    text = tokenizer.decode(answer[0, len(ids) :], skip_special_tokens=True)
    messages.append({"role": "assistant", "content": text})
    print(repr(text))
    cached += shared
    total += len(ids)
print(f"{cached} of {total} tokens reused")
