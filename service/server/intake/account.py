"""The accounts on which calls and bytes are counted, so that nobody uses up another one's share."""

from __future__ import annotations

from enum import StrEnum
from typing import NamedTuple

from radixkv.service.server.identity.gate import Admission
from radixkv.service.server.unfinished_calls import Context


class Kind(StrEnum):
    """Kinds of accounts. Two of different kinds are never the same, whatever their names are.

    Texts, because those of `Enum` are hashed in Python, five times a call.
    """

    TENANT = "a tenant, for what is its own"
    CREDENTIAL = "a caller who is known"
    CONNECTION = "a caller who is not"


class Account(NamedTuple):
    """Name of who a call, or what it holds, is counted for."""

    kind: Kind
    name: str

    @classmethod
    def of_caller(cls, admission: Admission, context: Context) -> Account:
        """Return the account of who makes a call: a credential, however many connections it has, or else a connection.

        An address would not tell strangers apart: without credentials all are on this machine or behind one proxy.
        """
        caller = admission.caller
        if caller is None or caller.is_anyone:
            return cls(Kind.CONNECTION, context.peer())
        return cls(Kind.CREDENTIAL, caller.name)

    @classmethod
    def of_tenant(cls, name: str) -> Account:
        """Return the account of a tenant."""
        return cls(Kind.TENANT, name)
