"""Does for rendered Certificates what cert-manager does in a cluster: it makes their secrets."""

from __future__ import annotations

import datetime
from dataclasses import dataclass

from cryptography import x509
from cryptography.hazmat.primitives import hashes
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.hazmat.primitives.serialization import Encoding
from cryptography.x509.oid import ExtendedKeyUsageOID, NameOID

from tests.support.certificates import key_pem
from tests.support.chart import Manifest

Secret = dict[str, bytes]

_USES = {
    "server auth": ExtendedKeyUsageOID.SERVER_AUTH,
    "client auth": ExtendedKeyUsageOID.CLIENT_AUTH,
}
_SKEW = datetime.timedelta(minutes=5)


@dataclass(frozen=True)
class _Pair:
    certificate: x509.Certificate
    key: ec.EllipticCurvePrivateKey
    authority: x509.Certificate

    @property
    def secret(self) -> Secret:
        """As cert-manager writes it."""
        return {
            "tls.crt": self.certificate.public_bytes(Encoding.PEM),
            "tls.key": key_pem(self.key),
            "ca.crt": self.authority.public_bytes(Encoding.PEM),
        }


def issue(objects: list[Manifest]) -> dict[str, Secret]:
    """Make every Certificate's secret, by name; all issuers must be among the objects.

    Names, uses and durations are those that the Certificates ask for and no others, so that a
    handshake fails where they ask for too little.
    """
    issuers = {each["metadata"]["name"]: each["spec"] for each in _of(objects, "Issuer")}
    asked = {each["spec"]["secretName"]: each["spec"] for each in _of(objects, "Certificate")}
    made: dict[str, _Pair] = {}

    def make(secret: str) -> _Pair:
        if secret not in made:
            issuer = issuers[asked[secret]["issuerRef"]["name"]]
            signer = None if "selfSigned" in issuer else make(issuer["ca"]["secretName"])
            made[secret] = _sign(asked[secret], signer)
        return made[secret]

    return {name: make(name).secret for name in asked}


def _of(objects: list[Manifest], kind: str) -> list[Manifest]:
    return [each for each in objects if each["kind"] == kind]


def _sign(spec: Manifest, signer: _Pair | None) -> _Pair:
    asked = spec["privateKey"]
    assert (asked["algorithm"], asked["size"]) == ("ECDSA", 256)
    key = ec.generate_private_key(ec.SECP256R1())
    named = [spec["commonName"]] if "commonName" in spec else []
    subject = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, name) for name in named])
    now = datetime.datetime.now(datetime.UTC)
    lasts = datetime.timedelta(hours=int(spec["duration"].removesuffix("h")))
    builder = (
        x509.CertificateBuilder()
        .subject_name(subject)
        .issuer_name(signer.certificate.subject if signer else subject)
        .public_key(key.public_key())
        .serial_number(x509.random_serial_number())
        .not_valid_before(now - _SKEW)
        .not_valid_after(now + lasts)
    )
    is_ca = spec.get("isCA", False)
    builder = builder.add_extension(x509.BasicConstraints(is_ca, None), critical=True)
    builder = builder.add_extension(_key_usage(is_ca), critical=True)
    signs = signer.key.public_key() if signer else key.public_key()
    own_id = x509.SubjectKeyIdentifier.from_public_key(key.public_key())
    builder = builder.add_extension(own_id, critical=False)
    signers_id = x509.AuthorityKeyIdentifier.from_issuer_public_key(signs)
    builder = builder.add_extension(signers_id, critical=False)
    if uses := [_USES[use] for use in spec.get("usages", ()) if use in _USES]:
        builder = builder.add_extension(x509.ExtendedKeyUsage(uses), critical=False)
    if names := spec.get("dnsNames"):
        # Critical where there is no subject: RFC 5280, section 4.2.1.6.
        names = x509.SubjectAlternativeName([x509.DNSName(name) for name in names])
        builder = builder.add_extension(names, critical=not named)
    certificate = builder.sign(signer.key if signer else key, hashes.SHA256())
    return _Pair(certificate, key, signer.certificate if signer else certificate)


def _key_usage(is_ca: bool) -> x509.KeyUsage:
    return x509.KeyUsage(
        digital_signature=True, key_cert_sign=is_ca, crl_sign=is_ca, content_commitment=False,
        key_encipherment=False, data_encipherment=False, key_agreement=False,
        encipher_only=False, decipher_only=False,
    )  # fmt: skip
