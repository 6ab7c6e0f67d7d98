from types import SimpleNamespace

from radixkv.service.server.identity.gate import Admission
from radixkv.service.server.identity.identity import Identity, Role
from radixkv.service.server.identity.rpc_rules import Access, Rule
from radixkv.service.server.intake.account import Account, Kind

CONTEXT = SimpleNamespace(peer=lambda: "ipv4:10.0.0.1:40000")


def account_of(caller):
    return Account.of_caller(Admission("/a/b", Rule(Access.KNOWN), caller), CONTEXT)


def test_callers_who_are_not_known_are_told_apart_by_connection():
    anyone = Identity("anyone", Role.ADMIN, is_anyone=True)
    assert account_of(None) == account_of(anyone) == Account(Kind.CONNECTION, "ipv4:10.0.0.1:40000")


def test_a_credential_is_one_caller_on_any_number_of_connections():
    assert account_of(Identity("anyone", Role.ROUTER)) == Account(Kind.CREDENTIAL, "anyone")


def test_names_of_different_kinds_are_different_accounts():
    assert len({Account(kind, "a") for kind in Kind}) == len(Kind)
    assert Account.of_tenant("a") == Account(Kind.TENANT, "a")
