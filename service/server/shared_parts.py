"""Parts of a server that several of its services use."""

from __future__ import annotations

from dataclasses import dataclass

from radixkv.events.readers import EventReaders
from radixkv.service.server.intake.shares import Shares
from radixkv.service.server.model_tokenizer import ModelTokenizer
from radixkv.service.structured.grammars import Grammars


@dataclass(frozen=True, slots=True)
class SharedParts:
    """Parts that the services of one server share.

    Attributes:
        readers: of the events; None if the engine logs none.
        tokenizer: the model's.
        grammars: what answers may be asked to follow.
        held: counts the bytes of requests and unsent answers.
    """

    readers: EventReaders | None
    tokenizer: ModelTokenizer
    grammars: Grammars
    held: Shares
