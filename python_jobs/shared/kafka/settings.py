"""Settings of Kafka clients, with secrets by pointer."""

from __future__ import annotations

import re
from collections.abc import Mapping

from python_jobs.shared.core.failures import WrongUse

_SECRET = re.compile(r"password|jaas|secret|ssl\.keystore\.key", re.IGNORECASE)


def refuse_secrets(settings: Mapping[str, str]) -> None:
    """Refuse client settings that hold a secret itself: command lines, plans and logs would show it.

    Raises:
        WrongUse: a secret isn't given as ``${env:NAME}``.
    """
    for name, value in settings.items():
        if _SECRET.search(name) and not re.fullmatch(r".*\$\{env:\w+\}.*", value, re.DOTALL):
            raise WrongUse(f"the Kafka setting {name} is a secret: pass it as ${{env:NAME}}")


def java_client_settings(bootstrap_servers: str, settings: Mapping[str, str]) -> dict[str, str]:
    """Return the settings of a Kafka client; it looks ``${env:NAME}`` up itself, so that Spark never holds it."""
    found = {"bootstrap.servers": bootstrap_servers, **settings}
    if "${env:" in "".join(settings.values()):
        provider = "org.apache.kafka.common.config.provider.EnvVarConfigProvider"
        found |= {"config.providers": "env", "config.providers.env.class": provider}
    return found


def consumer_settings(bootstrap_servers: str, settings: Mapping[str, str]) -> dict[str, str]:
    """Return the settings of a client that reads: without records of transactions that were given up or are open.

    Kafka's own default would show them. ``isolation.level: read_uncommitted`` among the settings brings it back.
    """
    return java_client_settings(bootstrap_servers, {"isolation.level": "read_committed", **settings})
