"""URLs of HTTP services: which are taken, and that no sentence shows a secret."""

from __future__ import annotations

import pytest

from python_jobs.data_value.bulk_lookups import Api
from python_jobs.data_value.bulk_sinks import Output
from python_jobs.ingestion.airflow_client import Airflow
from python_jobs.shared.core.failures import WrongUse
from python_jobs.shared.core.urls import require_http_url

PARTS = "url must begin with http:// or https:// and name a host"
SECRET = "url must not hold a name or a password: give a token by its environment variable"


@pytest.mark.parametrize(
    "url", ["http://h", "https://h:8443/a/b", "http://[::1]:80/x", "https://h/by@mail", "HTTPS://H/x?y=@"]
)
def test_a_service_may_have_port_path_and_query(url: str) -> None:
    require_http_url("url", url)


@pytest.mark.parametrize(
    ("url", "sentence"),
    [
        ("h", PARTS),
        ("ftp://h", PARTS),
        ("http://", PARTS),
        ("http:///path", PARTS),
        ("http://h:port", PARTS),
        ("http://h:0", PARTS),
        ("http://[::1", PARTS),
        ("http://user:s3cret@h", SECRET),
        ("https://s3cret@h/x", SECRET),
        ("http://@h", SECRET),
    ],
)
def test_other_urls_are_refused_without_being_shown(url: str, sentence: str) -> None:
    with pytest.raises(WrongUse) as refusal:
        require_http_url("url", url)
    assert str(refusal.value) == sentence


def test_no_service_is_named_by_a_url_with_a_password() -> None:
    url = "https://user:s3cret@h/bulk"
    with pytest.raises(WrongUse, match=f"^{SECRET}$"):
        Api(url=url, keys_parameter="ids", answer_field="mapped")
    with pytest.raises(WrongUse, match=f"^the target of output a{SECRET.removeprefix('url')}$"):
        Output("a", "http", url)
    with pytest.raises(WrongUse, match=f"^airflow's {SECRET}$"):
        Airflow(url, "dag")
    Output("a", "kinesis", "user@stream")
