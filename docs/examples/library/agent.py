"""An agent loop: each turn reuses all turns before it, the model's own answers included."""

import sys

from radixkv import LLM, SamplingParams

MODEL = sys.argv[1] if len(sys.argv) > 1 else "tiny"
OBSERVATIONS = ["Where is my father?", "The door is shut.", "There is no man in the house.", "Night has come."]

messages = []
cached = total = 0
with LLM(MODEL, dtype="float32") as llm:
    for observation in OBSERVATIONS:
        messages.append({"role": "user", "content": observation})
        output = llm.chat(messages, SamplingParams(temperature=0, max_tokens=16))[0]
        messages.append({"role": "assistant", "content": output.outputs[0].text})
        print(repr(output.outputs[0].text))
        cached += output.num_cached_tokens
        total += len(output.prompt_token_ids)
print(f"{cached} of {total} tokens reused")
