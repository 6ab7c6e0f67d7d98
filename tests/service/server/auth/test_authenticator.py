import pytest

from radixkv.errors import InvalidCredential
from radixkv.service.server.auth.authenticator import CredentialAuthenticator
from radixkv.service.server.auth.credentials import parse_credentials
from radixkv.service.server.auth.reloaded_files import ReloadedFiles

from .certificates import FILE, TOKENS, entry_of, entry_of_certificate


class Call:
    """Metadata and certificate of a call."""

    def __init__(self, *metadata, **shown):
        self._metadata = metadata
        self._shown = {kind: [name.encode() for name in names] for kind, names in shown.items()}

    def invocation_metadata(self):
        return self._metadata

    def auth_context(self):
        return self._shown


def callers(text=FILE, *, has_certificates=False, now_s=0.0):
    files = ReloadedFiles("credentials", [], lambda: parse_credentials(text))
    return CredentialAuthenticator(files, has_certificates=has_certificates, unix_time_s=lambda: now_s)


def test_the_scheme_is_written_in_any_case():
    for scheme in ("Bearer", "bearer", "BEARER"):
        call = Call(("x-other", "y"), ("authorization", f"{scheme} {TOKENS['acme']}"))
        assert callers().identify_call(call).name == "acme credential"


def test_a_credential_is_accepted_until_it_expires():
    text = entry_of("acme", 'tenant = "a"') + "expires = 2001-09-09T01:46:40Z\n"
    header = f"Bearer {TOKENS['acme']}"
    assert callers(text, now_s=1e9 - 1).identify_header(header).name == "acme credential"
    with pytest.raises(InvalidCredential, match="it has expired"):
        callers(text, now_s=1e9).identify_header(header)


@pytest.mark.parametrize("kind", ["peer_uri", "peer_dns", "x509_common_name"])
def test_a_certificate_is_known_by_its_uri_its_dns_name_or_its_common_name(kind):
    text = entry_of_certificate("spiffe://example.org/acme", 'role = "admin"')
    known = callers(text, has_certificates=True)
    assert (
        known.identify_call(Call(**{kind: ["spiffe://example.org/acme"]})).name
        == "certificate of spiffe://example.org/acme"
    )


def test_other_names_of_a_certificate_identify_no_caller():
    known = callers(entry_of_certificate("a", 'role = "admin"'), has_certificates=True)
    with pytest.raises(InvalidCredential, match="certificate: its names match no credential"):
        known.identify_call(Call(peer_email=["a"], x509_subject=["a"]))


def test_a_certificate_is_ignored_where_grpc_verifies_none():
    with pytest.raises(InvalidCredential, match="expected one bearer token, got none"):
        callers(entry_of_certificate("a", 'role = "admin"')).identify_call(Call(x509_common_name=["a"]))


def test_a_wrong_token_is_refused_despite_a_valid_certificate():
    known = callers(entry_of_certificate("a", 'role = "admin"'), has_certificates=True)
    with pytest.raises(InvalidCredential):
        known.identify_call(Call(("authorization", "Bearer wrong"), x509_common_name=["a"]))
