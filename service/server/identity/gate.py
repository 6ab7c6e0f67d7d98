"""Lets calls through by the table of rules."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from radixkv.errors import SwitchedOff
from radixkv.service.server.identity.doors import Door
from radixkv.service.server.identity.identity import Identity
from radixkv.service.server.identity.rpc_rules import RULES, Access, Rule
from radixkv.service.server.unfinished_calls import Context

_logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Admission:
    """A call that its caller may make, if its message names no other tenant.

    Attributes:
        method: its path.
        rule: of the call.
        caller: who makes it; None if anyone may.
        gateway_tenant: the owner of the gateway's data.
    """

    method: str
    rule: Rule
    caller: Identity | None
    gateway_tenant: str = ""

    def owner(self, message: Any) -> str | None:
        """Return the tenant whose business a message is; None if it is nobody's, or everybody's."""
        return self.rule.owner(message, self.gateway_tenant)

    def place_tenant(self, message: Any) -> None:
        """Write the caller's own tenant into a message that names none, and log calls whose rule asks for it.

        Raises:
            NotPermitted: the caller may not act for the tenant that it names.
        """
        if self.caller is not None:
            self.rule.place_tenant(self.caller, message)
            if self.rule.is_logged:
                _logger.info("%s by %s", self.method, self.caller.name)


class Gate:
    """Refuses calls that their caller may not make, before their message is received.

    ```
    call ─▶ who is it? ─▶ may it call this? ─▶ receive ─▶ may it name this tenant? ─▶ write its own if none ─▶ handler
            UNAUTHENTICATED  PERMISSION_DENIED            PERMISSION_DENIED
            ╰──────────── admit ────────────╯             ╰─────── Admission.place_tenant ───────╯
    ```

    So a handler takes the tenant of a message for granted. A method without a rule is UNIMPLEMENTED for every caller.

    Args:
        door: of the port.
        gateway_tenant: the owner of the gateway's data.
        rules: the table.
    """

    def __init__(self, door: Door, gateway_tenant: str = "", rules: Mapping[str, Rule] = RULES) -> None:
        self._door = door
        self._gateway_tenant = gateway_tenant
        self._rules = rules

    def admit(self, method: str, context: Context) -> Admission:
        """Let a call begin.

        Args:
            method: its path, `/package.Service/Method`.
            context: of the call.

        Raises:
            InvalidCredential: the caller is nobody that is known.
            NotPermitted: the caller may not make the call.
            SwitchedOff: the method has no rule, for example because a newer version of a dependency has added it.
        """
        rule = self._rules.get(method)
        if rule is None:
            raise SwitchedOff(f"{method}: this server does not implement the method")
        if rule.access is Access.OPEN:
            return Admission(method, rule, None)
        caller = self._door.of_call(context)
        rule.admit(caller, self._gateway_tenant)
        return Admission(method, rule, caller, self._gateway_tenant)
