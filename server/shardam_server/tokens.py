"""Comparison of tokens without leaking them by time; used by the gRPC front and the HTTP listeners."""

from __future__ import annotations

import base64
import binascii
import hmac


def _equal(sent: str, token: str) -> bool:
    return hmac.compare_digest(sent.encode("utf-8", "surrogateescape"), token.encode())


def bearer_matches(header: str | bytes, token: str) -> bool:
    """True if an authorization value is `Bearer TOKEN`."""
    text = header.decode("utf-8", "surrogateescape") if isinstance(header, bytes) else header
    scheme, _, sent = text.partition(" ")
    return scheme.lower() == "bearer" and _equal(sent.strip(), token)


def authorization_matches(header: str, token: str) -> bool:
    """True if an HTTP Authorization header is `Bearer TOKEN`, or Basic with the token as password (any user name)."""
    if bearer_matches(header, token):
        return True
    scheme, _, encoded = header.partition(" ")
    if scheme.lower() != "basic":
        return False
    try:
        credentials = base64.b64decode(encoded.strip(), validate=True).decode("utf-8", "surrogateescape")
    except (binascii.Error, ValueError):
        return False
    return _equal(credentials.partition(":")[2], token)
