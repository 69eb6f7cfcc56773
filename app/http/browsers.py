"""Refuses requests that a web page of another site makes through its visitor's browser.

The visitor's browser reaches servers on loopback and in private networks that the page's site does
not reach. A page has no key, so these checks are for servers that need none. Other clients than
browsers send neither `Origin` nor `Sec-Fetch-Site`, and are not affected.

Sources: the Fetch standard (`Origin`, and posts of `text/plain`, which need no preflight), W3C's
Fetch Metadata (`Sec-Fetch-Site`).
"""

import ipaddress
from collections.abc import Collection
from functools import lru_cache

from flask import Flask, request

from titopool.errors import ForeignPage

# A link on another site may lead there: it holds no data, and no frame may show it.
LINKED_ENDPOINTS = {"page.page"}
REMEDY = "send the request from a program, or start the server with a key (api_key_file)"


def init_app(app: Flask, host: str, allowed_hosts: Collection[str]) -> None:
    """Refuses requests of foreign pages.

    Args:
        host: the address that the server listens on.
        allowed_hosts: names, without ports, that `Host` and `Origin` may have.
    """
    # A page's own name can be made to resolve to 127.0.0.1 (DNS rebinding). Its requests then look
    # like requests of the same origin, and only the name in `Host` gives them away.
    checks_names = is_loopback(host) or bool(allowed_hosts)
    allowed = {name.lower() for name in allowed_hosts}

    @app.before_request
    def check_page() -> None:
        # werkzeug's own look-up of a header takes ten times as long.
        headers = request.environ
        site = headers.get("HTTP_SEC_FETCH_SITE", "none")
        is_link = (
            request.endpoint in LINKED_ENDPOINTS
            and headers.get("HTTP_SEC_FETCH_MODE") == "navigate"
        )
        if site not in ("none", "same-origin") and not is_link:
            raise ForeignPage(
                f"expected a request of no other site's page, got Sec-Fetch-Site: {site[:100]}; "
                f"{REMEDY}"
            )
        host, origin = headers.get("HTTP_HOST"), headers.get("HTTP_ORIGIN")
        name = _name_of(host or "")
        if origin is not None:
            address = origin.partition("://")[2]
            if address != host and _name_of(address) not in allowed:
                raise ForeignPage(
                    f"expected a request of no page or of this server's, got Origin: {origin[:100]}; "
                    f"{REMEDY}, or add the page's host to allowed_hosts"
                )
        if checks_names and not (name in allowed or _is_no_dns_name(name)):
            raise ForeignPage(
                f"expected the header Host with localhost or an IP address, got {name[:100]!r}; add "
                "the name to allowed_hosts if clients reach the server by it, or start it with a "
                "key (api_key_file)"
            )


def is_loopback(host: str) -> bool:
    """Whether a server that listens on `host` is reached from its own machine only."""
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"


def _name_of(address: str) -> str:
    """Host name or IP address of `host:port`, `[ipv6]:port` or either without a port."""
    if address.startswith("["):
        return address[1:].partition("]")[0]
    return address.partition(":")[0].lower()


@lru_cache(maxsize=64)
def _is_no_dns_name(name: str) -> bool:
    """Whether no DNS server decides where `name` leads: localhost, an IP address, or nothing."""
    # RFC 6761: names below localhost are loopback too. HTTP/1.0 knows no `Host`.
    if name in ("", "localhost") or name.endswith(".localhost"):
        return True
    try:
        ipaddress.ip_address(name)
    except ValueError:
        return False
    return True
