"""The project's writers by name: what the torture kills and runs again."""

from __future__ import annotations

from tests.torture.dbt_writers import dbt_writers
from tests.torture.file_writers import file_writers
from tests.torture.job_writers import job_writers
from tests.torture.kafka_writers import kafka_writers
from tests.torture.service_writers import service_writers

WRITERS = {
    writer.name: writer
    for writers in (job_writers(), file_writers(), kafka_writers(), service_writers(), dbt_writers())
    for writer in writers
}
