"""A few-shot evaluation: the examples are computed once, and each question once for all of its answers."""

import sys

from radixkv import LLM

MODEL = sys.argv[1] if len(sys.argv) > 1 else "tiny"
SHOTS = "".join(f"Question: Who went into the {place}?\nAnswer: the people\n\n" for place in ("city", "land", "house"))
QUESTIONS = [f"Question: Who spoke unto {name}?\nAnswer:" for name in ("Moses", "the king", "Catherine")]
ANSWERS = [" the Lord", " her mother", " the people", " no man"]

cached = total = 0
with LLM(MODEL, dtype="float32") as llm:
    for question in QUESTIONS:
        scores = llm.score(SHOTS + question, ANSWERS)
        print(ANSWERS[max(range(len(ANSWERS)), key=lambda index: scores[index].logprob)])
        cached += sum(score.num_cached_tokens for score in scores)
        total += len(ANSWERS) * len(llm.get_tokenizer().encode(SHOTS + question))
print(f"{cached} of {total} tokens reused")
