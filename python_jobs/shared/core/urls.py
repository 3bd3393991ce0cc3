"""URLs of HTTP services, as parameters give them."""

from __future__ import annotations

from urllib.parse import urlsplit

from python_jobs.shared.core.failures import WrongUse


def require_http_url(what: str, url: str) -> None:
    """Refuse what is no URL of an HTTP service, and a URL that holds a name or a password.

    Parameters are in lists of processes, in logs and in checkpoints, and messages name a service by its URL. The
    refusal doesn't show the URL.

    Raises:
        WrongUse: the URL can't be used; ``what`` begins the sentence.
    """
    try:
        parts = urlsplit(url)
        usable = parts.scheme in ("http", "https") and bool(parts.hostname) and parts.port != 0
    except ValueError:  # a port that is none, or half of an IPv6 address
        usable = False
    if not usable:
        raise WrongUse(f"{what} must begin with http:// or https:// and name a host")
    if "@" in parts.netloc:
        raise WrongUse(f"{what} must not hold a name or a password: give a token by its environment variable")
