"""Questions about two documents, in any order: each document is computed once."""

import sys

from radixkv import LLM, SamplingParams

MODEL = sys.argv[1] if len(sys.argv) > 1 else "tiny"
DOCUMENTS = {
    "law": "And the Lord spake unto Moses, saying, Speak unto the children of Israel, and say unto them. " * 3,
    "novel": "Catherine was for some time in the house of her friend, and thought of nothing but the ball. " * 3,
}
QUESTIONS = [("law", "Then Moses said"), ("novel", "Her mother said"), ("law", "And the people"), ("novel", "The ball")]

with LLM(MODEL, dtype="float32") as llm:
    cached = total = 0
    for name, question in QUESTIONS:
        output = llm.generate(DOCUMENTS[name] + question, SamplingParams(temperature=0, max_tokens=12))[0]
        print(repr(output.outputs[0].text))
        cached += output.num_cached_tokens
        total += len(output.prompt_token_ids)
print(f"{cached} of {total} tokens reused")
