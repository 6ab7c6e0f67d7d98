from __future__ import annotations

from datetime import UTC, datetime

import pytest
import trustme

from radixkv.service.server.auth.certificate_expiry import expiry_of


@pytest.mark.parametrize("year", [2031, 2049, 2050, 2999])
def test_the_expiry_of_a_certificate_is_read(year: int) -> None:
    expires = datetime(year, 2, 3, 4, 5, 6, tzinfo=UTC)
    pem = trustme.CA().issue_cert("a.example", not_after=expires).cert_chain_pems[0].bytes()
    assert expiry_of(pem) == expires.timestamp()


@pytest.mark.parametrize("pem", [b"", b"-----BEGIN CERTIFICATE-----\nMAA=\n-----END CERTIFICATE-----\n"])
def test_bytes_that_are_no_certificate_are_refused(pem: bytes) -> None:
    with pytest.raises(ValueError):
        expiry_of(pem)
