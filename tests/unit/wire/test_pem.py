"""Tests of octavo.pem: what is wrong with a file is said at once, and whose file it is."""

from __future__ import annotations

from pathlib import Path

import pytest
from cryptography.hazmat.primitives.asymmetric import ec
from octavo.pem import PemFiles, TlsError, server_files

from tests.support.certificates import Authority, key_pem

NAMES = ("--cert", "--key", "--ca")


@pytest.fixture
def authority() -> Authority:
    return Authority()


def files(cert: Path | None, key: Path | None, ca: Path | None = None) -> PemFiles:
    return PemFiles(cert, key, ca, NAMES)


def problem(read: PemFiles) -> str:
    with pytest.raises(TlsError) as caught:
        read.read()
    assert "\n" not in str(caught.value)
    assert str(caught.value).startswith(f"{caught.value.setting}: ")
    return str(caught.value)


def test_sound_files_are_read_as_they_are(authority: Authority, tmp_path: Path) -> None:
    """Certificate, key and CA come back byte for byte; the key is in no repr."""
    issued = authority.issue("a.example")
    pems = files(*issued.write(tmp_path), authority.write(tmp_path)).read()
    assert (pems.cert, pems.key, pems.ca) == (issued.cert, issued.key, authority.pem)
    assert "PRIVATE" not in repr(pems)


def test_a_bundle_may_hold_words_in_any_alphabet(authority: Authority, tmp_path: Path) -> None:
    """Distributions write the CAs' names between the certificates."""
    bundle = tmp_path / "bundle.crt"
    bundle.write_bytes("# Autorité n° 1\n".encode() + authority.pem + Authority("é").pem)
    assert files(None, None, bundle).read().ca == bundle.read_bytes()


def test_a_missing_file_is_named(authority: Authority, tmp_path: Path) -> None:
    """Each of the three, by its setting and its path."""
    cert, key = authority.issue().write(tmp_path)
    gone = tmp_path / "gone"
    for read, setting in (
        (files(gone, key), "--cert"),
        (files(cert, gone), "--key"),
        (files(cert, key, gone), "--ca"),
        (files(cert, tmp_path), "--key"),  # a folder
    ):
        message = problem(read)
        assert message.startswith(f"{setting}: cannot read {tmp_path}")


def test_a_key_of_another_certificate_is_refused(authority: Authority, tmp_path: Path) -> None:
    """Both are sound, and do not belong together."""
    cert, _ = authority.issue().write(tmp_path, "one")
    _, key = authority.issue().write(tmp_path, "two")
    assert problem(files(cert, key)) == f"--key: {key} is not the key of the certificate {cert}"


def test_files_that_are_no_pem_are_refused(authority: Authority, tmp_path: Path) -> None:
    """Garbage, nothing, each in the other's place, a cut file."""
    issued = authority.issue()
    cert, key = issued.write(tmp_path)
    ca = authority.write(tmp_path)
    odd = tmp_path / "odd"
    for content in (b"", b"garbage\xff", issued.key, issued.cert[: len(issued.cert) // 2]):
        odd.write_bytes(content)
        assert problem(files(odd, key)).startswith(f"--cert: {odd} holds no")
        assert problem(files(cert, key, odd)).startswith(f"--ca: {odd} holds no")
    for content in (b"", b"garbage\xff", issued.cert, issued.key[: len(issued.key) // 2]):
        odd.write_bytes(content)
        assert problem(files(cert, odd, ca)).startswith(f"--key: {odd} is no PEM private key")


def test_a_key_with_a_passphrase_is_refused(authority: Authority, tmp_path: Path) -> None:
    """And nobody is asked for it at a terminal that a service does not have."""
    cert, key = authority.issue().write(tmp_path)
    key.write_bytes(key_pem(ec.generate_private_key(ec.SECP256R1()), b"secret"))
    assert "without a passphrase" in problem(files(cert, key))


def test_a_file_without_end_is_refused(authority: Authority, tmp_path: Path) -> None:
    """Reading is bounded."""
    cert, _ = authority.issue().write(tmp_path)
    assert "at most" in problem(files(cert, Path("/dev/zero")))


def test_one_of_a_pair_needs_the_other(tmp_path: Path) -> None:
    """Certificate without key, key without certificate, client CA without either."""
    path = tmp_path / "x"
    with pytest.raises(TlsError, match=r"^--tls-cert: needs --tls-key"):
        server_files(path, None, None)
    with pytest.raises(TlsError, match=r"^--tls-key: needs --tls-cert"):
        server_files(None, path, None)
    with pytest.raises(TlsError, match=r"^--tls-client-ca: needs --tls-cert"):
        server_files(None, None, path)
    assert server_files(None, None, None) is None
