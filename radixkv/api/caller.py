"""The owner of a request."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Caller:
    """Names the owner of a request's data. Requests share cached tokens only if all three names are equal.

    All callers share public prefixes. The service takes the names from the request, and authorizes the tenant.

    Attributes:
        tenant: the customer or team that owns the data; quotas and fair shares are per tenant.
        adapter: name of a loaded adapter; empty for the base model.
        salt: chosen by the caller to keep data apart within a tenant.
    """

    tenant: str = ""
    adapter: str = ""
    salt: str = ""


ANONYMOUS = Caller()
