"""Writes docs/deploy/radixkv.toml: every key of the configuration with its default, from the sections' docstrings.

`python -m tests.config.example_file > docs/deploy/radixkv.toml`
"""

from __future__ import annotations

import dataclasses
import json
import re
import textwrap
from collections.abc import Iterator

from radixkv.config import Config, TenantConfig

HEAD = """\
# Every key of radixkv's configuration with its default: radixkv serve --config radixkv.toml
#
# A key that is commented out is absent by default; its value is an example. Delete what you do not change.
# `--set section.key=value` wins over this file. Paths are relative to the folder in which the service starts."""

# A value for each key that is absent by default; a new one needs its line here.
EXAMPLES = {
    "engine.max_step_tokens": 2048,
    "model.threads": 4,
    "cache.capacity_tokens": 131_072,
    "cache.windowed_tokens": 32_768,
    "cache.state_bytes": 200_000_000,
    "server.metrics_port": 9400,
    "server.max_message_bytes": 67_108_864,
    "server.tls_certificate": "/etc/radixkv/server.pem",
    "server.tls_key": "/etc/radixkv/server.key",
    "server.client_ca": "/etc/radixkv/callers.pem",
    "server.tokens_file": "/etc/radixkv/tokens.toml",
    "server.admin_port": 50052,
    "events.zmq_endpoint": "tcp://127.0.0.1:5557",
    "events.replay_endpoint": "tcp://127.0.0.1:5558",
    "telemetry.otlp_endpoint": "http://localhost:4317",
    "tiers.host_bytes": 16_000_000_000,
    "tiers.disk_path": "/var/lib/radixkv",
    "tiers.disk_bytes": 200_000_000_000,
    "tiers.redis_url": "redis://10.0.0.5:6379/0",
    "tiers.mooncake_master": "10.0.0.6:50051",
    "tiers.secret_file": "/etc/radixkv/store.secret",
    "tiers.encryption_key_file": "/etc/radixkv/store.key",
    "fleet.prefill_replicas": 2,
    "fleet.decode_replicas": 2,
    "fleet.tls_ca": "/etc/radixkv/authorities.pem",
    "default_tenant.ceiling_tokens": 65_536,
    "default_tenant.max_retained_tokens": 16_384,
    "default_tenant.max_held_tokens": 32_768,
    "default_tenant.max_calls_per_s": 100.0,
    "default_tenant.max_computed_tokens_per_s": 20_000.0,
}
STORE = """\
# A store of another package below the device, by the name of its entry point.
# [stores.shelf]
# place = "10.0.0.7:9000"
# max_bytes = 200000000000"""
KV_SOURCE = """\
# A server whose K/V is fetched for callers that name it, by a name of your own.
# [kv_sources.first]
# address = "10.0.0.8:50051"
# token_file = "/etc/radixkv/first.token"
# tls_ca = "/etc/radixkv/authorities.pem\""""
ADAPTER = """\
# An adapter that is loaded at start, by name: a directory as peft writes it.
# [adapters.law]
# path = "/srv/adapters/law\""""
TENANT = """\
# Bounds of one tenant by name, in place of those of default_tenant; the keys are the same.
# [tenants.acme]
# floor_tokens = 16384
# weight = 2.0"""

_KEY = re.compile(r"^(\w+): (.*)$")


def example_file() -> str:
    """Return the text of the file."""
    named = ("stores", "kv_sources", "adapters", "tenants")
    sections = [each for each in dataclasses.fields(Config) if each.name not in named]
    parts = [_section(section.name, getattr(Config(), section.name)) for section in sections]
    return "\n\n".join([HEAD, *parts, STORE, KV_SOURCE, ADAPTER, TENANT]) + "\n"


def meanings(section: type) -> dict[str, str]:
    """Return what the docstring of a section says of each key."""
    told: dict[str, str] = {}
    name = ""
    for line in textwrap.dedent((section.__doc__ or "").partition("Attributes:\n")[2]).splitlines():
        if found := _KEY.match(line):
            name, told[found[1]] = found[1], found[2]
        elif line.strip():
            told[name] += " " + line.strip()
    return told


def _section(name: str, defaults: object) -> str:
    kind = type(defaults)
    first = (kind.__doc__ or "").partition("\n")[0]
    about = "Bounds of each tenant that has no section of its own." if kind is TenantConfig else first
    return "\n".join([f"# {about}", f"[{name}]", *_keys(name, defaults)])


def _keys(section: str, defaults: object) -> Iterator[str]:
    told = meanings(type(defaults))
    for key in dataclasses.fields(defaults):  # type: ignore[arg-type]
        text = told[key.name]
        yield from textwrap.wrap(
            text[0].upper() + text[1:], 120, initial_indent="# ", subsequent_indent="# ", break_on_hyphens=False
        )
        value = getattr(defaults, key.name)
        if value is None:
            yield f"# {key.name} = {json.dumps(EXAMPLES[f'{section}.{key.name}'])}"
        else:
            yield f"{key.name} = {json.dumps(value)}"


if __name__ == "__main__":
    print(example_file(), end="")
