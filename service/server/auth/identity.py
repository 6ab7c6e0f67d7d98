"""Identities of callers: their role, and the tenants they may act for."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum


class Role(Enum):
    """Role of a caller: one tenant, a router that acts for tenants, a reader of metrics, or an admin."""

    TENANT = "tenant"
    ROUTER = "router"
    READER = "reader"
    ADMIN = "admin"


OPERATORS = frozenset({Role.READER, Role.ADMIN})
"""Roles that see statistics of all tenants, and no tenant's tokens except by sending prompts themselves."""


@dataclass(frozen=True, slots=True)
class Identity:
    """An authenticated caller.

    Attributes:
        name: name of the credential, for the log.
        role: the caller's role.
        tenants: tenants that the caller may act for; None for all. One tenant with the role `TENANT`; empty with
            `READER`.
        is_anyone: whether this is the identity of every caller, because the server has no credentials.
        is_ingress: whether the caller belongs to the fleet of this server. It is either the ingress, which has already
            authorized its own callers, or another replica.
    """

    name: str
    role: Role
    tenants: frozenset[str] | None = None
    is_anyone: bool = False
    is_ingress: bool = False

    def may_act_for(self, tenant: str) -> bool:
        """Return whether the caller may name this tenant."""
        return self.tenants is None or tenant in self.tenants

    @property
    def may_read_cached_text(self) -> bool:
        """Whether tokens that a tenant has cached may be returned to the caller, if it may act for this tenant.

        An operator administers tenants without reading their prompts. This does not apply to servers without
        credentials, nor to the ingress of a fleet.
        """
        return self.role not in OPERATORS or self.is_anyone or self.is_ingress

    @property
    def own_tenant(self) -> str | None:
        """The tenant that a request without a tenant applies to; None if that is the unnamed tenant, or all tenants."""
        if self.role is not Role.TENANT or self.tenants is None:
            return None
        (tenant,) = self.tenants
        return tenant
