"""Certificates and credentials of a test, written into a folder."""

from __future__ import annotations

import hashlib
import itertools
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import trustme

# The token of each credential, by the name that the tests give it.
TOKENS = {name: f"rkv_{name}_0123456789" for name in ("acme", "globex", "some", "every", "watcher", "boss")}


def entry_of(name: str, rights: str) -> str:
    """Return the entry of a token in a file of credentials; `rights` are its lines with role and tenants."""
    digest = hashlib.sha256(TOKENS[name].encode()).hexdigest()
    return f'[[credentials]]\nname = "{name} credential"\n{rights}\ntoken_sha256 = "{digest}"\n'


def entry_of_certificate(name: str, rights: str) -> str:
    """Return the entry of a certificate in a file of credentials; `rights` are its lines with role and tenants."""
    return f'[[credentials]]\nname = "certificate of {name}"\n{rights}\ncertificate = "{name}"\n'


ALL_ENTRIES = "\n".join(
    [
        entry_of("acme", 'role = "tenant"\ntenant = "acme"'),
        entry_of("globex", 'role = "tenant"\ntenant = "globex"'),
        entry_of("some", 'role = "router"\ntenants = ["acme", "initech"]'),
        entry_of("every", 'role = "router"\ntenants = "all"'),
        entry_of("watcher", 'role = "reader"'),
        entry_of("boss", 'role = "admin"'),
    ]
)
"""A file of credentials: two tenants, a router for two tenants, a router for all, a reader, an admin."""


class CredentialFiles:
    """Files in a folder: authorities, the server's certificate, its key, tokens.

    Attributes:
        ca: signs the server's certificate.
        client_ca: signs callers' certificates.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._numbers = itertools.count()
        self.ca, self.client_ca = trustme.CA(), trustme.CA()
        self.ca.cert_pem.write_to_path(folder / "ca.pem")
        self.client_ca.cert_pem.write_to_path(folder / "client_ca.pem")
        self.write_certificate(self.ca)
        self.write_tokens(ALL_ENTRIES)

    def write_certificate(self, ca: trustme.CA) -> None:
        """Write a new certificate of the server, and its key."""
        certificate = ca.issue_cert("127.0.0.1", "localhost")
        certificate.private_key_pem.write_to_path(self.folder / "server.key")
        certificate.cert_chain_pems[0].write_to_path(self.folder / "server.pem")

    def write_tokens(self, text: str) -> None:
        """Replace the file of credentials."""
        (self.folder / "new.toml").write_text(text)
        (self.folder / "new.toml").replace(self.folder / "tokens.toml")

    def issue_certificate(
        self,
        name: str,
        ca: trustme.CA | None = None,
        *,
        is_expired: bool = False,
        alternative: str | None = None,
        common_name: str | None = None,
    ) -> dict[str, Any]:
        """Write a new certificate of a caller, and return the arguments of a client that presents it."""
        certificate = (ca or self.client_ca).issue_cert(
            *([] if alternative is None else [alternative]),
            common_name=common_name or name,
            not_after=datetime(2001, 1, 1, tzinfo=UTC) if is_expired else None,
        )
        folder = self.folder / f"{name}-{next(self._numbers)}"
        folder.mkdir()
        certificate.private_key_pem.write_to_path(folder / "key.pem")
        certificate.cert_chain_pems[0].write_to_path(folder / "chain.pem")
        return {"certificate": folder / "chain.pem", "key": folder / "key.pem", "tls_ca": self.ca_file}

    @property
    def ca_file(self) -> Path:
        return self.folder / "ca.pem"

    @property
    def tls(self) -> dict[str, Any]:
        """Configuration of a server with TLS and tokens."""
        names = {"tls_certificate": "server.pem", "tls_key": "server.key", "tokens_file": "tokens.toml"}
        return {key: str(self.folder / name) for key, name in names.items()}

    @property
    def mutual_tls(self) -> dict[str, Any]:
        """Configuration of a server that requires certificates of callers too."""
        return {**self.tls, "client_ca": str(self.folder / "client_ca.pem")}

    def client(self, name: str | None) -> dict[str, Any]:
        """Arguments of a client with a token; None for one without."""
        return {"tls_ca": self.ca_file, "token": None if name is None else TOKENS[name]}
