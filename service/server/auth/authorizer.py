"""Authorization: which callers may call each method, and for which tenants."""

from __future__ import annotations

import logging
from collections.abc import Collection
from dataclasses import dataclass
from enum import Enum
from functools import cache
from typing import Any

from google.protobuf.descriptor import Descriptor

from radixkv.errors import NotPermitted, SwitchedOff
from radixkv.service.server.auth.authenticator import Authenticator
from radixkv.service.server.auth.identity import OPERATORS, Identity, Role
from radixkv.service.server.calls import Context

_logger = logging.getLogger(__name__)


class Permission(Enum):
    """Permission that a method requires, and which roles have it.

    ```
                  no credential  tenant           router                  reader   admin
    OPEN          yes            yes              yes                     yes      yes
    KNOWN         no             yes              yes                     yes      yes
    MODEL         no             yes              yes                     no       yes
    TENANT        no             for itself       for tenants on its list no       yes
    READ          no             for itself       for tenants on its list yes      yes
    GATEWAY       no             if gateway.tenant is one of its tenants  no       yes
    ALL_TENANTS   no             no               if it may name all      no       yes
    OVERVIEW      no             no               no                      yes      yes
    ADMIN         no             no               no                      no       yes
    ```

    A request that names no tenant applies to the caller's own tenant if the caller has the role tenant. Otherwise it
    applies to the unnamed tenant, or, if the field `tenant` is optional, to all tenants. A request for all tenants
    requires the role admin with `TENANT`, and the role admin or reader with `READ`.
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
class MethodRule:
    """Permission that one method requires, and where its request names a tenant.

    Attributes:
        permission: the permission that the caller needs.
        message_with_tenant: name of the request's field whose message has the field `tenant`; empty if the request
            itself has it.
            Only used with `Permission.TENANT` and `Permission.READ`.
        is_logged: whether the log names the caller.
        has_tokens: whether the request carries prompt tokens that belong to no tenant.
    """

    permission: Permission
    message_with_tenant: str = ""
    is_logged: bool = False
    has_tokens: bool = False

    def require_permission(self, caller: Identity, gateway_tenant: str) -> None:
        """Refuse a caller that may not call the method, whatever its request contains.

        Args:
            caller: the authenticated caller.
            gateway_tenant: the tenant that owns the gateway's data.

        Raises:
            NotPermitted: the message names the role that is required.
        """
        permission, role = self.permission, caller.role
        if role is Role.ADMIN or permission in (Permission.OPEN, Permission.KNOWN, Permission.READ):
            return
        if permission in (Permission.MODEL, Permission.TENANT) and role is Role.READER:
            raise NotPermitted("credential: expected the role tenant, router or admin, got reader")
        if permission is Permission.GATEWAY and not caller.may_act_for(gateway_tenant):
            raise NotPermitted("credential: it may not act for the gateway's tenant")
        if permission is Permission.ALL_TENANTS and caller.tenants is not None:
            raise NotPermitted(
                f"credential: this call requires an admin, or a router for all tenants, got the role {role.value}"
            )
        if permission is Permission.OVERVIEW and role is not Role.READER:
            raise NotPermitted(f"credential: expected the role reader or admin, got {role.value}")
        if permission is Permission.ADMIN:
            raise NotPermitted(f"credential: expected the role admin, got {role.value}")

    @property
    def has_prompts(self) -> bool:
        """Whether requests may carry prompt tokens, and therefore be large."""
        return self.has_tokens or self.permission in (Permission.TENANT, Permission.GATEWAY)

    def bind_tenant(self, caller: Identity | None, request: Any, gateway_tenant: str) -> str | None:
        """Write the caller's own tenant into a request that names none, and refuse a tenant it may not act for.

        `omit_cached_text` is set in requests of operators, so that responses have no tokens that a tenant has cached;
        see `Identity.may_read_cached_text` for exceptions.

        Returns:
            The tenant that owns the request; None if no tenant does, or if the request applies to all tenants.

        Raises:
            NotPermitted: the caller may not act for the tenant, or the request requires the role admin. The message
                never repeats the tenant that the request names.
        """
        if self.permission is Permission.GATEWAY:
            return gateway_tenant
        if self.permission not in (Permission.TENANT, Permission.READ):
            return None
        message = getattr(request, self.message_with_tenant) if self.message_with_tenant else request
        if caller is not None and caller.role is not Role.READER:  # readers may read every tenant
            own_tenant = caller.own_tenant
            if own_tenant is not None and not message.tenant:
                message.tenant = own_tenant
            elif not caller.may_act_for(message.tenant):
                raise NotPermitted("tenant: this credential may not act for the tenant that the request names")
            elif caller.role is not Role.ADMIN and _applies_to_all_tenants(message):
                raise NotPermitted(
                    f"tenant: name one; a request for all tenants requires the role admin, got {caller.role.value}"
                )
            if caller.role is not Role.ADMIN and getattr(message, "return_block_table", False):
                raise NotPermitted(f"return_block_table: expected the role admin, got {caller.role.value}")
        has_cached_text = "omit_cached_text" in message.DESCRIPTOR.fields_by_name
        if has_cached_text and caller is not None and not caller.may_read_cached_text:
            message.omit_cached_text = True
        return None if _applies_to_all_tenants(message) else str(message.tenant)


def _applies_to_all_tenants(message: Any) -> bool:
    """Return whether the field `tenant` of a message is optional and not set."""
    return _has_optional_tenant(message.DESCRIPTOR) and not message.HasField("tenant")


@cache
def _has_optional_tenant(message_type: Descriptor) -> bool:
    return bool(message_type.fields_by_name["tenant"].has_presence)


_OPEN = MethodRule(Permission.OPEN)
_TENANT = MethodRule(Permission.TENANT)
_READ = MethodRule(Permission.READ)
_GATEWAY = MethodRule(Permission.GATEWAY)

RULES: dict[str, MethodRule] = {
    "/radixkv.v1.PrefillService/Prefill": _TENANT,
    "/radixkv.v1.PrefillService/Generate": MethodRule(Permission.TENANT, message_with_tenant="prefill"),
    "/radixkv.v1.PrefillService/Probe": _TENANT,
    "/radixkv.v1.PrefillService/Release": _TENANT,
    "/radixkv.v1.PrefillService/Renew": _TENANT,
    "/radixkv.v1.PrefillService/FetchKV": _TENANT,
    "/radixkv.v1.FleetService/Route": _TENANT,
    "/radixkv.v1.CacheService/Stats": _READ,
    "/radixkv.v1.CacheService/Statement": _READ,
    "/radixkv.v1.CacheService/Diagnose": _READ,
    "/radixkv.v1.CacheService/Retain": _TENANT,
    "/radixkv.v1.CacheService/Hint": _TENANT,
    "/radixkv.v1.CacheService/Explain": _TENANT,
    "/radixkv.v1.CacheService/EndSession": _TENANT,
    "/radixkv.v1.CacheService/Purge": MethodRule(Permission.TENANT, is_logged=True),
    "/radixkv.v1.CacheService/ListSegments": _READ,
    "/radixkv.v1.CacheService/LoadAdapter": MethodRule(Permission.ADMIN, is_logged=True),
    "/radixkv.v1.CacheService/UnloadAdapter": MethodRule(Permission.ADMIN, is_logged=True),
    # Adapters are often named after their owners, and their counts are sums over all tenants.
    "/radixkv.v1.CacheService/ListAdapters": MethodRule(Permission.OVERVIEW),
    "/radixkv.v1.CacheService/RegisterPublicPrefix": MethodRule(Permission.ADMIN, is_logged=True, has_tokens=True),
    "/radixkv.v1.CacheService/UnregisterPublicPrefix": MethodRule(Permission.ADMIN, is_logged=True),
    "/radixkv.v1.CacheService/ListPublicPrefixes": MethodRule(Permission.OVERVIEW),
    "/radixkv.v1.CacheService/Drain": MethodRule(Permission.ADMIN, is_logged=True),
    "/radixkv.v1.EventService/Subscribe": MethodRule(Permission.ALL_TENANTS),  # with the tokens of all tenants
    "/radixkv.v1.ModelService/GetTokenizer": MethodRule(Permission.MODEL),
    "/vllm.grpc.engine.VllmEngine/Generate": _GATEWAY,
    "/vllm.grpc.engine.VllmEngine/Abort": _GATEWAY,
    "/vllm.grpc.engine.VllmEngine/HealthCheck": _OPEN,
    "/vllm.grpc.engine.VllmEngine/GetModelInfo": _GATEWAY,
    "/vllm.grpc.engine.VllmEngine/GetServerInfo": _GATEWAY,
    "/vllm.grpc.engine.VllmEngine/GetLoads": _GATEWAY,
    "/vllm.grpc.engine.VllmEngine/SubscribeKvEvents": _GATEWAY,
    "/vllm.grpc.engine.VllmEngine/GetTokenizer": _GATEWAY,
    "/vllm.grpc.engine.VllmEngine/FlushCache": MethodRule(Permission.GATEWAY, is_logged=True),
    "/grpc.health.v1.Health/Check": _OPEN,  # the probes of orchestrators have no credentials
    "/grpc.health.v1.Health/List": _OPEN,
    "/grpc.health.v1.Health/Watch": _OPEN,
    "/grpc.reflection.v1alpha.ServerReflection/ServerReflectionInfo": MethodRule(Permission.KNOWN),
}
"""Rules by method. A method without a rule is refused to every caller."""


@dataclass(slots=True)
class Authorization:
    """A call that its caller may make, unless its request names a tenant that the caller may not act for.

    Attributes:
        method: the path of the call.
        rule: the rule of the method.
        identity: the caller; None if the method needs no authentication.
        gateway_tenant: the tenant that owns the gateway's data.
    """

    method: str
    rule: MethodRule
    identity: Identity | None
    gateway_tenant: str = ""

    def bind_tenant(self, request: Any) -> str | None:
        """Check and complete the tenant of the request, see `MethodRule.bind_tenant`, and log the call if required."""
        tenant = self.rule.bind_tenant(self.identity, request, self.gateway_tenant)
        if self.rule.is_logged and self.identity is not None:
            _logger.info("%s by %s", self.method, self.identity.name)
        return tenant


class Authorizer:
    """Refuses calls that their caller may not make, before their request is received.

    ```
    authenticate ─▶ may it call the method? ─▶ receive ─▶ may it name the tenant? ─▶ write its own if none ─▶ servicer
    UNAUTHENTICATED     PERMISSION_DENIED                 PERMISSION_DENIED
    ╰───────────── authorize ─────────────╯               ╰──────── Authorization.bind_tenant ────────╯
    ```

    So a servicer can rely on the tenant that a request names. Methods without a rule are UNIMPLEMENTED for all callers.

    Args:
        authenticator: identifies the caller.
        roles: the roles that the port accepts.
        gateway_tenant: the tenant that owns the gateway's data.
    """

    def __init__(
        self,
        authenticator: Authenticator,
        roles: Collection[Role] = frozenset(Role),
        gateway_tenant: str = "",
    ) -> None:
        self._authenticator = authenticator
        self._roles = roles
        self._gateway_tenant = gateway_tenant

    def require_still_authorized(self, authorization: Authorization, context: Context, request: Any = None) -> None:
        """Authorize a running call again, by the credentials that are valid now.

        Args:
            authorization: returned by `authorize`.
            context: gRPC's context of the call.
            request: the request, after `Authorization.bind_tenant`; None if the call has no single request.

        Raises:
            InvalidCredential, NotPermitted: the caller may not make the call any more.
        """
        current = self.authorize(authorization.method, context)
        if request is not None:
            current.rule.bind_tenant(current.identity, request, current.gateway_tenant)

    def authorize(self, method: str, context: Context) -> Authorization:
        """Authorize a call.

        Args:
            method: the path of the call, `/package.Service/Method`.
            context: gRPC's context of the call.

        Raises:
            InvalidCredential: the caller shows no valid credential.
            NotPermitted: the caller may not make the call, or not on this port.
            SwitchedOff: this server does not implement the method, for example because a newer version of a dependency
                has added it.
        """
        rule = RULES.get(method)
        if rule is None:
            raise SwitchedOff(f"{method}: this server does not implement the method")
        if rule.permission is Permission.OPEN:
            return Authorization(method, rule, None)
        caller = self._authenticator.identify_call(context)
        if caller.role not in self._roles:
            right_port, wrong_port = ("admin_port", "port") if caller.role in OPERATORS else ("port", "admin_port")
            raise NotPermitted(
                f"credential of role {caller.role.value}: expected on server.{right_port}, got on server.{wrong_port}"
            )
        rule.require_permission(caller, self._gateway_tenant)
        return Authorization(method, rule, caller, self._gateway_tenant)
