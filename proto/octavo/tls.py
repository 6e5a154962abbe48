"""TLS of every gRPC port and channel of Octavo: PEM files in, gRPC's credentials out.

Files may be replaced at any time, as cert-manager does. A server shows the newest sound
certificate to each new connection, a client reads its files anew for each channel, and
open connections go on with what they began with.
"""

from __future__ import annotations

import grpc

from octavo.pem import PemFiles, Pems
from octavo.reloading import Reloading


class ServerTls:
    """Credentials of a port, which follow their files.

    With a CA every client must show a certificate signed by it; whether that is so is fixed
    for the life of the port, which CA it is is not.

    Attributes:
        credentials: for `add_secure_port`.
    """

    def __init__(self, files: PemFiles) -> None:
        """Read the files.

        Raises:  TlsError: if they cannot be used.
        """
        self._pems = Reloading(files.paths, files.read)
        self._served = self._pems.current()
        self.credentials = grpc.dynamic_ssl_server_credentials(
            _configuration(self._served),
            self._newer,  # type: ignore[arg-type]  # the stub does not know that None is "no change"
            require_client_authentication=files.ca is not None,
        )

    def _newer(self) -> grpc.ServerCertificateConfiguration | None:
        """Say what to show from now on; gRPC asks before every handshake, in its own thread."""
        pems = self._pems.current()
        if pems is self._served:
            return None
        self._served = pems
        return _configuration(pems)


class ClientTls:
    """Credentials of channels, which follow their files: take new ones for each channel.

    Attributes:
        options: of the channel.
    """

    def __init__(self, files: PemFiles, server_name: str = "") -> None:
        """Read the files.

        Args:
            files: a CA, or none for the system's; a certificate where the server wants one.
            server_name: that the server's certificate must carry; "": the target's host.
        Raises:  TlsError: if they cannot be used.
        """
        self._pems = Reloading(files.paths, files.read)
        override = (("grpc.ssl_target_name_override", server_name),) if server_name else ()
        self.options: tuple[tuple[str, str], ...] = override

    def credentials(self) -> grpc.ChannelCredentials:
        """Give credentials of what the files hold now."""
        pems = self._pems.current()
        return grpc.ssl_channel_credentials(pems.ca, pems.key, pems.cert)


def _configuration(pems: Pems) -> grpc.ServerCertificateConfiguration:
    assert pems.cert is not None and pems.key is not None
    return grpc.ssl_server_certificate_configuration([(pems.key, pems.cert)], pems.ca)
