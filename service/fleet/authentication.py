"""Authentication of the callers of a replica: those with a configured credential, and the fleet itself."""

from __future__ import annotations

from radixkv.config import ServerConfig
from radixkv.service.server.auth.authenticator import HEADER, CredentialAuthenticator, has_token
from radixkv.service.server.auth.identity import Identity, Role
from radixkv.service.server.auth.server_auth import ServerAuth, credential_authenticator
from radixkv.service.server.calls import Context

FLEET = Identity("fleet", Role.ADMIN, is_ingress=True)
"""The ingress and the other replicas. The ingress has authorized its callers already, including admins."""


class FleetAuthenticator:
    """Identifies the fleet by its token, and other callers by their credentials.

    Args:
        client_authenticator: identifies callers with a credential.
        token: the fleet's token.
    """

    def __init__(self, client_authenticator: CredentialAuthenticator, token: str) -> None:
        self._client_authenticator = client_authenticator
        self._token = token

    def identify_call(self, context: Context) -> Identity:
        """Return who makes a gRPC call; see `Authenticator`."""
        headers = [value for name, value in context.invocation_metadata() or () if name == HEADER]
        if len(headers) == 1 and has_token(str(headers[0]), self._token):
            return FLEET
        return self._client_authenticator.identify_call(context)

    def identify_header(self, authorization: str | None) -> Identity:
        """Return who sends a header; see `Authenticator`."""
        if authorization is not None and has_token(authorization, self._token):
            return FLEET
        return self._client_authenticator.identify_header(authorization)


def replica_auth(config: ServerConfig, token: str) -> ServerAuth:
    """Return the authentication of a replica. Without credentials it accepts every caller, including the fleet.

    Raises:
        ConfigError: a file of the configuration cannot be used.
    """
    client_authenticator = credential_authenticator(config)
    if client_authenticator is None:
        return ServerAuth(config, None)
    return ServerAuth(config, FleetAuthenticator(client_authenticator, token))
