"""Settings of Kafka clients: no secret passes on a command line."""

from __future__ import annotations

import pytest

from python_jobs.shared.core.failures import WrongUse
from python_jobs.shared.kafka.settings import consumer_settings, java_client_settings, refuse_secrets

OF_LIBRDKAFKA = [
    "ssl.key.password",
    "ssl.key.pem",
    "ssl_key",
    "ssl.keystore.password",
    "sasl.password",
    "sasl.oauthbearer.config",
    "sasl.oauthbearer.client.secret",
    "sasl.oauthbearer.client.credentials.client.secret",
    "sasl.oauthbearer.assertion.private.key.passphrase",
    "sasl.oauthbearer.assertion.private.key.pem",
]
OF_JAVA = [
    "ssl.key.password",
    "ssl.keystore.key",
    "ssl.keystore.password",
    "ssl.truststore.password",
    "sasl.jaas.config",
    "listener.name.sasl_ssl.plain.sasl.jaas.config",
    "sasl.oauthbearer.client.credentials.client.secret",
    "sasl.oauthbearer.assertion.private.key.passphrase",
]
OF_OTHERS = [
    "SSL.KEY.PEM",
    "basic.auth.user.info",
    "schema.registry.basic.auth.user.info",
    "bearer.auth.token",
    "aws.secret.access.key",
    "some.later.api.key",
]
PUBLIC = [
    "security.protocol",
    "sasl.username",
    "sasl.mechanism",
    "sasl.kerberos.keytab",
    "sasl.oauthbearer.client.id",
    "sasl.oauthbearer.scope",
    "sasl.oauthbearer.token.endpoint.url",
    "sasl.oauthbearer.assertion.file",
    "sasl.oauthbearer.assertion.private.key.file",
    "sasl.oauthbearer.assertion.algorithm",
    "ssl.certificate.pem",
    "ssl.certificate.location",
    "ssl.ca.pem",
    "ssl.key.location",
    "ssl.keystore.location",
    "ssl.keystore.type",
    "ssl.keystore.certificate.chain",
    "ssl.truststore.certificates",
    "key.deserializer",
    "client.id",
]


@pytest.mark.parametrize("name", sorted({*OF_LIBRDKAFKA, *OF_JAVA, *OF_OTHERS}))
def test_a_secret_setting_is_a_pointer_or_is_refused(name: str) -> None:
    refuse_secrets({name: "${env:KAFKA_SECRET}"})
    for value in ("geheim", "", "-----BEGIN PRIVATE KEY-----\nMIIE", "$KAFKA_SECRET", "password=geheim"):
        with pytest.raises(WrongUse) as refused:
            refuse_secrets({"client.id": "c", name: value})
        assert str(refused.value) == f"the Kafka setting {name} is a secret: pass it as ${{env:NAME}}"


@pytest.mark.parametrize("name", PUBLIC)
def test_a_public_setting_passes(name: str) -> None:
    refuse_secrets({name: "value"})


@pytest.mark.parametrize("name", ["sasl.password", "ssl.key.pem"])
@pytest.mark.parametrize("value", ["geheim${env:NAME}", "${env:NAME}geheim"])
def test_a_pointer_beside_the_secret_is_none(name: str, value: str) -> None:
    with pytest.raises(WrongUse, match="is a secret"):
        refuse_secrets({name: value})


@pytest.mark.parametrize(
    ("setting", "value"),
    [
        ("sasl.jaas.config", 'o.a.k.PlainLoginModule required username="u" password={};'),
        ("sasl.jaas.config", "o.a.k.ScramLoginModule required username='u' password = {};"),
        ("sasl.jaas.config", 'o.a.k.OAuthBearerLoginModule required clientId="i" clientSecret={};'),
        ("sasl.oauthbearer.config", "principal=p clientSecret={}"),
    ],
)
def test_the_secret_of_a_login_is_the_pointer(setting: str, value: str) -> None:
    for pointer in ("${env:NAME}", '"${env:NAME}"', "'${env:NAME}'"):
        refuse_secrets({setting: value.format(pointer)})
    for secret in ('"geheim"', "geheim", '"geheim" extra="${env:NAME}"'):
        with pytest.raises(WrongUse, match="is a secret"):
            refuse_secrets({setting: value.format(secret)})


def test_kafka_s_client_looks_up_secrets_itself() -> None:
    secret = {"sasl.password": "${env:PASSWORD}", "client.id": "visits"}
    assert java_client_settings("kafka:9092", secret) == {
        "bootstrap.servers": "kafka:9092",
        "sasl.password": "${env:PASSWORD}",
        "client.id": "visits",
        "config.providers": "env",
        "config.providers.env.class": "org.apache.kafka.common.config.provider.EnvVarConfigProvider",
    }
    assert java_client_settings("kafka:9092", {"client.id": "visits"}) == {
        "bootstrap.servers": "kafka:9092",
        "client.id": "visits",
    }


def test_a_consumer_reads_what_was_committed_unless_it_is_told_otherwise() -> None:
    assert consumer_settings("kafka:9092", {}) == {
        "bootstrap.servers": "kafka:9092",
        "isolation.level": "read_committed",
    }
    all_records = {"isolation.level": "read_uncommitted"}
    assert consumer_settings("kafka:9092", all_records)["isolation.level"] == "read_uncommitted"
