import hashlib

import pytest

from radixkv.errors import ConfigError
from radixkv.service.server.auth.credentials import parse_credentials, read_credentials
from radixkv.service.server.auth.identity import Identity, Role

from .certificates import ALL_ENTRIES, TOKENS, entry_of, entry_of_certificate


def entry(**changes):
    """Return an entry as TOML, with changed values, which are TOML too; None leaves a key out."""
    keys = {"name": '"n"', "role": '"tenant"', "tenant": '"t"', "token_sha256": f'"{"0a" * 32}"', **changes}
    return "[[credentials]]\n" + "".join(f"{key} = {value}\n" for key, value in keys.items() if value is not None)


def test_a_token_identifies_the_caller():
    credentials = parse_credentials(ALL_ENTRIES)
    identities = {name: credentials.of_token(token).identity for name, token in TOKENS.items()}
    assert identities == {
        "acme": Identity("acme credential", Role.TENANT, frozenset({"acme"})),
        "globex": Identity("globex credential", Role.TENANT, frozenset({"globex"})),
        "some": Identity("some credential", Role.ROUTER, frozenset({"acme", "initech"})),
        "every": Identity("every credential", Role.ROUTER, None),
        "watcher": Identity("watcher credential", Role.READER, frozenset()),
        "boss": Identity("boss credential", Role.ADMIN, None),
    }


@pytest.mark.parametrize("token", ["", "x", TOKENS["acme"] + "x", hashlib.sha256(TOKENS["acme"].encode()).hexdigest()])
def test_other_texts_and_the_hash_of_a_token_identify_no_caller(token):
    assert parse_credentials(ALL_ENTRIES).of_token(token) is None


def test_a_certificate_with_the_names_of_two_credentials_identifies_no_caller():
    credentials = parse_credentials(
        entry_of_certificate("a", 'role = "admin"') + entry_of_certificate("b", 'tenant = "b"')
    )
    assert credentials.of_certificate(["x", "a"]).identity.role is Role.ADMIN
    assert credentials.of_certificate(["a", "a"]) is not None
    assert credentials.of_certificate(["a", "b"]) is None
    assert credentials.of_certificate(["x"]) is None


@pytest.mark.parametrize(
    ("text", "seconds"),
    [("2001-09-09T01:46:40Z", 1e9), ("2001-09-09T03:46:40+02:00", 1e9), ("2001-09-09 01:46:40", 1e9), (None, None)],
)
def test_an_expiry_without_a_time_zone_is_in_utc(text, seconds):
    credentials = parse_credentials(entry_of("acme", 'tenant = "a"') + (f"expires = {text}\n" if text else ""))
    assert credentials.of_token(TOKENS["acme"]).expires_at_s == seconds


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("x = 1\ny = z secret", "the file is not valid TOML in line 2$"),
        pytest.param("x = " + "[" * 10_000, "the file is not valid TOML", id="deep"),
        pytest.param("x = " + "9" * 10_000, "the file is not valid TOML", id="long"),
        ("other = 1", r"the file may have only entries \[\[credentials\]\]"),
        ("credentials = 1", r"the file may have only entries \[\[credentials\]\]"),
        ("credentials = [1]", "entry 1: it must be a table"),
        (entry(name=None), "entry 1: `name` is missing"),
        (entry(token='"secret"'), "got token$"),
        (entry(token_sha256=None), "requires either token_sha256 or certificate"),
        (entry(certificate='"c"'), "requires either token_sha256 or certificate"),
        (entry(token_sha256=None, certificate="1"), "`certificate` must be a name"),
        (entry(token_sha256='"secret"'), "`token_sha256` must have 64 hexadecimal digits"),
        (entry(token_sha256="1"), "`token_sha256` must have 64 hexadecimal digits"),
        (entry(role='"boss"'), "`role` must be tenant, router, reader or admin"),
        (entry(role="[]"), "`role` must be tenant, router, reader or admin"),
        (entry(tenant=None), "the role tenant requires `tenant`"),
        (entry(tenants='["a"]'), "the role tenant requires `tenant`"),
        (entry(role='"admin"'), "allows neither `tenant` nor `tenants`"),
        (entry(role='"reader"'), "allows neither `tenant` nor `tenants`"),
        (entry(role='"router"'), "requires `tenants`, a list of names"),
        (entry(role='"router"', tenant=None, tenants="[]"), "requires `tenants`, a list of names"),
        (entry(role='"router"', tenant=None, tenants='"a"'), "requires `tenants`, a list of names"),
        (entry(expires="2030-01-01"), "`expires` must be a date and time"),
        (entry() + entry(name='"m"'), "credentials 'm': another entry has the same name, token or certificate"),
        (entry() + entry(token_sha256=f'"{"0b" * 32}"'), "another entry has the same name, token or certificate"),
    ],
)
def test_invalid_entries_are_refused_without_their_values(text, message):
    with pytest.raises(ConfigError, match=message) as caught:
        parse_credentials(text)
    assert "secret" not in str(caught.value)


def test_a_file_that_can_not_be_read_is_named_by_its_key(tmp_path):
    with pytest.raises(
        ConfigError, match=r"server\.tokens_file: expected a readable file, got .*none\.toml: No such file"
    ):
        read_credentials(tmp_path / "none.toml")
    (tmp_path / "latin.toml").write_bytes(b"# \xff")
    with pytest.raises(ConfigError, match=r"server\.tokens_file: the file is not UTF-8"):
        read_credentials(tmp_path / "latin.toml")
