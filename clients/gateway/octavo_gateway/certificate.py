"""The certificate of HTTPS: checked before anything listens, read anew when it is replaced."""

from __future__ import annotations

import asyncio
import ssl
from pathlib import Path

from octavo.pem import PemFiles, TlsError
from octavo.reloading import Reloading

from octavo_gateway.errors import StartupError

_POLL_SECONDS = 10.0


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
        files = PemFiles(cert, key, None, ("--tls-cert", "--tls-key", ""))
        try:
            self._pems = Reloading(files.paths, files.read)
        except TlsError as error:
            raise StartupError(str(error)) from None
        self._shown = self._pems.current()

    async def keep_current(self, context: ssl.SSLContext) -> None:
        """Load new files into a server's context whenever there are any; never returns.

        A pair that cannot be used leaves the old one in place, and is told once.
        """
        while True:
            await asyncio.sleep(self._poll_seconds)
            pems = self._pems.current()
            if pems is self._shown:
                continue
            try:
                context.load_cert_chain(self._cert, self._key)
            except OSError:  # swapped once more since they were checked: the next look will tell
                continue
            self._shown = pems
