"""`radixkv prefill`: prefills one prompt, and prints the next token and what was reused."""

from __future__ import annotations

import argparse

from radixkv.service.cli.argument_types import count
from radixkv.service.cli.connection import add_connection, client_of
from radixkv.service.cli.options import Option, add_options
from radixkv.service.cli.output import json_of, prefill_table
from radixkv.service.cli.prompt import add_prompt, prompt_of, prompt_options


def add_arguments(prefill: argparse.ArgumentParser) -> None:
    """Add the arguments of the command to its parser."""
    prefill.description = "Prefill one prompt. Prints the next token, and how many tokens of the prompt were cached."
    add_prompt(prefill)
    add_options(prefill, [Option("--top-logprobs", "N", count, "number of most likely next tokens to print", 0)])
    add_connection(prefill)
    prefill.set_defaults(command=_prefill)


def _prefill(arguments: argparse.Namespace) -> None:
    with client_of(arguments) as client:
        prompt = prompt_of(arguments, client)
        options = prompt_options(arguments, len(prompt.token_ids))
        response = client.prefill(prompt.token_ids, top_logprobs=arguments.top_logprobs, **options)
    text = None if prompt.tokenizer is None else prompt.tokenizer.decode([response.next_token_id])
    print(json_of(response, next_token_text=text) if arguments.json else prefill_table(response, text))
