"""PEM files of certificates, keys and CAs: named by settings, read together, checked.

Both services and the client use it, none of which may import another. Every error names
the setting, so that a person knows which flag, variable or parameter to mend.
"""

from __future__ import annotations

import ssl
from dataclasses import dataclass, field
from pathlib import Path

_MAX_PEM_BYTES = 4 * 1024 * 1024  # many times the bundle of all public CAs
_MAX_READS = 5  # of files that are being swapped at this moment
_ENCRYPTED = b"ENCRYPTED"  # in the head of PEM keys with a passphrase, old form and new


class TlsError(ValueError):
    """A PEM file cannot be used.

    Attributes:
        setting: what names the file, such as "--tls-cert".
    """

    def __init__(self, setting: str, problem: str) -> None:
        """Say in one line what is wrong with what a setting names."""
        super().__init__(f"{setting}: {problem}")
        self.setting = setting


@dataclass(frozen=True, slots=True)
class Pems:
    """What the files held at one moment, checked; None for a file that is not named."""

    cert: bytes | None
    key: bytes | None = field(repr=False)
    ca: bytes | None


@dataclass(frozen=True, slots=True)
class PemFiles:
    """The files of one end of a connection.

    Attributes:
        cert: its own certificate, then those between it and the CA.
        key: the private key of that certificate, without a passphrase.
        ca: certificates, one of which must have signed the other end's.
        names: the settings of the three, as people write them.
    """

    cert: Path | None
    key: Path | None
    ca: Path | None
    names: tuple[str, str, str]

    def __post_init__(self) -> None:
        """Raise TlsError if there is a certificate without a key, or a key without one."""
        cert, key, _ = self.names
        if self.cert is None and self.key is not None:
            raise TlsError(key, f"needs {cert} too: a key is of no use without its certificate")
        if self.key is None and self.cert is not None:
            raise TlsError(cert, f"needs {key} too: a certificate is of no use without its key")

    @property
    def paths(self) -> tuple[Path, ...]:
        """The files that are named."""
        return tuple(path for path in (self.cert, self.key, self.ca) if path is not None)

    def read(self) -> Pems:
        """Read all files as they stand together at one moment, and check them.

        Raises:  TlsError: naming the file that is missing, not PEM, or not the others' match.
        """
        pems = self._contents()
        for _ in range(_MAX_READS):
            fault = self._fault(pems)
            again = self._contents()
            if again == pems:  # so the check, which opens the files itself, saw the same
                break
            pems = again
        else:
            raise TlsError(self.names[0], "the files change faster than they can be read")
        if fault is not None:
            raise fault
        return pems

    def _contents(self) -> Pems:
        cert, key, ca = self.names
        return Pems(_read(cert, self.cert), _read(key, self.key), _read(ca, self.ca))

    def _fault(self, pems: Pems) -> TlsError | None:
        name = self.names[2]
        if pems.ca is not None and not _has_certificates(pems.ca):
            return TlsError(name, f"{self.ca} holds no PEM certificates")
        if pems.cert is None or pems.key is None or self.cert is None:
            return None
        return self._pair_fault(self.cert, pems.cert, pems.key)

    def _pair_fault(self, path: Path, cert: bytes, key: bytes) -> TlsError | None:
        cert_name, key_name, _ = self.names
        if not _has_certificates(cert):
            return TlsError(cert_name, f"{path} holds no PEM certificate")
        if _ENCRYPTED in key:
            return TlsError(key_name, f"{self.key} must hold a private key without a passphrase")
        try:
            ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER).load_cert_chain(path, self.key)
        except ssl.SSLError as error:
            problem = f"{self.key} is no PEM private key for {path} ({error.reason})"
            if error.reason == "KEY_VALUES_MISMATCH":
                problem = f"{self.key} is not the key of the certificate {path}"
            return TlsError(key_name, problem)
        except OSError as error:  # gone since it was read
            return TlsError(key_name, f"cannot read {self.key}: {error.strerror}")
        return None


def server_files(cert: Path | None, key: Path | None, client_ca: Path | None) -> PemFiles | None:
    """Give the files of a service's own port, by the flags that both services have.

    Returns: None if no flag is given: no TLS.
    Raises:  TlsError: if one is given without another that it needs.
    """
    names = ("--tls-cert", "--tls-key", "--tls-client-ca")
    if client_ca is not None and cert is None:
        raise TlsError(names[2], f"needs {names[0]} too: clients are only asked for theirs by TLS")
    return None if cert is None and key is None else PemFiles(cert, key, client_ca, names)


def _read(setting: str, path: Path | None) -> bytes | None:
    if path is None:
        return None
    try:
        with path.open("rb") as file:
            content = file.read(_MAX_PEM_BYTES + 1)
    except OSError as error:
        raise TlsError(setting, f"cannot read {path}: {error.strerror}") from None
    if len(content) > _MAX_PEM_BYTES:
        raise TlsError(setting, f"{path} must be a PEM file of at most {_MAX_PEM_BYTES} bytes")
    return content


def _has_certificates(pem: bytes) -> bool:
    # Bundles carry names in any alphabet between their certificates.
    text = pem.decode("ascii", "ignore")
    try:
        ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT).load_verify_locations(cadata=text)
    except (ssl.SSLError, ValueError):
        return False
    return True
