"""Pairs of a prompt and a cached prompt that differ in a way (a shape) that users of real programs report."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import NamedTuple

from radixkv.api.explanation import DifferenceKind
from radixkv.model.tiny_files import write_tiny_files
from radixkv.service.text.tokenizer import Tokenizer

RULES = (
    "You are an interactive agent that helps users with software engineering tasks. Use the instructions below and the "
    "tools available to you to assist the user. Never guess URLs. Be concise, direct, and to the point. "
)
TASK = "\nuser: Fix the failing test in tests/test_parser.py and explain in one sentence what was wrong with it.\n"
THINKING = (
    "<think>The parser drops the last token when the input ends without a newline; I should look at flush.</think>\n"
)
ANSWER = "assistant: The parser lost its last token because flush() was never called at the end of the input.\n"
NEXT = "user: Thanks. Now do the same for the lexer, and keep the public interface of the module exactly as it is.\n"
REMINDER = "system: The user opened the file src/lexer.py in the editor. This may or may not be related to the task.\n"


def _tool(name: str, description: str) -> dict:
    parameters = {"type": "object", "properties": {name: {"type": "string"}}, "required": [name]}
    return {"name": f"{name}_tool", "description": description, "parameters": parameters}


_TOOLS = (
    _tool("path", "Reads a file from the local filesystem and returns its contents with line numbers."),
    _tool("command", "Executes a given shell command in a persistent session with an optional timeout."),
    _tool("pattern", "Searches for a regular expression in all files of the project, and lists the matches."),
)


def _with_tools(*order: int) -> str:
    """Return a prompt that contains the tools with these indexes, in this order."""
    return RULES + json.dumps([_TOOLS[index] for index in order]) + TASK


def _with_keys(*keys: str) -> str:
    """Return a prompt that contains a JSON object with these keys, in this order."""
    values = {"cwd": "/home/me/project", "platform": "linux", "shell": "zsh", "editor": "vim"}
    return RULES + json.dumps({key: values[key] for key in keys}) + TASK


def _with_first_line(build: str) -> str:
    """Return a prompt whose first line contains the number of a build."""
    return f"x-billing-header: version=2.1.37.{build}; entrypoint=cli;\n{RULES}{TASK}"


def _with_environment(line: str) -> str:
    """Return a prompt with this line in its middle."""
    return f"{RULES}\nHere is your environment:\n{line}\n{RULES}{TASK}"


_HISTORY = RULES + TASK + ANSWER + NEXT + 20 * (ANSWER + NEXT)
_SUMMARY = RULES + "\nuser: Summary of the conversation so far: the parser was fixed, the lexer is next.\n"

# By the name of the shape: the prompt, the cached prompt that it was expected to reuse, and the kind of the difference.
SHAPES: dict[str, tuple[str, str, DifferenceKind]] = {
    "build suffix in the first line": (_with_first_line("3a3"), _with_first_line("0d9"), DifferenceKind.RANDOM_ID),
    "uuid of a session": (
        _with_environment("Session: 550e8400-e29b-41d4-a716-446655440000"),
        _with_environment("Session: 9b2c1f4e-0b6a-4c55-8d1e-2f6a7c8e9d10"),
        DifferenceKind.RANDOM_ID,
    ),
    "base62 id of a call": (
        _with_environment("id: toolu_01A09q90qw90lq917835lq9"),
        _with_environment("id: toolu_01T1x1fJ34qAmk2tNTrN7Up"),
        DifferenceKind.RANDOM_ID,
    ),
    "hash of a commit": (
        _with_environment("HEAD is at 4f2a9c1 on main"),
        _with_environment("HEAD is at b07e55d on main"),
        DifferenceKind.RANDOM_ID,
    ),
    "ISO timestamp": (
        _with_environment("Now: 2026-11-05T10:32:11.123Z"),
        _with_environment("Now: 2026-11-05T10:34:59.007Z"),
        DifferenceKind.DATE_OR_TIME,
    ),
    "ISO date": (
        _with_environment("Today's date: 2026-11-05"),
        _with_environment("Today's date: 2026-11-06"),
        DifferenceKind.DATE_OR_TIME,
    ),
    "date in words": (
        _with_environment("It is Thursday, November 5, 2026, 10:32 AM UTC."),
        _with_environment("It is Friday, November 6, 2026, 9:05 AM UTC."),
        DifferenceKind.DATE_OR_TIME,
    ),
    "another month": (
        _with_environment("on 5 Nov 2026,"),
        _with_environment("on 5 Dec 2026,"),
        DifferenceKind.DATE_OR_TIME,
    ),
    "time of day": (
        _with_environment("at 10:32:11 today"),
        _with_environment("at 10:32:48 today"),
        DifferenceKind.DATE_OR_TIME,
    ),
    "Unix time": (
        _with_environment("ts=1762339931 ok"),
        _with_environment("ts=1762339987 ok"),
        DifferenceKind.DATE_OR_TIME,
    ),
    "counter": (
        _with_environment("Turn 9 of this task"),
        _with_environment("Turn 10 of this task"),
        DifferenceKind.NUMBER,
    ),
    "version": (
        _with_environment("cli version 2.1.37 on"),
        _with_environment("cli version 2.1.38 on"),
        DifferenceKind.NUMBER,
    ),
    "amount": (_with_environment("budget: $4.50 left"), _with_environment("budget: $3.75 left"), DifferenceKind.NUMBER),
    "tools in another order": (_with_tools(1, 0, 2), _with_tools(0, 1, 2), DifferenceKind.REORDERED),
    "last tool first": (_with_tools(2, 0, 1), _with_tools(0, 1, 2), DifferenceKind.REORDERED),
    "keys in another order": (
        _with_keys("platform", "cwd", "editor", "shell"),
        _with_keys("cwd", "platform", "shell", "editor"),
        DifferenceKind.REORDERED,
    ),
    "a tool less": (_with_tools(0, 2), _with_tools(0, 1, 2), DifferenceKind.REMOVED),
    "a tool more": (_with_tools(0, 1, 2), _with_tools(0, 2), DifferenceKind.INSERTED),
    "injected message": (
        RULES + REMINDER + TASK + ANSWER + NEXT,
        RULES + TASK + ANSWER + NEXT,
        DifferenceKind.INSERTED,
    ),
    "injected message that comes again later": (
        RULES + REMINDER + TASK + REMINDER + ANSWER + NEXT,
        RULES + TASK + REMINDER + ANSWER + NEXT,
        DifferenceKind.INSERTED,
    ),
    "stripped thinking": (
        RULES + TASK + ANSWER + NEXT,
        RULES + TASK + THINKING + ANSWER + NEXT,
        DifferenceKind.REMOVED,
    ),
    "thinking that leaves its tags": (
        RULES + TASK + "<think>\n\n</think>\n" + ANSWER + NEXT,
        RULES + TASK + THINKING.replace("<think>", "<think>\n").replace("</think>", "\n</think>") + ANSWER + NEXT,
        DifferenceKind.REMOVED,
    ),
    "compaction that keeps the last turns": (
        _SUMMARY + REMINDER + NEXT + THINKING,
        _HISTORY + REMINDER + NEXT + THINKING,
        DifferenceKind.REPLACED,
    ),
    "compaction": (_SUMMARY, _HISTORY, DifferenceKind.UNCLASSIFIED),
    "another sentence": (
        _with_environment("The user prefers short answers in plain English."),
        _with_environment("Always reply in German, with many examples."),
        DifferenceKind.REPLACED,
    ),
    "another question": (
        RULES + "user: How do I get rid of aphids?",
        RULES + "user: Which vegetables are easy to grow?",
        DifferenceKind.UNCLASSIFIED,
    ),
}


class Encoding(NamedTuple):
    """How text becomes token ids, and how token ids become text."""

    encode: Callable[[str], Sequence[int]]
    decode: Callable[[Sequence[int]], str]


CHARACTERS = Encoding(lambda text: [ord(character) for character in text], lambda ids: "".join(map(chr, ids)))
ENCODINGS = ("characters", "tiny")


def encoding_named(name: str, folder: Path) -> Encoding:
    """Return one of `ENCODINGS`: a token per character, or the tokenizer of the embedded model, written to a folder."""
    if name == "characters":
        return CHARACTERS
    write_tiny_files(folder)
    tokenizer = Tokenizer.load(folder)
    return Encoding(tokenizer.encode, tokenizer.decode)
