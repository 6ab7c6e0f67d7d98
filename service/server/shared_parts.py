"""Parts that several servicers of one server share."""

from __future__ import annotations

from dataclasses import dataclass, field

from radixkv.events.readers import EventReaders
from radixkv.service.server.model_tokenizer import ModelTokenizer
from radixkv.service.server.receive.fair_shares import FairShares
from radixkv.service.server.servicers.explanations import Explainer
from radixkv.service.server.servicers.stream_turns import StreamTurns
from radixkv.service.structured.grammars import Grammars


@dataclass(frozen=True, slots=True)
class SharedParts:
    """Parts that several servicers of one server share.

    Attributes:
        readers: subscriptions to cache events; None if the engine logs none.
        tokenizer: the model's tokenizer.
        grammars: compiler of the grammars that constrain completions.
        explainer: explains prompts.
        held_bytes: limits the bytes that requests and unsent responses hold in memory.
        turns: the turns in which token streams send.
    """

    readers: EventReaders | None
    tokenizer: ModelTokenizer
    grammars: Grammars
    explainer: Explainer
    held_bytes: FairShares
    turns: StreamTurns = field(default_factory=StreamTurns)
