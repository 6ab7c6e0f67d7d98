import ssl
from datetime import UTC, datetime

import pytest
import trustme

from radixkv.errors import InvalidCredential
from radixkv.service.server.auth.authenticator import CredentialAuthenticator, expiry_of
from radixkv.service.server.auth.credentials import parse_credentials
from radixkv.service.server.auth.reloaded_files import ReloadedFiles

from .certificates import ALL_ENTRIES, TOKENS, entry_of, entry_of_certificate


class Call:
    """What gRPC's context contains about a call: metadata, and the names in the caller's certificate by their kind."""

    def __init__(self, *metadata, **certificate_names):
        self._metadata = metadata
        self._auth_context = {kind: [name.encode() for name in names] for kind, names in certificate_names.items()}

    def invocation_metadata(self):
        return self._metadata

    def auth_context(self):
        return self._auth_context


def make_authenticator(text=ALL_ENTRIES, *, has_certificates=False, now_s=0.0):
    files = ReloadedFiles("credentials", [], lambda: parse_credentials(text))
    return CredentialAuthenticator(files, has_certificates=has_certificates, unix_time_s=lambda: now_s)


def test_the_scheme_is_written_in_any_case():
    for scheme in ("Bearer", "bearer", "BEARER"):
        call = Call(("x-other", "y"), ("authorization", f"{scheme} {TOKENS['acme']}"))
        assert make_authenticator().identify_call(call).name == "acme credential"


def test_a_credential_is_accepted_until_it_expires():
    text = entry_of("acme", 'tenant = "a"') + "expires = 2001-09-09T01:46:40Z\n"
    header = f"Bearer {TOKENS['acme']}"
    assert make_authenticator(text, now_s=1e9 - 1).identify_header(header).name == "acme credential"
    with pytest.raises(InvalidCredential, match="it has expired"):
        make_authenticator(text, now_s=1e9).identify_header(header)


@pytest.mark.parametrize("kind", ["peer_uri", "peer_dns", "x509_common_name"])
def test_a_certificate_is_identified_by_its_uri_its_dns_name_or_its_common_name(kind):
    text = entry_of_certificate("spiffe://example.org/acme", 'role = "admin"')
    caller = make_authenticator(text, has_certificates=True).identify_call(
        Call(**{kind: ["spiffe://example.org/acme"]})
    )
    assert caller.name == "certificate of spiffe://example.org/acme"


def test_other_names_of_a_certificate_identify_no_caller():
    authenticator = make_authenticator(entry_of_certificate("a", 'role = "admin"'), has_certificates=True)
    with pytest.raises(InvalidCredential, match="certificate: its names match no credential"):
        authenticator.identify_call(Call(peer_email=["a"], x509_subject=["a"]))


def test_a_certificate_is_ignored_where_grpc_verifies_none():
    with pytest.raises(InvalidCredential, match="expected one bearer token, got none"):
        make_authenticator(entry_of_certificate("a", 'role = "admin"')).identify_call(Call(x509_common_name=["a"]))


def test_a_wrong_token_is_refused_despite_a_valid_certificate():
    authenticator = make_authenticator(entry_of_certificate("a", 'role = "admin"'), has_certificates=True)
    with pytest.raises(InvalidCredential):
        authenticator.identify_call(Call(("authorization", "Bearer wrong"), x509_common_name=["a"]))


def test_a_certificate_whose_expiry_cannot_be_read_is_refused():
    authenticator = make_authenticator(entry_of_certificate("a", 'role = "admin"'), has_certificates=True)
    with pytest.raises(InvalidCredential, match="certificate: its time of expiry cannot be read"):
        authenticator.identify_call(Call(x509_common_name=["a"], x509_pem_cert=["not a certificate"]))


@pytest.mark.parametrize("year", [2031, 2049, 2050, 2999])
def test_the_expiry_of_a_certificate_is_read(year: int) -> None:
    expires = datetime(year, 2, 3, 4, 5, 6, tzinfo=UTC)
    pem = trustme.CA().issue_cert("a.example", not_after=expires).cert_chain_pems[0].bytes()
    assert expiry_of(pem) == expires.timestamp()


@pytest.mark.parametrize("pem", [b"", b"-----BEGIN CERTIFICATE-----\nMAA=\n-----END CERTIFICATE-----\n"])
def test_bytes_that_are_no_certificate_are_refused(pem: bytes) -> None:
    with pytest.raises(ValueError):
        expiry_of(pem)


def test_a_certificate_of_version_2_is_not_parsed() -> None:
    pem = trustme.CA().issue_cert("a.example").cert_chain_pems[0].bytes()
    version_3, version_2 = bytes.fromhex("a003020102"), bytes.fromhex("a003020101")
    der = ssl.PEM_cert_to_DER_cert(pem.decode())
    assert version_3 in der
    with pytest.raises(ValueError, match="version"):
        expiry_of(ssl.DER_cert_to_PEM_cert(der.replace(version_3, version_2, 1)).encode())
