"""Authentication and authorization of the callers of one server, on each of its ports."""

from __future__ import annotations

from radixkv.config import ServerConfig
from radixkv.service.server.auth.authenticator import AnonymousAuthenticator, Authenticator, CredentialAuthenticator
from radixkv.service.server.auth.authorizer import Authorizer
from radixkv.service.server.auth.credentials import read_credentials
from radixkv.service.server.auth.identity import OPERATORS, Identity, Role
from radixkv.service.server.auth.reloaded_files import ReloadedFiles
from radixkv.service.server.auth.tls import Tls

_ALL_ROLES = frozenset(Role)


class ServerAuth:
    """TLS, credentials and roles of one server. Files are read once, and again when they change.

    Args:
        config: the configuration.
        authenticator: identifies callers. Default: by the credentials file that the configuration names, if any.

    Attributes:
        tls: TLS of all ports; None without a certificate in the configuration.

    Raises:
        ConfigError: a file that the configuration names cannot be used.
    """

    def __init__(self, config: ServerConfig, authenticator: Authenticator | None = None) -> None:
        self.tls = None if config.tls_certificate is None else Tls(config)
        self._authenticator = authenticator or credential_authenticator(config)
        self._has_admin_port = config.admin_port is not None

    def authorizer(self, gateway_tenant: str = "") -> Authorizer:
        """Return the authorizer of `server.port`. With an admin port, it does not accept admins and readers.

        Args:
            gateway_tenant: the tenant that owns the gateway's data.
        """
        if self._has_admin_port:
            return Authorizer(self._authenticator_or_anonymous(Role.ROUTER), _ALL_ROLES - OPERATORS, gateway_tenant)
        return Authorizer(self._authenticator_or_anonymous(Role.ADMIN), _ALL_ROLES, gateway_tenant)

    def admin_authorizer(self) -> Authorizer | None:
        """Return the authorizer of `server.admin_port`, which accepts admins and readers; None without such a port."""
        return Authorizer(self._authenticator_or_anonymous(Role.ADMIN), OPERATORS) if self._has_admin_port else None

    def _authenticator_or_anonymous(self, role: Role) -> Authenticator:
        """Return the authenticator; without a credentials file, one that gives every caller this role."""
        return self._authenticator or AnonymousAuthenticator(Identity("anyone", role, is_anyone=True))


def credential_authenticator(config: ServerConfig) -> CredentialAuthenticator | None:
    """Return the authenticator for the configured credentials; None if the configuration has no credentials file.

    Raises:
        ConfigError: the file cannot be used.
    """
    path = config.tokens_file
    if path is None:
        return None
    credentials = ReloadedFiles("credentials", [path], lambda: read_credentials(path))
    return CredentialAuthenticator(credentials, has_certificates=config.client_ca is not None)
