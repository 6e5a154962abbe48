"""The console's page: its files, read once, and the headers that confine it."""

from __future__ import annotations

from dataclasses import dataclass
from importlib.resources import files

from octavo_gateway.errors import ApiError
from octavo_gateway.exchange import Exchange

_FOLDER = "console"
_INDEX = "index.html"
_MEDIA_TYPES = {
    ".html": "text/html; charset=utf-8",
    ".css": "text/css; charset=utf-8",
    ".js": "text/javascript; charset=utf-8",
    ".svg": "image/svg+xml",
}
# Nothing from elsewhere, nothing inline, nobody's frame: what the page shows, ids that callers
# chose among it, can be no script, and the key that was typed into it goes to this origin only.
_HEADERS = {
    "content-security-policy": (
        "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self'; "
        "connect-src 'self'; base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
    ),
    "x-content-type-options": "nosniff",
    "referrer-policy": "no-referrer",
    "cross-origin-opener-policy": "same-origin",
    "cross-origin-resource-policy": "same-origin",
    "cache-control": "no-cache",
}


@dataclass(frozen=True, slots=True)
class _File:
    body: bytes
    media_type: str


class Pages:
    """The files of the console, by name."""

    def __init__(self) -> None:
        self._files: dict[str, _File] = {}
        for each in files("octavo_gateway").joinpath(_FOLDER).iterdir():
            media_type = _MEDIA_TYPES.get(f".{each.name.rpartition('.')[2]}")
            if media_type is not None:
                self._files[each.name] = _File(each.read_bytes(), media_type)

    async def answer(self, exchange: Exchange, name: str = "") -> None:
        """Send one file; "" is the page itself.

        Raises:
            ApiError: 404, if there is none of that name.
        """
        file = self._files.get(name or _INDEX)
        if file is None:
            raise ApiError(404, f"the console has no file {name[:80]!r}", code="unknown_url")
        await exchange.answer_bytes(file.body, file.media_type, headers=_HEADERS)
