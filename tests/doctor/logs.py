"""Logs of prompts for tests, with one token per character."""

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
    """Return a log of prompts that were received a second apart.

    Args:
        prompts: the text of each prompt, or a tuple of the text, a namespace (otherwise `ACME`), and a session if any.
    """
    log = PromptLog()
    for index, each in enumerate(prompts):
        fields = (each,) if isinstance(each, str) else each
        text = fields[0]
        namespace = fields[1] if len(fields) > 1 else ACME
        session = fields[2] if len(fields) > 2 else ""
        prompt = LoggedPrompt(f"log:{index + 1}", len(text), namespace, session, float(index))
        log.add(prompt, [ord(character) for character in text])
    return log


def diagnose_log(
    log: PromptLog, *, size: CacheSize | None = None, max_groups: int = 10, times: TimeModel | None = None
) -> LogDiagnosis:
    """Diagnose a log whose tokens are characters."""
    with log:
        return diagnose(
            log, Examiner(characters), min_lost_tokens=MIN_LOST_TOKENS, size=size, max_groups=max_groups, times=times
        )


def causes(diagnosis: LogDiagnosis) -> list[MissCause | None]:
    """Return the cause of each prompt."""
    return [None if each is None else each.key.cause for each in diagnosis.findings]
