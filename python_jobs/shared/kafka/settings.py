"""Settings of Kafka clients; a secret is named by its environment variable."""

from __future__ import annotations

import re
from collections.abc import Mapping

from python_jobs.shared.core.failures import WrongUse

# Secret settings of librdkafka and of the Java client, by common parts of their names, so that settings of later
# versions match, too. Certificates are public, and so are names of files, addresses and classes.
_SECRET = re.compile(
    r"password|passphrase|passwd|secret|credential|jaas|private\.key|\bssl[._]key$|\.key\.pem|keystore\.key|"
    r"oauthbearer\.config|user\.info|api\.key|access\.key|token$",
    re.IGNORECASE,
)
_PLACE = re.compile(r"[._](location|file|path|url|uri|class|type|algorithm|id|ms|seconds)$", re.IGNORECASE)
_POINTER = r"\$\{env:\w+\}"
# Settings that hold a whole login: the login's secret field must be the pointer.
_LOGIN = re.compile(r"jaas|oauthbearer\.config|user\.info", re.IGNORECASE)
_SECRET_FIELD = re.compile(
    rf"(?:password|passphrase|secret|token)\w*\s*=(?!\s*[\"']?{_POINTER})", re.IGNORECASE
)


def refuse_secrets(settings: Mapping[str, str]) -> None:
    """Refuse client settings that contain a secret: command lines, plans and logs would show it.

    Raises:
        WrongUse: a secret isn't given as ``${env:NAME}``.
    """
    for name, value in settings.items():
        if not _SECRET.search(name) or _PLACE.search(name):
            continue
        if _LOGIN.search(name):
            is_pointer = bool(re.search(_POINTER, value)) and not _SECRET_FIELD.search(value)
        else:
            is_pointer = bool(re.fullmatch(_POINTER, value))
        if not is_pointer:
            raise WrongUse(f"the Kafka setting {name} is a secret: pass it as ${{env:NAME}}")


def java_client_settings(bootstrap_servers: str, settings: Mapping[str, str]) -> dict[str, str]:
    """Return the settings of a Java client, which looks up ``${env:NAME}`` itself: Spark never holds the secret."""
    found = {"bootstrap.servers": bootstrap_servers, **settings}
    if "${env:" in "".join(settings.values()):
        provider = "org.apache.kafka.common.config.provider.EnvVarConfigProvider"
        found |= {"config.providers": "env", "config.providers.env.class": provider}
    return found


def consumer_settings(bootstrap_servers: str, settings: Mapping[str, str]) -> dict[str, str]:
    """Return the settings of a client that reads only records of committed transactions.

    Kafka's own default also shows records of aborted and open transactions. The setting
    ``isolation.level: read_uncommitted`` restores this default.
    """
    return java_client_settings(bootstrap_servers, {"isolation.level": "read_committed", **settings})
