"""The ports of a server: which callers each takes."""

from __future__ import annotations

from collections.abc import Iterable

from radixkv.config import ServerConfig
from radixkv.errors import NotPermitted
from radixkv.service.server.identity.callers import Anyone, Callers, KnownCallers
from radixkv.service.server.identity.credentials import read_credentials
from radixkv.service.server.identity.identity import OPERATORS, Identity, Role
from radixkv.service.server.identity.reloaded_files import ReloadedFiles
from radixkv.service.server.identity.tls import tls_of
from radixkv.service.server.unfinished_calls import Context

_ALL_ROLES = frozenset(Role)


class Door:
    """Callers of one port.

    Args:
        callers: of the server.
        roles: those that the port takes.
    """

    def __init__(self, callers: Callers, roles: Iterable[Role] = _ALL_ROLES) -> None:
        self._callers = callers
        self._roles = frozenset(roles)

    def of_call(self, context: Context) -> Identity:
        """Return who makes a gRPC call.

        Raises:
            InvalidCredential: nobody that is known.
            NotPermitted: the caller's role has another port.
        """
        caller = self._callers.of_call(context)
        if caller.role not in self._roles:
            right, wrong = ("admin_port", "port") if caller.role in OPERATORS else ("port", "admin_port")
            raise NotPermitted(f"credential of role {caller.role.value}: expected on server.{right}, got on {wrong}")
        return caller


class Doors:
    """The doors of one server, and its TLS.

    Attributes:
        tls: of all ports; None without a certificate in the configuration.
        callers: who may read metrics; None if everybody may, because there are no credentials.
        requests: the door of `server.port`.
        admins: the door of `server.admin_port`, for admins and readers; None without such a port.

    Raises:
        ConfigError: a file of the configuration can't be used.
    """

    def __init__(self, config: ServerConfig) -> None:
        self.tls = tls_of(config)
        self.callers = known_callers(config)
        has_admin_port = config.admin_port is not None
        self.admins = Door(self.callers or _anyone(Role.ADMIN), OPERATORS) if has_admin_port else None
        if not has_admin_port:
            self.requests = Door(self.callers or _anyone(Role.ADMIN))
        else:
            self.requests = Door(self.callers or _anyone(Role.ROUTER), _ALL_ROLES - OPERATORS)


def known_callers(config: ServerConfig) -> KnownCallers | None:
    """Return those who have a credential; None if the configuration has no file of credentials.

    Raises:
        ConfigError: the file can't be used.
    """
    path = config.tokens_file
    if path is None:
        return None
    credentials = ReloadedFiles("credentials", [path], lambda: read_credentials(path))
    return KnownCallers(credentials, has_certificates=config.client_ca is not None)


def _anyone(role: Role) -> Callers:
    return Anyone(Identity("anyone", role, is_anyone=True))
