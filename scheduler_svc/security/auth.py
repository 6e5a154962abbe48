"""Every call brings an API key, except health checks.

An interceptor of the whole server, so that a service that is added later is guarded too.
A call that is refused is refused before its request is read.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Iterable
from typing import TYPE_CHECKING, Any

import grpc
from grpc_health.v1 import health
from octavo.v1 import admin_pb2

from scheduler_svc.api import status
from scheduler_svc.errors import AdminOnly, ApiKeyMissing, ApiKeyUnknown, OctavoError
from scheduler_svc.logs import get_logger
from scheduler_svc.security.gate import set_caller
from scheduler_svc.security.keys import ApiKey
from scheduler_svc.security.store import KeyStore

_log = get_logger(__name__)

_HEADER = "authorization"
_SCHEME = "bearer"
_OPEN = health.SERVICE_NAME  # for probes, which have no key, and which tell nothing else
_ADMIN = admin_pb2.DESCRIPTOR.services_by_name["AdminService"].full_name

if TYPE_CHECKING:
    _Handler = grpc.RpcMethodHandler[Any, Any]  # generic in the stubs alone


class KeyInterceptor(grpc.aio.ServerInterceptor):  # type: ignore[type-arg]  # the same
    """Finds out who calls, or refuses the call."""

    def __init__(self, store: KeyStore) -> None:
        """Accept the keys of this store."""
        self._store = store

    async def intercept_service(
        self,
        continuation: Callable[[grpc.HandlerCallDetails], Awaitable[_Handler]],
        handler_call_details: grpc.HandlerCallDetails,
    ) -> _Handler:
        """Give the call's own handler, or one that refuses it."""
        handler = await continuation(handler_call_details)
        method = handler_call_details.method
        service = method.lstrip("/").partition("/")[0]
        if handler is None or service == _OPEN:
            return handler
        try:
            key = self._authenticate(handler_call_details.invocation_metadata)
            if service == _ADMIN and not key.admin:
                raise AdminOnly(f"{_ADMIN} needs an admin key, and {key.name!r} is none")
        except OctavoError as error:
            _log.info("call_refused", method=method, error=type(error).__name__)
            return _refusing(error)
        # The handler runs in this same context.
        set_caller(key)
        return handler

    def _authenticate(self, metadata: Iterable[Any] | None) -> ApiKey:
        values = [value for name, value in metadata or () if name == _HEADER]
        if not values:
            raise ApiKeyMissing(
                f"this service needs an API key: send the metadata {_HEADER}: Bearer KEY"
            )
        scheme, _, key = str(values[0]).partition(" ")
        if len(values) > 1 or scheme.lower() != _SCHEME or not key.strip():
            raise ApiKeyMissing(f"the metadata {_HEADER} must be, once: Bearer KEY")
        found = self._store.current().find(key.strip())
        if found is None:
            raise ApiKeyUnknown("this API key is not known here, or was revoked")
        return found


def _refusing(error: OctavoError) -> _Handler:
    async def refuse(_: Any, context: grpc.aio.ServicerContext[Any, Any]) -> None:
        await status.abort(context, status.from_error(error))

    # Streaming in form, whatever the method's own: it answers without waiting for a request.
    return grpc.stream_stream_rpc_method_handler(refuse)
