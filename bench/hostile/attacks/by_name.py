"""The attacks by name."""

from __future__ import annotations

from bench.hostile.attacks import connections, deep_paths, held_leases, http, messages, operators
from bench.hostile.attacks.attack import LARGE_POOL, Attack

_SHORT_TTL = "engine.held_lease_ttl_s=5"
_LARGE_VOCABULARY = 151_936

ATTACKS: dict[str, Attack] = {
    "large_packed": Attack(messages.large_packed),
    "large_unpacked": Attack(messages.large_unpacked),
    "gzip_bombs": Attack(messages.gzip_bombs),
    "stalled": Attack(connections.stalled, num_connections=10),
    "slow_headers": Attack(connections.slow_headers, num_connections=200),
    "idle": Attack(connections.idle, num_connections=connections.IDLE_CONNECTIONS),
    "unread": Attack(
        connections.unread, settings=("server.send_timeout_s=2",), vocab_size=_LARGE_VOCABULARY, num_connections=10
    ),
    "unread_streams": Attack(connections.unread_streams, settings=("server.send_timeout_s=2",), num_connections=50),
    "deep_retain": Attack(deep_paths.hit_after_retain, deep_paths.cut_by_retain, LARGE_POOL, num_connections=33),
    "deep_branches": Attack(deep_paths.hit_after_branches, deep_paths.cut_by_branches, LARGE_POOL, num_connections=49),
    "held_prompt": Attack(held_leases.held_prompt, settings=(*LARGE_POOL, _SHORT_TTL)),
    "held_pool": Attack(held_leases.held_pool, settings=(_SHORT_TTL,)),
    "tenants": Attack(operators.ask_statistics, operators.fill_tenants, LARGE_POOL),
    "probe": Attack(operators.probe, operators.fill_prompt, LARGE_POOL, num_connections=48),
    "retain": Attack(operators.retain, operators.fill_prompt, LARGE_POOL, num_connections=48),
    "purge": Attack(operators.purge, operators.fill_tenants, LARGE_POOL, num_connections=48),
    "priorities": Attack(operators.watch_expiry, operators.fill_priorities, LARGE_POOL),
    "cancels": Attack(connections.cancels, num_connections=48),
    "rapid_reset": Attack(connections.rapid_reset),
    "reset_burst": Attack(connections.reset_burst),
    "broken_paths": Attack(connections.broken_paths, num_connections=100),
    "http_idle": Attack(http.idle, num_connections=10_000, is_http=True),
    "http_slow_headers": Attack(http.slow_headers, num_connections=300, is_http=True),
    "http_slow_bodies": Attack(http.slow_bodies, num_connections=200, is_http=True),
    "http_unread": Attack(http.unread, settings=("server.send_timeout_s=2",), num_connections=50, is_http=True),
    "http_malformed": Attack(http.malformed, is_http=True),
    "http_huge_headers": Attack(http.huge_headers, is_http=True),
    "http_large_bodies": Attack(http.large_bodies, is_http=True),
    "http_refused": Attack(http.refused, num_connections=20, is_http=True),
}
