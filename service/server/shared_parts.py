"""Parts that several servicers of one server share."""

from __future__ import annotations

from dataclasses import dataclass

from radixkv.events.readers import EventReaders
from radixkv.service.server.model_tokenizer import ModelTokenizer
from radixkv.service.server.receive.fair_shares import FairShares
from radixkv.service.structured.grammars import Grammars


@dataclass(frozen=True, slots=True)
class SharedParts:
    """Parts that several servicers of one server share.

    Attributes:
        readers: subscriptions to cache events; None if the engine logs none.
        tokenizer: the model's tokenizer.
        grammars: compiler of the grammars that constrain completions.
        held_bytes: limits the bytes that requests and unsent responses hold in memory.
    """

    readers: EventReaders | None
    tokenizer: ModelTokenizer
    grammars: Grammars
    held_bytes: FairShares
