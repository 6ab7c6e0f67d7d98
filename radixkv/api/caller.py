"""The owner of a request."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Caller:
    """Names the owner of a request's data. Requests share cached tokens only if tenant, adapter and salt are the same.

    Different names of one adapter count as the same adapter. All callers share public prefixes. If an adapter is
    invoked within the prompt, the tokens before the invocation are shared with the base model; see
    `radixkv.invocation`.

    The service takes the names from the request, and authorizes the tenant. If the request names no tenant, the tenant
    of the credential is used.

    Attributes:
        tenant: the customer or team that owns the data; quotas and fair shares are per tenant.
        adapter: name of a loaded adapter; empty for the base model.
        salt: chosen by the caller to keep data apart within a tenant.
    """

    tenant: str = ""
    adapter: str = ""
    salt: str = ""


ANONYMOUS = Caller()
