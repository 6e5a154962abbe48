"""Certificate authorities and certificates for tests, made on the spot."""

from __future__ import annotations

import datetime
import ipaddress
from dataclasses import dataclass
from pathlib import Path

from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import NameOID

_HOUR = datetime.timedelta(hours=1)
LOCAL = ("127.0.0.1", "localhost")


@dataclass(frozen=True)
class Issued:
    """A certificate and its key, as PEM."""

    cert: bytes
    key: bytes

    def write(self, folder: Path, name: str = "tls") -> tuple[Path, Path]:
        """Write NAME.crt and NAME.key, in place of older ones, as a careful editor would."""
        return _put(folder / f"{name}.crt", self.cert), _put(folder / f"{name}.key", self.key)


class Authority:
    """A CA with a key of its own."""

    def __init__(self, name: str = "test CA") -> None:
        self._key = ec.generate_private_key(ec.SECP256R1())
        self._name = _name(name)
        usage = x509.KeyUsage(
            digital_signature=True, key_cert_sign=True, crl_sign=True, content_commitment=False,
            key_encipherment=False, data_encipherment=False, key_agreement=False,
            encipher_only=False, decipher_only=False,
        )  # fmt: skip
        builder = _builder(self._name, self._name, self._key.public_key())
        builder = builder.add_extension(x509.BasicConstraints(ca=True, path_length=None), True)
        self._cert = builder.add_extension(usage, True).sign(self._key, hashes.SHA256())

    @property
    def pem(self) -> bytes:
        """The CA's own certificate."""
        return self._cert.public_bytes(serialization.Encoding.PEM)

    def write(self, folder: Path, name: str = "ca") -> Path:
        """Write NAME.crt."""
        return _put(folder / f"{name}.crt", self.pem)

    def issue(self, *names: str) -> Issued:
        """Sign a certificate for these host names and addresses."""
        key = ec.generate_private_key(ec.SECP256R1())
        names = names or LOCAL
        builder = _builder(_name(names[0]), self._name, key.public_key())
        builder = builder.add_extension(
            x509.SubjectAlternativeName([_general_name(name) for name in names]), False
        )
        builder = builder.add_extension(x509.BasicConstraints(ca=False, path_length=None), True)
        cert = builder.sign(self._key, hashes.SHA256())
        return Issued(cert.public_bytes(serialization.Encoding.PEM), key_pem(key))


def key_pem(key: ec.EllipticCurvePrivateKey, passphrase: bytes | None = None) -> bytes:
    """Give a private key as PEM."""
    protection: serialization.KeySerializationEncryption = serialization.NoEncryption()
    if passphrase is not None:
        protection = serialization.BestAvailableEncryption(passphrase)
    return key.private_bytes(
        serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, protection
    )


def _builder(
    subject: x509.Name, issuer: x509.Name, key: ec.EllipticCurvePublicKey
) -> x509.CertificateBuilder:
    now = datetime.datetime.now(datetime.UTC)
    builder = x509.CertificateBuilder(issuer, subject, key, x509.random_serial_number())
    return builder.not_valid_before(now - _HOUR).not_valid_after(now + 24 * _HOUR)


def _name(common_name: str) -> x509.Name:
    return x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, common_name)])


def _general_name(name: str) -> x509.GeneralName:
    try:
        return x509.IPAddress(ipaddress.ip_address(name))
    except ValueError:
        return x509.DNSName(name)


def _put(path: Path, content: bytes) -> Path:
    """Replace a file at once: whoever reads it sees the old content or the new."""
    fresh = path.with_name(f".{path.name}.new")
    fresh.write_bytes(content)
    return fresh.replace(path)
