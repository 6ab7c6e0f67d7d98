"""A caller that is known, and the tenants that it may act for."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum


class Role(Enum):
    """Kind of a caller: one tenant, a router that names tenants, a reader of metrics, or an admin, who may do all."""

    TENANT = "tenant"
    ROUTER = "router"
    READER = "reader"
    ADMIN = "admin"


OPERATORS = frozenset({Role.READER, Role.ADMIN})
"""Roles that see what all tenants have, and no tenant's tokens but by a prompt of their own."""


@dataclass(frozen=True, slots=True)
class Identity:
    """A caller that is known.

    Attributes:
        name: of the credential, for the log; never of a tenant.
        role: the kind of caller.
        tenants: those that it may act for; None for all. Exactly one with the role `TENANT`, none with `READER`.
        is_anyone: whether it stands for all callers, since there are no credentials.
    """

    name: str
    role: Role
    tenants: frozenset[str] | None = None
    is_anyone: bool = False

    def may_act_for(self, tenant: str) -> bool:
        """Return whether the caller may name this tenant."""
        return self.tenants is None or tenant in self.tenants

    @property
    def own_tenant(self) -> str | None:
        """The tenant that a message without one means; None if it means what it says."""
        if self.role is not Role.TENANT or self.tenants is None:
            return None
        (tenant,) = self.tenants
        return tenant
