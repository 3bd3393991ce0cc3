"""The live part of the case study: visits come by HTTP, and what follows them is done by streams.

    python -m case_study.live [--input FOLDER] [--visits N] [--target local|cluster] [--master URL] [--separate true]

Kafka, the API Gateway and a partner's API run as processes. Producers post visits, ads and changes of pages to the
gateway. The first half of the visits are history when the live jobs start, the rest comes through the topic. Each
job processes what there is and ends; it is a command that is printed before it runs, as in the demo. The report at the
end counts the records at each place, and fails if a number doesn't follow from the one before.

The tables are below ``$LAKEHOUSE_ROOT/live``. A rerun sends and writes nothing, and a run that died is repaired.
"""

from __future__ import annotations

import json
import os
import shlex
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from jsonargparse import auto_cli
from pyspark.sql import SparkSession
from tabulate import tabulate

from case_study.demo import DemoFailed, generate, lakehouse_root, only_run, run_steps
from case_study.live_feeds import (
    ADS,
    PAGE_CHANGES,
    VISITS,
    ad_posts,
    event_ids,
    page_change_posts,
    send,
    visit_posts,
)
from case_study.live_report import PUBLISHED
from case_study.main_job import REPORT, Step, program, submit
from case_study.runners import ROOT, OneSession, Runner, as_process
from case_study.sources import landing_files, landing_hour
from python_jobs.shared.core.failures import JobFailed
from python_jobs.shared.core.json_text import json_text
from python_jobs.shared.core.whole_files import write_whole
from python_jobs.shared.spark.session import spark_session
from services.kafka import Broker, running_broker
from services.processes import HOST, Process, ServiceFailed, free_port, running

TOPICS = (VISITS, ADS, PAGE_CHANGES, PUBLISHED)
_PARTITIONS = 2
# Segments of a topic close by age, and the last ones are younger than any age when a bounded run copies them.
_ALL_SEGMENTS = "2100-01-01"


@dataclass(frozen=True)
class Services:
    """The running services of the live case study."""

    broker: Broker
    gateway: str
    """URL of the API Gateway."""
    partner: str
    """URL of the partner's API."""


@dataclass(frozen=True)
class Played:
    """What the producers have sent so far, in this run and the ones before."""

    visits: int
    """Number of visits."""
    refused: int
    """Number of visits that the gateway refused."""
    boundary: dict[str, int]
    """First offset of each partition of the visits that isn't history."""


def main(
    input: str | None = None,
    visits: int = 2_000,
    target: str = "local",
    master: str | None = None,
    separate: bool = False,
) -> int:
    """Run the live part of the case study once, from producers' requests to a partner and a topic.

    Args:
        input: landing folder with visits/; by default data is generated once.
        visits: number of page events to generate.
        target: dbt target whose settings the session has, local or cluster.
        master: Spark master of the jobs; by default spark-submit's.
        separate: run each step as a process.

    Returns:
        The exit code.
    """
    try:
        root = Path(lakehouse_root()) / "live"
        os.environ["LAKEHOUSE_ROOT"] = str(root)
        landing = Path(input).absolute() if input else root / "landing"
        if input and not (landing / VISITS).is_dir():
            raise DemoFailed(f"the input folder '{landing}' has no folder {VISITS}", 4)
        with only_run(root):
            run = as_process if separate else OneSession.opened_by_dbt(target, master)
            if not input:
                generate(landing, visits, run)
            seconds, report = run_live(root, landing, run, master)
    except ServiceFailed as failure:
        print(failure, file=sys.stderr)
        return 1
    except (DemoFailed, JobFailed) as failure:
        print(failure, file=sys.stderr)
        return failure.exit_code
    print("\n" + tabulate(report["counts"], headers="keys", tablefmt="simple"))
    times = [*seconds.items(), ("total", sum(seconds.values()))]
    print("\n" + tabulate(times, headers=["step", "seconds"], tablefmt="simple", floatfmt=".1f"))
    return 0


def run_live(
    root: Path, landing: Path, run: Runner, master: str | None = None
) -> tuple[dict[str, float], dict[str, Any]]:
    """Send what is new in the landing folder and run the jobs; return the seconds of each step, and the report.

    Raises:
        ServiceFailed: a service did not start or did not take a record.
        DemoFailed: a step failed, or the folder has no visits.
    """
    spark = run.spark if isinstance(run, OneSession) else spark_session("producers")
    with live_services(root) as services:
        played = play(spark, services, landing, root)
        if not isinstance(run, OneSession):
            spark.stop()
        return run_steps(live_steps(root, services, played, master), run)


@contextmanager
def live_services(root: Path) -> Iterator[Services]:
    """Run Kafka with its topics, the gateway and the partner until the block ends; all keep their data below ``root``.

    Raises:
        ServiceFailed: a service did not start.
    """
    folder = root / ".services"
    with running_broker(folder / "kafka") as broker:
        for topic in {*TOPICS} - {*broker.topics()}:
            broker.create_topic(topic, _PARTITIONS)
        gateway_port = free_port()
        partner_port = _kept(folder / "partner_port.json", free_port)  # the progress is that of an address
        gateway = program(
            "gateway",
            "python_jobs.streaming.api_gateway_http",
            config="conf/jobs/live_gateway.yml",
            bootstrap_servers=broker.bootstrap_servers,
            fallback=root / "fallback",
            port=gateway_port,
        )
        partner = program("partner", "case_study.partner", file=deliveries_file(root), port=partner_port)
        with running(_server(gateway, gateway_port, folder)), running(_server(partner, partner_port, folder)):
            yield Services(
                broker, f"http://{HOST}:{gateway_port}", f"http://{HOST}:{partner_port}/page_views"
            )


def deliveries_file(root: Path) -> Path:
    """Return the file of what the partner has."""
    return root / "partner" / "deliveries.sqlite"


def _server(step: Step, port: int, folder: Path) -> Process:
    """Return the server that a step's command starts; it prints its URL when it takes requests."""
    print(f"$ {shlex.join(step.command)} &", flush=True)
    command = [sys.executable, *step.command[1:]]
    url = f"http://{HOST}:{port}"
    return Process(step.name, command, folder, lambda log: url in log, ports=(port,), working_folder=ROOT)


def play(spark: SparkSession, services: Services, landing: Path, root: Path) -> Played:
    """Send what the topics don't have yet: the history, where it ends, the other visits, ads and changes of pages.

    The first run stores where the history ends. Visits of a later run are live, whatever their hour.

    Raises:
        DemoFailed: the landing folder has no visits.
        ServiceFailed: the gateway didn't deliver a record.
    """
    files = sorted(landing_files(spark, landing, VISITS), key=landing_hour)
    if not files:
        raise DemoFailed(f"'{landing}' has no visits", 4)
    hours = sorted({*map(landing_hour, files)})
    begin = hours[len(hours) // 2]
    history = visit_posts(spark, [file for file in files if landing_hour(file) < begin])
    live = visit_posts(spark, [file for file in files if landing_hour(file) >= begin])
    broker = services.broker
    known = {event_id for topic in (VISITS, ADS, PAGE_CHANGES) for event_id in event_ids(broker, topic)}
    refused = send(services.gateway, history, known)
    ends = _kept(root / "history_ends.json", lambda: [*broker.ends(VISITS, _PARTITIONS).items()])
    refused += send(services.gateway, live, known)
    visits = [*history, *live]
    others = [*ad_posts(visits), *page_change_posts()]
    if refused_others := send(services.gateway, others, known):
        raise ServiceFailed(f"the gateway refused {refused_others} ads and changes of pages")
    print(f"visits sent by HTTP: {len(visits)}, of which the gateway refused {refused}", flush=True)
    return Played(len(visits), refused, {str(partition): end for partition, end in ends})


def _kept(file: Path, first: Callable[[], Any]) -> Any:
    """Return what the first run has stored in a file; the first run calls the function."""
    if not file.exists():
        file.parent.mkdir(parents=True, exist_ok=True)
        write_whole(file, [json_text(first())])
    return json.loads(file.read_text(encoding="utf-8"))


def live_steps(root: Path, services: Services, played: Played, master: str | None = None) -> list[Step]:
    """Return the jobs from the topics to the partner, in their order, and the report."""
    brokers = services.broker.bootstrap_servers
    visits = f"{root}/visits"

    def checkpoint(name: str) -> str:
        return f"{root}/checkpoints/{name}"

    return [
        submit(
            "raw copies",
            "python_jobs/streaming/zero_etl_synchronizer",
            master,
            configuration="conf/jobs/live_raw_topics.yml",
            bootstrap_servers=brokers,
            root=root,
            now=_ALL_SEGMENTS,
        ),
        submit(
            "visits",
            "python_jobs/streaming/hybrid_source",
            master,
            config="conf/jobs/live_visits.yml",
            history=f"{root}/raw/visits",
            bootstrap_servers=brokers,
            **{f"boundary.{partition}": offset for partition, offset in played.boundary.items()},
            target=visits,
            checkpoint=checkpoint("visits"),
        ),
        submit(
            "sessions",
            "python_jobs/streaming/partial_state_writer",
            master,
            config="conf/jobs/live_sessions.yml",
            source=visits,
            target=f"{root}/sessions",
            dead_letter=f"{root}/visits_without_session",
            checkpoint=checkpoint("sessions"),
        ),
        submit(
            "visits with ads",
            "python_jobs/data_value/dynamic_joiner",
            master,
            config="conf/jobs/live_visits_with_ads.yml",
            left=visits,
            right=f"{root}/raw/ads",
            target=f"{root}/visits_with_ads",
            late=f"{root}/visits_with_ads_late",
            dead_letter=f"{root}/visits_with_ads_dead",
            checkpoint=checkpoint("visits_with_ads"),
        ),
        submit(
            "visits by id",
            "python_jobs/data_value/local_aggregator",
            master,
            config="conf/jobs/live_visits_by_id.yml",
            bootstrap_servers=brokers,
            target=f"{root}/visits_by_id",
            dead_letter=f"{root}/visits_without_id",
            checkpoint=checkpoint("visits_by_id"),
        ),
        program(
            "published pages",
            "python_jobs.data_value.fifo_orderer_kafka",
            config="conf/jobs/live_published_pages.yml",
            source_bootstrap_servers=brokers,
            target_bootstrap_servers=brokers,
        ),
        submit(
            "partner",
            "python_jobs/data_value/bin_pack_orderer",
            master,
            config="conf/jobs/live_partner.yml",
            source=visits,
            outputs=json_text([{"name": "partner", "kind": "http", "target": services.partner}]),
            dead_letter=f"{root}/undeliverable_views",
            checkpoint=checkpoint("partner"),
        ),
        submit(
            REPORT,
            "case_study/live_report",
            master,
            root=root,
            bootstrap_servers=brokers,
            deliveries=deliveries_file(root),
            sent=played.visits,
            refused=played.refused,
        ),
    ]


if __name__ == "__main__":
    sys.exit(auto_cli(main, as_positional=False))
