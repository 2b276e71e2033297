"""Addresses of HTTP servers in a configuration."""

from urllib.parse import urlsplit

from flowrt.errors import ConfigError


def check_url(key: str, url: str, fix: str) -> None:
    """Check that ``url`` is http(s)://HOST[:PORT][/PATH]. Raises ConfigError, in which no password is shown.

    Args:
        key: name of the configuration key.
        url: its value.
        fix: where a password or key belongs instead: the configuration is written to files.
    """
    try:
        parts = urlsplit(url)
        is_complete = parts.scheme in ("http", "https") and bool(parts.hostname) and parts.port != 0
    except ValueError:  # a port that is no number, a wrong IPv6 address
        raise ConfigError(f"{key} has a wrong host or port; write http://HOST:PORT") from None
    if "@" in (parts.netloc if is_complete else url):
        raise ConfigError(f"{key} has a user name or password, which would be written to the run's files; {fix}")
    if not is_complete:
        raise ConfigError(f"{key} is {url!r}; use an address that begins with http:// or https://")
