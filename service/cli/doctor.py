"""`radixkv doctor`: says why the prompts of a server or of a log are not reused, and what to change."""

from __future__ import annotations

import argparse
import itertools
import json
import sys
from collections.abc import Iterable
from contextlib import ExitStack
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

from radixkv.config import EVICTION_POLICIES, CacheConfig
from radixkv.doctor.block_examination import BlockExaminer, trace_log
from radixkv.doctor.diagnosis import diagnose
from radixkv.doctor.examination import Examiner
from radixkv.doctor.prompt_log import PromptLog
from radixkv.doctor.replay import MIN_LOST_TOKENS, CacheSize, PromptExaminer
from radixkv.errors import ConfigError
from radixkv.planning.time_model import TimeModel
from radixkv.planning.trace_records import read_records
from radixkv.service.cli.argument_types import COUNTS, positive, positive_number, whole
from radixkv.service.cli.connection import TENANT, add_connection, client_of
from radixkv.service.cli.doctor_report import log_diagnosis_object, log_diagnosis_text, server_diagnosis_text
from radixkv.service.cli.options import Option, add_choice, add_options, flag
from radixkv.service.cli.output import json_of
from radixkv.service.cli.prompt_log_file import GetTokenizer, PromptLogReader, RejectedConversation, is_prompt
from radixkv.service.cli.trace_options import TRACE_OPTIONS, requests_of
from radixkv.service.progress_bar import progress_bar

if TYPE_CHECKING:
    from radixkv.service.text.tokenizer import Tokenizer

_DESCRIPTION = (
    "Say why prompts are not reused, grouped by cause, and what to change. Without LOG, list the causes that a running "
    "server has found in a sample of its misses of the last one to two hours. With LOG, replay a log of prompts "
    "through the prefix cache, and measure what fixing each cause would save. The log has one JSON object per line, "
    "with the prompt as token_ids, text or messages; bodies of requests to the APIs of OpenAI and Anthropic are such "
    "objects. "
    f"Traces of `radixkv simulate` are accepted as well; they contain neither tokens nor text. {COUNTS}"
)
_LOG_ONLY = (
    Option("--min-lost-tokens", "N", positive, "smallest loss per prompt that is reported, in tokens", MIN_LOST_TOKENS),
    Option(
        "--capacity-tokens",
        "N",
        whole,
        "capacity of the cache in tokens; evictions are then reported as a cause (default: unbounded, so that all "
        "causes are in the prompts)",
    ),
    Option("--policy", None, None, "eviction policy", CacheConfig().policy, more={"choices": EVICTION_POLICIES}),
    Option(
        "--time-model",
        "FILE",
        Path,
        "JSON file of `radixkv plan` that says how long prefills take; adds seconds (default: no seconds)",
    ),
)
_SERVER_ONLY = (
    TENANT,
    flag("--omit-cached-text", "leave out the tokens and the text of prompts"),
)
_TOKENIZERS = (
    Option(
        "--tokenizer",
        "DIR|FILE.gguf|ORG/NAME",
        None,
        "the tokenizer of the model: a directory, a GGUF file, or a model of the Hugging Face Hub in the local cache "
        "(default: for texts, that of the served model)",
    ),
    flag("--bytes", "use the bytes of texts as token ids, without a tokenizer"),
)
_, *_TRACE_ONLY = TRACE_OPTIONS  # `add_arguments` adds the file with a help line of its own
_DEFAULT_NUM_CAUSES = 5


def add_arguments(doctor: argparse.ArgumentParser) -> None:
    """Add the arguments of the command to its parser."""
    doctor.description = _DESCRIPTION
    log = Option(
        "trace",
        None,
        None,
        "log of prompts or trace, plain or gzip (default: the running server)",
        more={"metavar": "LOG", "nargs": "?"},
    )
    top = Option(
        "--top",
        "N",
        positive,
        "number of causes that are listed; with LOG, one replay measures each cause",
        _DEFAULT_NUM_CAUSES,
    )
    price = Option(
        "--price-per-million-tokens", "X", positive_number, "price of a million computed tokens (default: none)"
    )
    add_options(doctor, [log, top, price])
    add_options(doctor.add_argument_group("servers", "Only without LOG."), _SERVER_ONLY)
    add_options(doctor.add_argument_group("logs", "Only with LOG."), _LOG_ONLY)
    texts = doctor.add_argument_group("texts", "Only with LOG: encode texts and messages, and decode token ids.")
    add_choice(texts, _TOKENIZERS)
    add_options(doctor.add_argument_group("traces", "Only for traces, except --limit."), _TRACE_ONLY)
    add_connection(doctor)
    doctor.set_defaults(command=_doctor)


def _doctor(arguments: argparse.Namespace) -> None:
    if arguments.trace is None:
        log_options = (*_LOG_ONLY, *_TOKENIZERS, *_TRACE_ONLY)
        _require_unset(arguments, "expected a log with this option, got none", log_options)
        with client_of(arguments) as client:
            response = client.diagnose(
                tenant=arguments.tenant, max_causes=arguments.top, omit_cached_text=arguments.omit_cached_text
            )
        price = arguments.price_per_million_tokens
        print(json_of(response) if arguments.json else server_diagnosis_text(response, price))
        return
    _require_unset(arguments, "is for a running server, and a log was given", _SERVER_ONLY)
    time_model = None if arguments.time_model is None else TimeModel.read(arguments.time_model)
    cache_size = CacheSize(arguments.capacity_tokens, policy=arguments.policy)
    block_size, capacity_tokens = cache_size.block_size, cache_size.capacity_tokens
    if capacity_tokens is not None and capacity_tokens < block_size:
        raise ConfigError(f"--capacity-tokens: expected at least a block of {block_size} tokens, got {capacity_tokens}")
    with ExitStack() as stack:
        log, examiner, notes = _read_log(arguments, stack)
        with progress_bar("replays", len(log) * (1 + arguments.top)) as advance:
            diagnosis = diagnose(
                log,
                examiner,
                size=cache_size,
                min_lost_tokens=arguments.min_lost_tokens,
                max_groups=arguments.top,
                times=time_model,
                on_prompt=advance,
            )
    price = arguments.price_per_million_tokens
    if arguments.json:
        print(json.dumps(log_diagnosis_object(diagnosis, price), indent=2))
    else:
        print(log_diagnosis_text(diagnosis, price))
    for note in notes:
        print(f"note: {note}", file=sys.stderr)


def _require_unset(arguments: argparse.Namespace, problem: str, options: Iterable[Option]) -> None:
    """Refuse options that the command does not use.

    Raises:
        ConfigError: the message begins with the option.
    """
    for option in options:
        value = getattr(arguments, option.name.removeprefix("--").replace("-", "_"))
        if value not in (option.default, False):
            raise ConfigError(f"{option.name}: {problem}")


def _read_log(arguments: argparse.Namespace, stack: ExitStack) -> tuple[PromptLog, PromptExaminer, list[str]]:
    """Read the log or trace. Returns its prompts, their examiner, and notes about the log for stderr."""
    path = Path(arguments.trace)
    first_record = next(read_records(path), None)
    if first_record is None:
        raise ConfigError(f"{path}: expected at least one prompt, got an empty file")
    if not is_prompt(first_record.value):
        log = stack.enter_context(trace_log(requests_of(arguments)))
        note = "the trace has only ids of blocks: causes are classified by their position, and losses are upper bounds"
        if not any(each.session for each in log):
            note += "; without sessions, it does not say which prompts continue each other"
        return log, BlockExaminer(log.tokens_per_unit), [note]
    get_tokenizer = _tokenizer_getter(arguments, stack)
    notes = []
    try:
        reader = _read_prompts(arguments, stack, get_tokenizer, is_plain=False)
    except RejectedConversation as error:
        notes.append(
            "conversations are written in a plain form, since the chat template of the tokenizer rejects some of them; "
            f"their numbers of tokens differ slightly from those of the model; the first rejected one is {error}"
        )
        reader = _read_prompts(arguments, stack, get_tokenizer, is_plain=True)
    decode = None
    if arguments.bytes:
        decode = _decode_bytes
    elif reader.has_text or arguments.tokenizer is not None:
        decode = reader.tokenizer().decode
    else:
        notes.append("without --tokenizer, changed ids, dates and numbers are reported only as changed passages")
    return reader.log, Examiner(decode), notes


def _read_prompts(
    arguments: argparse.Namespace, stack: ExitStack, get_tokenizer: GetTokenizer, *, is_plain: bool
) -> PromptLogReader:
    log = stack.enter_context(PromptLog())
    reader = PromptLogReader(log, get_tokenizer, has_bytes=arguments.bytes, is_plain=is_plain)
    for record in itertools.islice(read_records(Path(arguments.trace)), arguments.limit):
        reader.add(record)
    return reader


def _decode_bytes(token_ids: Any) -> str:
    return bytes(each for each in token_ids if each < 256).decode("utf-8", "replace")


def _tokenizer_getter(arguments: argparse.Namespace, stack: ExitStack) -> GetTokenizer:
    """Return a function that loads the tokenizer at its first call: the one of `--tokenizer`, or else of the server."""

    @cache
    def get_tokenizer() -> Tokenizer:
        from radixkv.service.cli.prompt import load_tokenizer, served_tokenizer

        if arguments.tokenizer is not None:
            return load_tokenizer(arguments.tokenizer)
        from radixkv.service.client.errors import ConnectError

        try:
            client = stack.enter_context(client_of(arguments))
            return served_tokenizer(client, "--tokenizer", "pass the tokenizer of the model, or --bytes for texts")
        except ConnectError as error:
            raise ConfigError(
                f"--tokenizer: expected a tokenizer for the texts of the log, got none; {error}"
            ) from error

    return get_tokenizer
