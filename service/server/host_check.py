"""Protects against DNS rebinding: refuses HTTP requests whose header `Host` does not name this server.

If the name `evil.example` first resolves to an attacker's server and later to 127.0.0.1, a browser treats the server on
this machine as the origin of the attacker's page, so that the page may read its responses. The requests of the page
still have the header `Host: evil.example`.
"""

from __future__ import annotations

import ipaddress
import re

from radixkv.config import ServerConfig
from radixkv.service.client.address import is_loopback

_HOST = re.compile(r"(?:\[(?P<ipv6>[0-9A-Fa-f:.]+)\]|(?P<name>[\w.-]+?))\.?(?::\d{0,5})?", re.ASCII)


class HostCheck:
    """Decides which values of the header `Host` are accepted.

    ```
                            localhost, loopback    `server.metrics_hosts`   other IP addresses   other names
    loopback                yes                    yes                      no                   no
    network                 yes                    yes                      yes                  yes
    network, hosts are set  yes                    yes                      yes                  no
    ```

    On a network, IP addresses are accepted because orchestrators use them for probes. DNS rebinding requires a name.

    Args:
        config: the address that the port listens on, and the names that are allowed.
    """

    def __init__(self, config: ServerConfig) -> None:
        self._hosts = frozenset(host.strip().lower() for host in config.metrics_hosts.split(",") if host.strip())
        self._is_local = is_loopback(config.host)

    def allows(self, header: str | None) -> bool:
        """Return whether a request with this header `Host` may be answered. Browsers always send the header."""
        if header is None:
            return True
        match = _HOST.fullmatch(header.strip())
        if match is None:
            return False
        host = (match["ipv6"] or match["name"]).lower()
        if is_loopback(host) or host in self._hosts:
            return True
        return not self._is_local and (not self._hosts or _is_address(host))


def _is_address(host: str) -> bool:
    try:
        ipaddress.ip_address(host)
    except ValueError:
        return False
    return True
