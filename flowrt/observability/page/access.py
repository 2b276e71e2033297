"""Access control of the page: which requests are answered.

- Only GET and HEAD; every other method is answered with status 405.
- ``/?token=TOKEN`` is answered with a cookie and a redirect to the address without the token. Every other request needs
  the cookie, or the header ``Authorization: Bearer TOKEN``, as Prometheus sends it (RFC 6750). Tokens are compared in
  constant time.
- Of a request with the cookie, the Host header must name this machine: a page of another site could let its own name
  resolve to this address (DNS rebinding). An Origin header must be that of the page itself. A browser sends a bearer
  token for no page that does not know it, so requests with one may use any name of this machine.
"""

import hmac
import socket
from collections.abc import Awaitable, Callable
from urllib.parse import urlsplit

from aiohttp import web

from flowrt.runtime.addresses import unmapped

Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]
HEADERS = {
    "Content-Security-Policy": (
        "default-src 'none'; script-src 'self'; style-src 'self'; connect-src 'self'; base-uri 'none'; "
        "form-action 'none'; frame-ancestors 'none'"
    ),
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "no-referrer",
    "Cache-Control": "no-store",
    "Cross-Origin-Resource-Policy": "same-origin",
}
"""Headers of every response."""
METRICS_PATH = "/metrics"
BEARER = {"WWW-Authenticate": "Bearer"}
WHERE = "the token is in the address that flowrt watch printed, and in .watch_token of the run directory"
NO_BEARER = f"{METRICS_PATH} needs the header Authorization: Bearer TOKEN; {WHERE}"
WRONG_BEARER = f"the header Authorization is not Bearer with the token of this page; {WHERE}"


class Access:
    """Decides which requests are answered."""

    def __init__(self, token: str, names: frozenset[str] = frozenset()) -> None:
        """Grant access to browsers that have the token.

        Args:
            token: the secret that a browser must send.
            names: further names of this machine that a Host header may have.
        """
        self._token = token.encode()
        self._names = frozenset(name.lower() for name in names) | {"localhost", socket.gethostname().lower()}
        self.cookie = "flowrt"
        """Name of the cookie. The server adds its port, because browsers send a cookie to all ports of a host."""

    def refusal(self, request: web.Request) -> web.Response | None:
        """The response that ends a request: a refusal, or the redirect of a sign-in; None if access is granted."""
        if request.method not in ("GET", "HEAD"):
            return refuse(405, "this page can only be read", {"Allow": "GET, HEAD"})
        scheme, _, token = request.headers.get("Authorization", "").partition(" ")
        if scheme.lower() == "bearer":
            return None if self._is_token(token.strip()) else refuse(401, WRONG_BEARER, BEARER)
        if not self._is_ours(request):
            return refuse(403, "this request was meant for another host; use the address that flowrt watch printed")
        token = request.query.get("token", "") if request.path == "/" else ""
        if token and self._is_token(token):
            response = web.Response(status=303, headers={"Location": "/"})
            response.set_cookie(self.cookie, token, httponly=True, samesite="Strict", path="/")
            return response
        if token or not self._is_token(request.cookies.get(self.cookie, "")):
            if request.path.endswith(METRICS_PATH):
                return refuse(401, NO_BEARER, BEARER)
            return refuse(403, "open the address with the token that flowrt watch printed")
        return None

    def _is_token(self, given: str) -> bool:
        return hmac.compare_digest(given.encode(errors="replace"), self._token)

    def _is_ours(self, request: web.Request) -> bool:
        """Whether the Host header names this machine, and the Origin header, if there is one, this page."""
        own = request.headers.get("Host", "")
        origin = request.headers.get("Origin")
        try:
            if origin is not None and urlsplit(origin).netloc.lower() != own.lower():
                return False
            name = (urlsplit(f"//{own}").hostname or "").lower()
        except ValueError:
            return False
        return name in self._names or self._is_local_address(request, name)

    @staticmethod
    def _is_local_address(request: web.Request, name: str) -> bool:
        """Whether ``name`` is the IP address at which the request arrived."""
        here = None if request.transport is None else request.transport.get_extra_info("sockname")
        if not here:
            return False
        return _plain(name) == _plain(here[0])


def refuse(status: int, why: str, headers: dict[str, str] | None = None) -> web.Response:
    """A plain-text response of one sentence."""
    return web.Response(status=status, text=f"{why}\n", headers=headers)


async def add_headers(request: web.Request, response: web.StreamResponse) -> None:  # noqa: ARG001 (aiohttp passes it)
    """Add `HEADERS` to a response, and remove its Server header."""
    response.headers.update(HEADERS)
    response.headers.pop("Server", None)


def _plain(host: str) -> str:
    return unmapped(host.partition("%")[0])
