from __future__ import annotations

import json

from radixkv.service.fleet.replica_facts import FleetSecrets, ReplicaFacts

SECRETS = FleetSecrets(bytes(range(32)), "the fleet's token")
FACTS = ReplicaFacts("127.0.0.1:1", 7, "tiny", "fingerprint", 512, 4096, 16, "", 3600.0, SECRETS)


def test_facts_can_be_sent_as_json() -> None:
    assert ReplicaFacts.from_metadata(json.loads(json.dumps(FACTS.to_metadata()))) == FACTS


def test_secrets_are_not_shown() -> None:
    assert "the fleet's token" not in repr(FACTS)
    assert SECRETS.events_key.hex() not in repr(FACTS)
    assert repr(SECRETS.events_key) not in repr(FACTS)


def test_each_fleet_has_secrets_of_its_own() -> None:
    one, two = FleetSecrets.make(), FleetSecrets.make()
    assert (one.events_key, one.token) != (two.events_key, two.token)
    assert len(one.events_key) == 32
    assert one.kv_key != two.kv_key
    assert FleetSecrets(one.events_key, one.token).kv_key == one.kv_key
