"""Generates docs/deploy/radixkv.toml from the docstrings of the sections: every key with its default value.

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
# Keys that are commented out have no default value; the value shown is an example. Delete the keys that you do not
# change. `--set section.key=value` overrides this file. Relative paths start at the working directory of the server."""

# An example value for each key without a default value. A new key of this kind needs a line here.
EXAMPLES = {
    "engine.max_step_tokens": 2048,
    "model.threads": 4,
    "cache.capacity_tokens": 131_072,
    "cache.windowed_tokens": 32_768,
    "cache.state_bytes": 200_000_000,
    "server.metrics_port": 9400,
    "server.http_port": 8000,
    "server.max_message_bytes": 67_108_864,
    "server.tls_certificate": "/etc/radixkv/server.pem",
    "server.tls_key": "/etc/radixkv/server.key",
    "server.client_ca": "/etc/radixkv/callers.pem",
    "server.tokens_file": "/etc/radixkv/tokens.toml",
    "server.admin_port": 50052,
    "server.record_path": "/var/lib/radixkv/traffic",
    "server.statement_path": "/var/lib/radixkv/statements",
    "events.zmq_endpoint": "tcp://127.0.0.1:5557",
    "events.replay_endpoint": "tcp://127.0.0.1:5558",
    "events.curve_key_file": "/etc/radixkv/events.key_secret",
    "events.curve_clients": "/etc/radixkv/routers",
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
# A store from a plug-in, below the built-in tiers. The name is that of its entry point.
# [stores.shelf]
# place = "10.0.0.7:9000"
# max_bytes = 200000000000"""
KV_SOURCE = """\
# A server from which K/V may be fetched for requests that refer to it. Choose any name.
# [kv_sources.first]
# address = "10.0.0.8:50051"
# token_file = "/etc/radixkv/first.token"
# tls_ca = "/etc/radixkv/authorities.pem\""""
ADAPTER = """\
# A LoRA adapter that is loaded at startup, with its name: a directory as PEFT writes it.
# [adapters.law]
# path = "/srv/adapters/law\""""
TENANT = """\
# Quotas of the tenant of this name, in place of those of default_tenant; the keys are the same.
# [tenants.acme]
# floor_tokens = 16384
# weight = 2.0"""

_KEY = re.compile(r"^(\w+): (.*)$")


def example_file() -> str:
    """Return the text of the file."""
    user_named = ("stores", "kv_sources", "adapters", "tenants")  # users choose the names of these sections
    sections = [
        _format_section(section.name, getattr(Config(), section.name))
        for section in dataclasses.fields(Config)
        if section.name not in user_named
    ]
    return "\n\n".join([HEAD, *sections, STORE, KV_SOURCE, ADAPTER, TENANT]) + "\n"


def key_descriptions(section: type) -> dict[str, str]:
    """Return the description of each key from the docstring of a section."""
    descriptions: dict[str, str] = {}
    name = ""
    for line in textwrap.dedent((section.__doc__ or "").partition("Attributes:\n")[2]).splitlines():
        if match := _KEY.match(line):
            name = match[1]
            descriptions[name] = match[2]
        elif line.strip():
            descriptions[name] += " " + line.strip()
    return descriptions


def _format_section(name: str, defaults: object) -> str:
    section_class = type(defaults)
    description = (section_class.__doc__ or "").partition("\n")[0]
    if section_class is TenantConfig:
        description = "Quotas of every tenant without a section of its own."
    return "\n".join([f"# {description}", f"[{name}]", *_format_keys(name, defaults)])


def _format_keys(section: str, defaults: object) -> Iterator[str]:
    descriptions = key_descriptions(type(defaults))
    for key in dataclasses.fields(defaults):  # type: ignore[arg-type]
        description = descriptions[key.name]
        yield from textwrap.wrap(
            description[0].upper() + description[1:],
            120,
            initial_indent="# ",
            subsequent_indent="# ",
            break_on_hyphens=False,
        )
        value = getattr(defaults, key.name)
        if value is None:
            yield f"# {key.name} = {json.dumps(EXAMPLES[f'{section}.{key.name}'])}"
        else:
            yield f"{key.name} = {json.dumps(value)}"


if __name__ == "__main__":
    print(example_file(), end="")
