"""Logs of prompts for tests, with a token per character."""

from __future__ import annotations

from collections.abc import Sequence

from radixkv.doctor.causes import MissCause
from radixkv.doctor.diagnosis import LogDiagnosis, diagnose
from radixkv.doctor.examination import Examiner
from radixkv.doctor.prompt_log import LoggedPrompt, PromptLog
from radixkv.doctor.replay import CacheSize
from radixkv.namespace import Namespace
from radixkv.planning.time_model import TimeModel

ACME = Namespace("model", "acme")
MIN_LOST_TOKENS = 32


def characters(token_ids: Sequence[int]) -> str:
    """Return the text of tokens, which are characters."""
    return "".join(map(chr, token_ids))


def log_of(*prompts: str | tuple[str, Namespace] | tuple[str, Namespace, str]) -> PromptLog:
    """Return a log of texts, perhaps with a namespace and a session, one second after the other."""
    log = PromptLog()
    for index, each in enumerate(prompts):
        text, namespace, session = (
            (*each, *(ACME, "")[len(each) - 1 :]) if isinstance(each, tuple) else (each, ACME, "")
        )
        prompt = LoggedPrompt(f"log:{index + 1}", len(text), namespace, session, float(index))
        log.add(prompt, [ord(each) for each in text])
    return log


def diagnosed(
    log: PromptLog, *, size: CacheSize | None = None, max_groups: int = 10, times: TimeModel | None = None
) -> LogDiagnosis:
    """Diagnose a log of characters."""
    with log:
        return diagnose(
            log, Examiner(characters), min_lost_tokens=MIN_LOST_TOKENS, size=size, max_groups=max_groups, times=times
        )


def causes(found: LogDiagnosis) -> list[MissCause | None]:
    """Return the cause of each prompt."""
    return [None if each is None else each.key.cause for each in found.findings]
