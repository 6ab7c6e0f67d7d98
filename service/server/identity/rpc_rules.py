"""The table of all RPCs, on every port: who may call each, and where its message names a tenant."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum
from typing import Any

from radixkv.errors import NotPermitted
from radixkv.service.server.identity.identity import Identity, Role


class Access(Enum):
    """Conditions of a call, by the credential of its caller.

    ```
                  nobody known   tenant           router                  reader   admin
    OPEN          yes            yes              yes                     yes      yes
    KNOWN         no             yes              yes                     yes      yes
    MODEL         no             yes              yes                     no       yes
    TENANT        no             for itself       for those it may name   no       yes
    READ          no             for itself       for those it may name   yes      yes
    GATEWAY       no             if gateway.tenant is one of its tenants  no       yes
    ALL_TENANTS   no             no               if it may name all      no       yes
    OVERVIEW      no             no               no                      yes      yes
    ADMIN         no             no               no                      no       yes
    ```

    A message that means all tenants because it names none is one of admins with `TENANT`, and of readers as well with
    `READ`.
    """

    OPEN = "open"
    KNOWN = "known"
    MODEL = "model"
    TENANT = "tenant"
    READ = "read"
    GATEWAY = "gateway"
    ALL_TENANTS = "all tenants"
    OVERVIEW = "overview"
    ADMIN = "admin"


@dataclass(frozen=True, slots=True)
class Rule:
    """Condition of one call, and where its message names a tenant.

    Attributes:
        access: what it asks of its caller.
        tenant_of: name of the field of the request that holds the message with `tenant`; empty for the request itself.
            Counts with `Access.TENANT` and `Access.READ` only.
        is_logged: whether the log tells who makes it.
        brings_tokens: whether its message has tokens that are no tenant's.
    """

    access: Access
    tenant_of: str = ""
    is_logged: bool = False
    brings_tokens: bool = False

    def admit(self, caller: Identity, gateway_tenant: str) -> None:
        """Refuse a caller who may not make the call, whatever its message says.

        Args:
            caller: who calls.
            gateway_tenant: the owner of the gateway's data.

        Raises:
            NotPermitted: the message names what would be needed.
        """
        if caller.role is Role.ADMIN or self.access in (Access.OPEN, Access.KNOWN, Access.READ):
            return
        if self.access in (Access.MODEL, Access.TENANT) and caller.role is Role.READER:
            raise NotPermitted("credential: expected the role tenant, router or admin, got reader")
        if self.access is Access.GATEWAY and not caller.may_act_for(gateway_tenant):
            raise NotPermitted("credential: expected one that may act for the gateway's tenant, got another")
        if self.access is Access.ALL_TENANTS and caller.tenants is not None:
            raise NotPermitted(
                f"credential: expected a router that may name all tenants, or an admin, got a {caller.role.value}"
            )
        if self.access is Access.OVERVIEW and caller.role is not Role.READER:
            raise NotPermitted(f"credential: expected the role reader or admin, got {caller.role.value}")
        if self.access is Access.ADMIN:
            raise NotPermitted(f"credential: expected the role admin, got {caller.role.value}")

    @property
    def has_prompts(self) -> bool:
        """Whether messages may bring tokens, and so be large."""
        return self.brings_tokens or self.access in (Access.TENANT, Access.GATEWAY)

    def owner(self, request: Any, gateway_tenant: str) -> str | None:
        """Return the tenant whose business a request is; None if it is nobody's, or everybody's."""
        if self.access is Access.GATEWAY:
            return gateway_tenant
        if self.access not in (Access.TENANT, Access.READ):
            return None
        message = self._message(request)
        return None if _names_none(message) else str(message.tenant)

    def place_tenant(self, caller: Identity, request: Any) -> None:
        """Write the caller's own tenant where the request names none, and refuse one that it may not act for.

        Raises:
            NotPermitted: the message never repeats the tenant that the request names.
        """
        if self.access not in (Access.TENANT, Access.READ) or caller.role is Role.READER:
            return  # `admit` lets readers make no other call
        message = self._message(request)
        own, named = caller.own_tenant, message.tenant
        if own is not None and not named:
            message.tenant = own
        elif not caller.may_act_for(named):
            raise NotPermitted("tenant: expected one that this credential may act for, got another")
        elif caller.role is not Role.ADMIN and _names_none(message):
            raise NotPermitted(f"tenant: expected one, since all need the role admin, got none as {caller.role.value}")

    def _message(self, request: Any) -> Any:
        return getattr(request, self.tenant_of) if self.tenant_of else request


def _names_none(message: Any) -> bool:
    """Return whether a message could name a tenant or none, and names none: then all are meant."""
    field = message.DESCRIPTOR.fields_by_name["tenant"]
    return bool(field.has_presence) and not message.HasField("tenant")


_OPEN, _KNOWN, _MODEL = Rule(Access.OPEN), Rule(Access.KNOWN), Rule(Access.MODEL)
_TENANT, _READ, _GATEWAY = Rule(Access.TENANT), Rule(Access.READ), Rule(Access.GATEWAY)

RULES: dict[str, Rule] = {
    "/radixkv.v1.PrefillService/Prefill": _TENANT,
    "/radixkv.v1.PrefillService/Generate": Rule(Access.TENANT, tenant_of="prefill"),
    "/radixkv.v1.PrefillService/Probe": _TENANT,
    "/radixkv.v1.PrefillService/Release": _TENANT,
    "/radixkv.v1.PrefillService/Renew": _TENANT,
    "/radixkv.v1.PrefillService/FetchKV": _TENANT,
    "/radixkv.v1.FleetService/Route": _TENANT,
    "/radixkv.v1.CacheService/Stats": _READ,
    "/radixkv.v1.CacheService/Retain": _TENANT,
    "/radixkv.v1.CacheService/Purge": Rule(Access.TENANT, is_logged=True),
    "/radixkv.v1.CacheService/ListSegments": _READ,
    "/radixkv.v1.CacheService/LoadAdapter": Rule(Access.ADMIN, is_logged=True),
    "/radixkv.v1.CacheService/UnloadAdapter": Rule(Access.ADMIN, is_logged=True),
    # Adapters are often named after those whose they are, and their counts are of all tenants.
    "/radixkv.v1.CacheService/ListAdapters": Rule(Access.OVERVIEW),
    "/radixkv.v1.CacheService/RegisterPublicPrefix": Rule(Access.ADMIN, is_logged=True, brings_tokens=True),
    "/radixkv.v1.CacheService/UnregisterPublicPrefix": Rule(Access.ADMIN, is_logged=True),
    "/radixkv.v1.CacheService/ListPublicPrefixes": Rule(Access.OVERVIEW),
    "/radixkv.v1.CacheService/Drain": Rule(Access.ADMIN, is_logged=True),
    "/radixkv.v1.EventService/Subscribe": Rule(Access.ALL_TENANTS),  # events of all tenants, with their tokens
    "/radixkv.v1.ModelService/GetTokenizer": _MODEL,
    "/vllm.grpc.engine.VllmEngine/Generate": _GATEWAY,
    "/vllm.grpc.engine.VllmEngine/Abort": _GATEWAY,
    "/vllm.grpc.engine.VllmEngine/HealthCheck": _OPEN,
    "/vllm.grpc.engine.VllmEngine/GetModelInfo": _GATEWAY,
    "/vllm.grpc.engine.VllmEngine/GetServerInfo": _GATEWAY,
    "/vllm.grpc.engine.VllmEngine/GetLoads": _GATEWAY,
    "/vllm.grpc.engine.VllmEngine/SubscribeKvEvents": _GATEWAY,
    "/vllm.grpc.engine.VllmEngine/GetTokenizer": _GATEWAY,
    "/vllm.grpc.engine.VllmEngine/FlushCache": Rule(Access.GATEWAY, is_logged=True),
    "/grpc.health.v1.Health/Check": _OPEN,  # probes of an orchestrator carry no credentials
    "/grpc.health.v1.Health/List": _OPEN,
    "/grpc.health.v1.Health/Watch": _OPEN,
    "/grpc.reflection.v1alpha.ServerReflection/ServerReflectionInfo": _KNOWN,
}
"""Rules by method. A method that is not here is refused to every caller."""
