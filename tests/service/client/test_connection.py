"""The credentials and channel options of a connection."""

import pytest

from radixkv.service.client import Client


@pytest.mark.parametrize(
    ("address", "access", "message"),
    [
        ("10.0.0.1:1", {"token": "t"}, "token: requires tls_ca"),
        ("example.org:1", {"token": "t"}, "token: requires tls_ca"),
        ("127.0.0.1:1", {"token": "two words"}, "token: expected printable ASCII"),
        ("127.0.0.1:1", {"token": ""}, "token: expected printable ASCII"),
        ("127.0.0.1:1", {"token": "line\n"}, "token: expected printable ASCII"),
        ("127.0.0.1:1", {"certificate": "c.pem"}, "certificate, key: each requires the other"),
        ("127.0.0.1:1", {"certificate": "c.pem", "key": "k.pem"}, "tls_ca: required with a certificate"),
    ],
)
def test_credentials_that_would_leak_or_are_incomplete_are_refused_without_showing_the_token(address, access, message):
    with pytest.raises(ValueError, match=message) as caught:
        Client(address, **access)
    assert "two words" not in str(caught.value)


@pytest.mark.parametrize("content", [b"", b"junk", b"-----BEGIN PRIVATE KEY-----\n\xff"])
def test_a_file_without_certificates_is_refused_before_the_first_call(tmp_path, content):
    file = tmp_path / "ca.pem"
    file.write_bytes(content)
    with pytest.raises(ValueError, match="tls_ca: the file contains no readable certificates in PEM"):
        Client("127.0.0.1:1", tls_ca=file)
