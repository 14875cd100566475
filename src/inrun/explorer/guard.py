"""Who may ask: the one place that decides. An ASGI layer around the whole application.

- ``Host`` must name this machine, so that a page elsewhere cannot reach us under a name of its own (DNS rebinding).
- ``Origin``, where a browser sends it, must be ours; whatever changes something must have one.
- ``Sec-Fetch-Site``, where a browser sends it, must be ours, too: other ports of this machine share our cookies, so that a page of
  theirs could ask in our name. Only a link to the page itself may come from elsewhere.
- The token, once in the URL, then in a cookie that scripts cannot read and other sites cannot send.
- Every answer forbids scripts, styles and requests that are not ours, framing, sniffing, referrers and caching.
"""

from __future__ import annotations

import hashlib
import hmac
import ipaddress
from collections.abc import Iterable
from urllib.parse import parse_qsl, urlsplit

from starlette.responses import PlainTextResponse
from starlette.types import ASGIApp, Message, Receive, Scope, Send

LOOPBACK = ("localhost", "127.0.0.1", "::1")
EVERYWHERE = ("0.0.0.0", "::")  # noqa: S104 - names to compare with, nothing is bound here
POLICY = (
    "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self'; connect-src 'self'; base-uri 'none'; "
    "form-action 'none'; frame-ancestors 'none'"
)
HEADERS = {
    "content-security-policy": POLICY,
    "x-content-type-options": "nosniff",
    "x-frame-options": "DENY",
    "referrer-policy": "no-referrer",
    "cross-origin-resource-policy": "same-origin",
    "cross-origin-opener-policy": "same-origin",
    "cache-control": "no-store",
}
NOT_KNOWN = "403: this page needs the token that `inrun serve` printed: open the whole address, with ?token=...\n"
SAFE_METHODS = ("GET", "HEAD")


class Guard:
    """Lets requests through that have the token and come from a page of ours."""

    def __init__(self, app: ASGIApp, token: str, host: str, names: Iterable[str] = ()) -> None:
        """Stand before an application.

        Args:
            app: What is guarded.
            token: What must be known.
            host: The address the server is bound to.
            names: Further names of this machine that browsers may use.
        """
        self.app, self._token = app, token.encode()
        #: Cookies are shared by all ports of a machine: two explorers must not overwrite each other's.
        self.cookie = f"inrun-{hashlib.sha256(self._token).hexdigest()[:12]}"
        self._names = {*LOOPBACK, host.lower(), *(n.lower() for n in names)} - set(EVERYWHERE)
        self._any_address = host in EVERYWHERE

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer, or hand the request on."""
        if scope["type"] == "lifespan":
            await self.app(scope, receive, send)
            return
        if scope["type"] != "http":  # there are no websockets here
            await send({"type": "websocket.close", "code": 1008})
            return

        async def guarded(message: Message) -> None:
            if message["type"] == "http.response.start":
                headers = [(k, v) for k, v in message["headers"] if k.lower().decode() not in HEADERS]
                headers += [(k.encode(), v.encode()) for k, v in HEADERS.items()]
                if by_url:
                    headers.append(
                        (b"set-cookie", f"{self.cookie}={self._token.decode()}; Path=/; HttpOnly; SameSite=Strict".encode())
                    )
                message = {**message, "headers": headers}
            await send(message)

        by_url = False
        refusal = self._refusal(scope)
        if refusal is None:
            given = dict(parse_qsl(scope["query_string"].decode("latin-1"))).get("token")
            by_url = scope["path"] == "/" and self._is_token(given)
            if not by_url and not self._knows_token(scope):
                refusal = PlainTextResponse(NOT_KNOWN, 403)
        await (refusal or self.app)(scope, receive, guarded)

    def _refusal(self, scope: Scope) -> PlainTextResponse | None:
        hosts, origins = _header(scope, b"host"), _header(scope, b"origin")
        if len(hosts) != 1 or not self._is_ours(_name(hosts[0])):
            return PlainTextResponse("400: this server does not go by that name (see inrun serve --allow-host)\n", 400)
        foreign = any(origin.lower() not in (f"http://{hosts[0].lower()}", f"https://{hosts[0].lower()}") for origin in origins)
        crossing = any(site not in ("same-origin", "none") for site in _header(scope, b"sec-fetch-site"))
        changes = scope["method"] not in SAFE_METHODS
        link = scope["path"] == "/" and not changes and _header(scope, b"sec-fetch-mode") == ["navigate"]
        if foreign or len(origins) > 1 or (changes and not origins) or (crossing and not link):
            return PlainTextResponse("403: requests from other pages are refused\n", 403)
        return None

    def _is_ours(self, name: str | None) -> bool:
        if name is None:
            return False
        if name in self._names:
            return True
        return self._any_address and _is_address(name)  # a name could be anybody's; an address cannot be rebound

    def _is_token(self, given: str | None) -> bool:
        return given is not None and hmac.compare_digest(given.encode(), self._token)

    def _knows_token(self, scope: Scope) -> bool:
        for header in _header(scope, b"authorization"):
            scheme, _, given = header.partition(" ")
            if scheme.lower() in ("token", "bearer") and self._is_token(given.strip()):
                return True
        for header in _header(scope, b"cookie"):
            # By hand: the standard library gives up at the first odd cookie, and other servers of this machine may set such.
            pairs = (entry.strip().partition("=") for entry in header.split(";"))
            if any(name == self.cookie and self._is_token(value) for name, _, value in pairs):
                return True
        return False


def _header(scope: Scope, name: bytes) -> list[str]:
    return [v.decode("latin-1") for k, v in scope["headers"] if k == name]


def _name(host: str) -> str | None:
    """Return the name in a Host header, without its port; None if it is none."""
    try:
        found = urlsplit(f"//{host}")
        _ = found.port  # raises if it is no number
    except ValueError:
        return None
    whole = found.username is None and found.password is None and not (found.path or found.query or found.fragment)
    return found.hostname if whole else None


def _is_address(name: str) -> bool:
    try:
        ipaddress.ip_address(name)
    except ValueError:
        return False
    return True
