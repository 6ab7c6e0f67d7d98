"""lm-evaluation-harness over an `LLM`: the model `radixkv`. Needs the package lm_eval.

    python -m radixkv.integrations.lm_eval run --model radixkv --model_args pretrained=DIR --tasks TASK --num_fewshot 5

This command runs lm-evaluation-harness with the model registered, since the harness does not find models of other
packages itself. In Python, import this module before `lm_eval.simple_evaluate(model="radixkv", ...)`.
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from typing import Any

from lm_eval.api.model import LM
from lm_eval.api.registry import register_model

from radixkv import LLM
from radixkv.errors import InvalidRequest
from radixkv.integrations.evaluation import Evaluator

# Arguments that the harness passes to every model, and that have no effect: the engine chooses its own batches.
_UNUSED_OPTIONS = ("batch_size", "max_batch_size")
# The device that the harness passes if the caller names none, even on machines without a GPU.
_DEFAULT_DEVICES = (None, "cuda:0")


@register_model("radixkv")
class RadixKVLM(LM):  # type: ignore[misc]  # lm_eval is not installed where types are checked
    """A model of lm-evaluation-harness that computes each shared prefix once.

    Args:
        pretrained: the model; see `LLM`.
        max_gen_toks, prefix_token_id: see `Evaluator`.
        llm_options: further arguments of `LLM`, such as `dtype` and `capacity_tokens`; `batch_size`, `max_batch_size`
            and the device `cuda:0` have no effect.
    """

    def __init__(
        self,
        pretrained: str | os.PathLike[str] = "tiny",
        *,
        max_gen_toks: int = 256,
        prefix_token_id: int | None = None,
        **llm_options: Any,
    ) -> None:
        super().__init__()
        for name in _UNUSED_OPTIONS:
            llm_options.pop(name, None)
        if llm_options.get("device") in _DEFAULT_DEVICES:
            llm_options.pop("device", None)
        self.llm = LLM(pretrained, **llm_options)
        self.evaluator = Evaluator(self.llm, max_gen_toks=max_gen_toks, prefix_token_id=prefix_token_id)
        self._name = os.fspath(pretrained)

    @property
    def tokenizer_name(self) -> str:
        """Name that the harness uses in the keys of cached requests."""
        return f"radixkv-{self._name.replace('/', '__')}"

    def chat_template(self, chat_template: bool | str = False) -> str | None:
        """Return a name of the chat template, which the harness uses in the keys of cached requests."""
        return f"{self.tokenizer_name}-chat" if chat_template else None

    def apply_chat_template(self, chat_history: Sequence[Mapping[str, Any]], add_generation_prompt: bool = True) -> str:
        """Render a conversation with the chat template of the model.

        Without `add_generation_prompt`, the last message is the beginning of the answer, which the model continues:
        the text ends with that message.

        Raises:
            InvalidRequest: the last message is empty, or the template changes it, so it cannot be continued.
        """
        text = self.llm.get_tokenizer().render_chat(chat_history, add_generation_prompt=add_generation_prompt)
        if add_generation_prompt:
            return text
        beginning = chat_history[-1]["content"]
        if beginning not in text:  # many templates strip white space
            beginning = beginning.strip()
        if not beginning:
            raise InvalidRequest("chat_history: expected text in the last message, which is continued, got none")
        start = text.rfind(beginning)
        if start < 0:
            raise InvalidRequest(
                "chat_history: expected a template that keeps the last message, got one that changes it"
            )
        return text[: start + len(beginning)]

    def loglikelihood(self, requests: Sequence[Any], disable_tqdm: bool = False) -> list[tuple[float, bool]]:
        """See `Evaluator.loglikelihood`."""
        results = self.evaluator.loglikelihood([each.args for each in requests])
        return self._store_results("loglikelihood", requests, results)

    def loglikelihood_rolling(self, requests: Sequence[Any], disable_tqdm: bool = False) -> list[float]:
        """See `Evaluator.loglikelihood_rolling`."""
        results = self.evaluator.loglikelihood_rolling([each.args[0] for each in requests])
        return self._store_results("loglikelihood_rolling", requests, results)

    def generate_until(self, requests: Sequence[Any], disable_tqdm: bool = False) -> list[str]:
        """See `Evaluator.generate_until`."""
        results = self.evaluator.generate_until([each.args for each in requests])
        return self._store_results("generate_until", requests, results)

    def _store_results(self, kind: str, requests: Sequence[Any], results: list[Any]) -> list[Any]:
        """Store results in the cache of the harness, if it has one."""
        for request, result in zip(requests, results, strict=True):
            self.cache_hook.add_partial(kind, request.args, result)
        return results


def main() -> None:
    """Run lm-evaluation-harness with this model."""
    from lm_eval.__main__ import cli_evaluate

    cli_evaluate()


if __name__ == "__main__":
    main()
