"""The certificate of HTTPS: checked before anything listens, read anew when it is replaced."""

from __future__ import annotations

import asyncio
import ssl
from pathlib import Path

import structlog

from octavo_gateway.errors import StartupError

_log = structlog.get_logger()
_POLL_SECONDS = 10.0

_Version = tuple[tuple[int, int, int], ...]


class Certificate:
    """A certificate chain and its key, in two files that may be swapped at any time.

    Connections that are open keep the certificate that they began with.
    """

    def __init__(self, cert: Path, key: Path, *, poll_seconds: float = _POLL_SECONDS) -> None:
        """Load both once.

        Raises:
            StartupError: if a file cannot be read or the two do not belong together.
        """
        self._cert, self._key = cert, key
        self._poll_seconds = poll_seconds
        self._version = self._look()
        self._load(ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER))

    async def keep_current(self, context: ssl.SSLContext) -> None:
        """Load new files into a server's context whenever there are any; never returns.

        A pair that cannot be used leaves the old one in place, and is told once.
        """
        told = ""
        while True:
            await asyncio.sleep(self._poll_seconds)
            try:
                version = self._look()
                if version == self._version:
                    continue
                # Tried first: a context that took a certificate without its key is broken.
                self._load(ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER))
                self._load(context)
            except StartupError as error:
                if str(error) != told:
                    told = str(error)
                    _log.error("certificate_refused", error=told)
            else:
                self._version, told = version, ""
                _log.info("certificate_replaced", file=str(self._cert))

    def _look(self) -> _Version:
        """Tell one pair of files from another, also where symbolic links are swapped."""
        try:
            stats = [path.stat() for path in (self._cert, self._key)]
        except OSError as error:
            raise self._unreadable(error) from None
        return tuple((stat.st_ino, stat.st_mtime_ns, stat.st_size) for stat in stats)

    def _load(self, context: ssl.SSLContext) -> None:
        try:
            # A key that is locked by a password must not make the process ask for it.
            context.load_cert_chain(self._cert, self._key, password=lambda: "")
        except ssl.SSLError as error:
            raise StartupError(
                f"--tls-cert {self._cert} and --tls-key {self._key} are not a certificate and "
                f"its key: {error.reason or error}"
            ) from None
        except OSError as error:
            raise self._unreadable(error) from None

    def _unreadable(self, error: OSError) -> StartupError:
        return StartupError(
            f"--tls-cert {self._cert} or --tls-key {self._key} cannot be read: {error.strerror}"
        )
