"""Traffic of agents in which a share of the requests has one known fault, and the same traffic without it."""

from __future__ import annotations

import json
import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from functools import cache, lru_cache

from radixkv.doctor.causes import MissCause
from radixkv.namespace import Namespace
from radixkv.service.text.tokenizer import Tokenizer

_SYLLABLES = (
    *("ka", "lo", "mi", "ter", "ran", "vel", "so", "ni", "per", "du", "ba", "gre", "sti", "mon", "fa", "ri", "che"),
    *("tol", "we", "nas", "pro", "cul", "den", "hi", "jo"),
)
# `<|im_end|>`, the last generated token, which is not cached, and a newline, which the template writes.
_END_TOKENS = 2
_NAMESPACE = Namespace("model", "acme")
_MIN_MESSAGES = 5  # shorter prompts never have the fault, since too few of their tokens could be reused without it
_RULES = (
    "You are an interactive agent that helps users with software engineering tasks. Use the instructions below and the "
    "tools available to you to assist the user. Never guess URLs. Be concise, direct, and to the point. "
)
_TOOLS = ("read", "write", "search", "run", "list", "fetch", "plan", "ask")
_LATE_TOOLS = ("notebook", "browser", "calendar", "mail")


@dataclass(frozen=True, slots=True)
class Message:
    """One message of a conversation.

    Attributes:
        role: who has written it.
        text: its text.
        thinking: reasoning before the text; empty if there is none.
        is_resplit: whether its tokens differ from those that the tokenizer returns for its text.
    """

    role: str
    text: str
    thinking: str = ""
    is_resplit: bool = False

    def content(self) -> str:
        """Return what the chat template writes after the role."""
        thinking = f"<think>\n{self.thinking}\n</think>\n\n" if self.thinking else ""
        return f"{thinking}{self.text}<|im_end|>\n"


@dataclass(frozen=True, slots=True)
class Payload:
    """The parts of a prompt that faults change.

    Attributes:
        build, suffix: a long and a short id in the first line.
        session_id: an id in the system prompt.
        now: a date or a time in the system prompt.
        turn: a number in the system prompt.
        tools: names of the tools, in order.
        keys: the keys of each tool, in order.
        messages: the conversation.
        first_text: text before everything, which a template writes.
        role_form: how the template writes a role.
        namespace: model, tenant, adapter and salt.
    """

    build: str
    suffix: str
    session_id: str
    now: str
    turn: int
    tools: tuple[str, ...]
    keys: tuple[str, ...]
    messages: tuple[Message, ...]
    first_text: str = ""
    role_form: str = "<|im_start|>{role}\n"
    namespace: Namespace = _NAMESPACE

    def pieces(self) -> list[tuple[str, bool]]:
        """Return the texts of the prompt, which are encoded one by one, and for each whether its tokens are resplit."""
        system_text = (
            f"x-billing-header: version=2.1.37.{self.suffix}; trace={self.build};\n{_RULES}\n# Environment\n"
            f"Session: {self.session_id}\nNow: {self.now}\nTurns so far: {self.turn}\n{_manual()}\n# Tools\n"
        )
        tools = json.dumps([_tool(name, self.keys) for name in self.tools])
        pieces = [(self.first_text, False)] if self.first_text else []
        pieces += [(self._role("system"), False), (f"{system_text}{tools}<|im_end|>\n", False)]
        for message in self.messages:
            pieces += [(self._role(message.role), False), (message.content(), message.is_resplit)]
        return [*pieces, (self._role("assistant"), False)]

    def _role(self, role: str) -> str:
        return self.role_form.format(role=role)


@dataclass(frozen=True, slots=True)
class AgentRequest:
    """One request of a conversation.

    Attributes:
        token_ids: tokens of the prompt.
        answer_ids: tokens that were generated and cached after the prompt.
        namespace: model, tenant, adapter and salt.
        session: name of the conversation.
        time_s: time at which the request is sent.
        is_planted: whether the request has the fault.
    """

    token_ids: Sequence[int]
    answer_ids: Sequence[int]
    namespace: Namespace
    session: str
    time_s: float
    is_planted: bool


@dataclass(frozen=True, slots=True)
class Fault:
    """A fault of a program.

    Attributes:
        name: names it in results.
        cause: the cause that must be found.
        plant: returns what a program with the fault sends.
    """

    name: str
    cause: MissCause
    plant: Callable[[Payload, random.Random], Payload]


def _hex(rng: random.Random, digits: int) -> str:
    return f"{rng.randrange(16 ** (digits - 1), 16**digits):x}"


def _uuid(rng: random.Random) -> str:
    return "-".join(_hex(rng, each) for each in (8, 4, 4, 4, 12))


def _shuffle(values: tuple[str, ...], rng: random.Random) -> tuple[str, ...]:
    """Return the values in another order."""
    while True:
        shuffled = tuple(rng.sample(values, len(values)))
        if shuffled != values:
            return shuffled


def _insert_reminder(payload: Payload, rng: random.Random) -> Payload:
    position = rng.randrange(1, len(payload.messages) - 2)
    text = (
        f"The user opened the file {_words(rng, 1)}.py in the editor. This may or may not be related: {_words(rng, 8)}"
    )
    inserted = Message("system", text)
    return replace(payload, messages=(*payload.messages[:position], inserted, *payload.messages[position:]))


def _compact(payload: Payload, rng: random.Random) -> Payload:
    summary = Message("user", f"Summary of the conversation so far: {_words(rng, 20)}")
    return replace(payload, messages=(summary, *payload.messages[-3:]))


def _strip_thinking(payload: Payload, rng: random.Random) -> Payload:
    del rng
    return replace(payload, messages=tuple(replace(each, thinking="") for each in payload.messages))


def _resplit_answer(payload: Payload, rng: random.Random) -> Payload:
    places = [index for index, each in enumerate(payload.messages[:-2]) if each.role == "assistant"]
    position = rng.choice(places)
    changed = replace(payload.messages[position], is_resplit=True)
    return replace(payload, messages=(*payload.messages[:position], changed, *payload.messages[position + 1 :]))


def _remove_tool(payload: Payload, rng: random.Random) -> Payload:
    removed_index = rng.randrange(len(payload.tools) - 1)
    return replace(payload, tools=(*payload.tools[:removed_index], *payload.tools[removed_index + 1 :]))


def _add_tool(payload: Payload, rng: random.Random) -> Payload:
    position = len(payload.tools) // 2
    return replace(payload, tools=(*payload.tools[:position], rng.choice(_LATE_TOOLS), *payload.tools[position:]))


def _later_time(rng: random.Random) -> str:
    return f"2026-11-{rng.randrange(6, 29):02}T{rng.randrange(24):02}:{rng.randrange(60):02}:{rng.randrange(60):02}Z"


FAULTS = (
    Fault("hexadecimal digits in the first line", MissCause.RANDOM_ID, lambda p, rng: replace(p, build=_hex(rng, 16))),
    Fault(
        "short build suffix", MissCause.RANDOM_ID, lambda p, rng: replace(p, suffix=rng.choice("abcdef") + _hex(rng, 2))
    ),
    Fault("UUID", MissCause.RANDOM_ID, lambda p, rng: replace(p, session_id=_uuid(rng))),
    Fault("timestamp", MissCause.DATE_OR_TIME, lambda p, rng: replace(p, now=_later_time(rng))),
    Fault("date of another day", MissCause.DATE_OR_TIME, lambda p, rng: replace(p, now="2026-11-06T08:00:00Z")),
    Fault("counter", MissCause.NUMBER, lambda p, rng: replace(p, turn=rng.randrange(2, 10_000))),
    Fault("tools in another order", MissCause.REORDERED, lambda p, rng: replace(p, tools=_shuffle(p.tools, rng))),
    Fault("keys in another order", MissCause.REORDERED, lambda p, rng: replace(p, keys=_shuffle(p.keys, rng))),
    Fault("a tool less", MissCause.TOOLS_CHANGED, _remove_tool),
    Fault("a tool more", MissCause.TOOLS_CHANGED, _add_tool),
    Fault("injected system message", MissCause.MESSAGE_INSERTED, _insert_reminder),
    Fault("compaction that keeps the last messages", MissCause.COMPACTED, _compact),
    Fault("stripped thinking", MissCause.THINKING_STRIPPED, _strip_thinking),
    Fault("re-tokenized answer", MissCause.RETOKENIZED, _resplit_answer),
    Fault(
        "token that begins a sequence",
        MissCause.TEMPLATE_CHANGED,
        lambda p, rng: replace(p, first_text="<|endoftext|>"),
    ),
    Fault(
        "another chat template",
        MissCause.TEMPLATE_CHANGED,
        lambda p, rng: replace(p, role_form="[{role}]\n"),
    ),
    Fault(
        "salt of each request",
        MissCause.SALT_CHANGED,
        lambda p, rng: replace(p, namespace=p.namespace._replace(salt=_hex(rng, 8))),
    ),
    Fault(
        "another adapter",
        MissCause.ADAPTER_CHANGED,
        lambda p, rng: replace(p, namespace=p.namespace._replace(adapter=rng.choice("ab"))),
    ),
    Fault(
        "another tenant",
        MissCause.TENANT_CHANGED,
        lambda p, rng: replace(p, namespace=p.namespace._replace(tenant=f"team {rng.randrange(4)}")),
    ),
)


@dataclass
class Traffic:
    """Sessions of agents, whose requests are sent in random order; those of each session are in sequence.

    Args:
        tokenizer: encodes the prompts.
        num_sessions: number of conversations.
        num_turns: requests of each conversation.
        seed: seed of all random choices.
    """

    tokenizer: Tokenizer
    num_sessions: int
    num_turns: int
    seed: int = 0
    _encode: Callable[[str, bool], tuple[int, ...]] = field(init=False)

    def __post_init__(self) -> None:
        self._encode = lru_cache(maxsize=100_000)(self._encode_uncached)

    def requests(self, fault: Fault | None, share: float) -> list[AgentRequest]:
        """Return the requests, with the fault in a share of those that have something to lose.

        The texts and their order depend only on the seed; which requests have the fault depends also on the share.
        """
        text_rng = random.Random(f"{self.seed} texts")
        fault_rng = random.Random(f"{self.seed} faults")
        planting_rng = random.Random(f"{self.seed} chance")
        conversations = [self._messages(text_rng) for _ in range(self.num_sessions)]
        num_sent = [0] * self.num_sessions
        session_order = [index for index in range(self.num_sessions) for _ in range(self.num_turns)]
        text_rng.shuffle(session_order)
        requests = []
        for time_s, index in enumerate(session_order):
            num_messages = 1 + 2 * num_sent[index]  # the user's, then an assistant's and a tool's for each request
            num_sent[index] += 1
            payload = Payload(
                build="8d9f3a11c27be845",
                suffix="3a3",
                session_id="9b2c1f4e-0b6a-4c55-8d1e-2f6a7c8e9d10",
                now="2026-11-05T10:32:11Z",
                turn=1,
                tools=_TOOLS,
                keys=("name", "description", "parameters"),
                messages=conversations[index][:num_messages],
            )
            is_planted = fault is not None and num_messages >= _MIN_MESSAGES and planting_rng.random() < share
            if is_planted and fault is not None:
                payload = fault.plant(payload, fault_rng)
            token_ids = [token_id for piece in payload.pieces() for token_id in self._encode(*piece)]
            answer_ids = self._encode(conversations[index][num_messages].content(), False)[:-_END_TOKENS]
            requests.append(
                AgentRequest(token_ids, answer_ids, payload.namespace, f"session {index}", float(time_s), is_planted)
            )
        return requests

    def _messages(self, rng: random.Random) -> tuple[Message, ...]:
        messages = [Message("user", _words(rng, 30))]
        for _ in range(self.num_turns):
            call = json.dumps({"name": rng.choice(_TOOLS), "arguments": {"path": f"src/{_words(rng, 1)}.py"}})
            messages.append(Message("assistant", f"{_words(rng, 12)}\n{call}", thinking=_words(rng, 25)))
            messages.append(Message("tool", _words(rng, rng.randrange(30, 120))))
        return tuple(messages)

    def _encode_uncached(self, text: str, is_resplit: bool) -> tuple[int, ...]:
        if not is_resplit:
            return tuple(self.tokenizer.encode_rendered(text))
        ids: list[int] = []
        # Generated tokens differ from those of the text where the model has split a word in another way.
        middle = text.index("</think>") if "</think>" in text else len(text) // 2
        split_at = next(index for index in range(middle + 10, len(text)) if text[index - 2 : index + 3].isalpha())
        for part in (text[:split_at], text[split_at:]):
            ids += self.tokenizer.encode_rendered(part)
        return tuple(ids)


def _words(rng: random.Random, num_words: int) -> str:
    words = ("".join(rng.choice(_SYLLABLES) for _ in range(rng.randrange(1, 4))) for _ in range(num_words))
    return " ".join(words)


@lru_cache(maxsize=1)
def _manual() -> str:
    """Return the part of the system prompt that is the same in every request."""
    return _words(random.Random("manual"), 300)


@cache
def _tool(name: str, keys: tuple[str, ...]) -> dict[str, object]:
    rng = random.Random(name)
    parameters = {"type": "object", "properties": {"path": {"type": "string", "description": _words(rng, 6)}}}
    values = {"name": name, "description": _words(rng, 25), "parameters": parameters}
    return {key: values[key] for key in keys}
