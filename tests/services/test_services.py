"""The services that tests and people run: ready when entered, apart from one another, back after a crash."""

from __future__ import annotations

import contextlib
import dataclasses
import os
import shutil
import signal
import socket
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import psutil
import pytest

from services import postgres as postgres_service
from services.debezium import Connector
from services.kafka import Record, running_broker
from services.postgres import HOMES, running_postgres
from services.processes import HOST, Process, ServiceFailed, free_port, is_taken, running
from tests.support.dbt_project import REPOSITORY
from tests.support.waiting import eventually

PROGRAMS = postgres_service._binaries()
SLEEPER = [sys.executable, "-c", "import time; print('ready', flush=True); time.sleep(600)"]


def is_ready(log: str) -> bool:
    return "ready" in log


def processes_of(folder: Path) -> list[psutil.Process]:
    """Return the living processes whose command line names ``folder``."""
    found = []
    for process in psutil.process_iter():
        with contextlib.suppress(psutil.NoSuchProcess, psutil.AccessDenied):
            if str(folder) in " ".join(process.cmdline()) and process.status() != psutil.STATUS_ZOMBIE:
                found.append(process)
    return found


def test_a_process_is_awaited_and_ends_with_its_block(tmp_path):
    with running(Process("sleeper", SLEEPER, tmp_path, is_ready)) as process:
        assert process.is_running
        assert process.log_path.read_text() == "ready\n"
    assert not process.is_running


@pytest.mark.kill
def test_what_a_killed_process_has_started_ends_too(tmp_path):
    command = ["bash", "-c", f"setsid sleep 601 & echo $! > {tmp_path}/child; echo ready; wait"]
    process = Process("parent", command, tmp_path, is_ready)
    process.start()
    child = int((tmp_path / "child").read_text())
    process.kill()
    assert not psutil.pid_exists(child)


@pytest.mark.kill
def test_a_process_does_not_outlive_a_killed_program(tmp_path):
    program = (
        "import os, signal, sys; from pathlib import Path; from services.processes import Process, running\n"
        f"sleeper = Process('sleeper', {SLEEPER!r}, Path({str(tmp_path)!r}), lambda log: 'ready' in log)\n"
        "with running(sleeper) as p:\n"
        "    print(p._process.pid, flush=True); os.kill(os.getpid(), signal.SIGKILL)\n"
    )
    done = subprocess.run([sys.executable, "-c", program], stdout=subprocess.PIPE, text=True, check=False)
    assert done.returncode == -signal.SIGKILL
    eventually(lambda: not psutil.pid_exists(int(done.stdout)))


def test_a_program_that_ends_while_starting_is_one_sentence(tmp_path):
    with pytest.raises(ServiceFailed, match=r"^broken ended while starting; see .*broken\.log$"):
        Process("broken", ["false"], tmp_path, is_ready).start()


def test_a_taken_port_is_one_sentence(tmp_path):
    port = free_port()
    with socket.create_server((HOST, port)):
        with (
            pytest.raises(ServiceFailed, match=f"^kafka can't start: port {port} is taken$"),
            running_broker(tmp_path / "kafka", port),
        ):
            pass
        with (
            pytest.raises(ServiceFailed, match=f"^postgres can't start: port {port} is taken$"),
            running_postgres(tmp_path / "postgres", port),
        ):
            pass
    assert not is_taken(port)


@pytest.mark.kill
@pytest.mark.kafka
def test_a_killed_broker_comes_back_with_its_records(broker, topic):
    broker.produce(topic, [Record(b"one", key=b"1", headers=(("h", b"x"),), timestamp=1_000)])
    broker.kill()
    assert not broker.is_running
    broker.start()
    broker.produce(topic, [Record(None, key=b"1", timestamp=2_000)])
    found = [(m.offset(), m.key(), m.value(), m.headers(), m.timestamp()[1]) for m in broker.records(topic)]
    assert found == [(0, b"1", b"one", [("h", b"x")], 1_000), (1, b"1", None, None, 2_000)]


@pytest.mark.kafka
def test_two_brokers_side_by_side_have_topics_of_their_own(broker, topic, tmp_path):
    with running_broker(tmp_path) as other:
        other.create_topic("theirs")
        assert other.bootstrap_servers != broker.bootstrap_servers
        assert other.topics() == {"theirs": 1}
        assert topic in broker.topics()
        assert "theirs" not in broker.topics()
        assert processes_of(tmp_path)
    assert not processes_of(tmp_path)


@pytest.mark.kafka
def test_topics_made_at_once_can_be_used_when_they_are_made(broker, topic):
    with ThreadPoolExecutor(4) as pool:
        made = list(pool.map(lambda n: broker.create_topic(f"{topic}_{n}", partitions=3), range(12)))
    assert [broker.ends(name, 3) for name in made] == [{0: 0, 1: 0, 2: 0}] * 12


@pytest.mark.kafka
def test_a_topic_that_is_there_or_a_wrong_setting_is_one_sentence(broker, topic):
    with pytest.raises(ServiceFailed, match=f"^topic '{topic}' was not created: .* already exists"):
        broker.create_topic(topic)
    with pytest.raises(ServiceFailed, match=r"^topic 'never' was not created: Unknown topic config name: x$"):
        broker.create_topic("never", config={"x": "y"})
    with pytest.raises(ServiceFailed, match=r"^there is no topic 'never'$"):
        broker.records("never")


@pytest.mark.kafka
def test_records_that_do_not_arrive_are_one_sentence(broker, topic):
    with pytest.raises(ServiceFailed, match=f"^1 of 1 records did not reach '{topic}': "):
        broker.produce(topic, [Record(b"x", partition=7)])


@pytest.mark.kill
@pytest.mark.postgres
def test_a_killed_server_comes_back_with_what_was_committed(postgres, database):
    database.execute("create table kept (id int)", "insert into kept values (1)")
    with database.connect(autocommit=False) as connection:
        connection.execute("insert into kept values (2)")
        postgres.kill()
        connection.close()
    postgres.start()
    with database.connect() as connection:
        assert connection.execute("select id from kept").fetchall() == [(1,)]
        assert connection.execute("show wal_level").fetchone() == ("logical",)


@pytest.mark.postgres
def test_two_servers_side_by_side_and_an_earlier_run_continued(postgres, tmp_path):
    with running_postgres(tmp_path) as other:
        assert (other.port, other.password) != (postgres.port, postgres.password)
        other.create_database("theirs").execute("create table kept as select 7 as id")
        assert processes_of((tmp_path / "data").resolve())
    assert not processes_of((tmp_path / "data").resolve())
    with (
        running_postgres(tmp_path) as again,
        dataclasses.replace(again, database="theirs").connect() as theirs,
    ):
        assert again.password == other.password
        assert theirs.execute("select id from kept").fetchall() == [(7,)]


@pytest.mark.postgres
def test_a_server_in_a_private_folder_changes_no_mode_and_leaves_nothing_behind(tmp_path):
    private = tmp_path / "private"
    private.mkdir(mode=0o700)
    folder = private / "postgres"
    folder.mkdir(mode=0o700)
    watched = [private, folder, *tmp_path.parents, *PROGRAMS.parents]
    before = [(path.stat().st_mode, path.stat().st_uid) for path in watched]
    with running_postgres(folder) as first:
        first.execute("create table kept as select 7 as id")
    with running_postgres(folder) as again, again.connect() as connection:
        assert connection.execute("select id from kept").fetchall() == [(7,)]
    assert [(path.stat().st_mode, path.stat().st_uid) for path in watched] == before
    data = (folder / "data").resolve()
    assert data.stat().st_mode & 0o777 == 0o700
    if os.geteuid() == 0:
        assert data.parent.parent == HOMES
    shutil.rmtree(private)
    (tmp_path / "next").mkdir(mode=0o700)
    with running_postgres(tmp_path / "next"):
        assert not data.exists()


@pytest.mark.postgres
def test_programs_that_the_server_may_not_enter_are_copied(tmp_path, monkeypatch):
    """As in a virtual environment below /root: a copy is used, and the original keeps its modes."""
    if os.geteuid() != 0:
        pytest.skip("only root's server runs as another user")
    may_enter = postgres_service._others_may_enter
    monkeypatch.setattr(
        postgres_service, "_others_may_enter", lambda path: "pginstall" not in path.parts and may_enter(path)
    )
    with running_postgres(tmp_path) as postgres, postgres.connect() as connection:
        (command,) = {process.exe() for process in processes_of((tmp_path / "data").resolve())}
        assert Path(command).is_relative_to(HOMES)
        assert connection.execute("select 1").fetchone() == (1,)


@pytest.mark.postgres
def test_a_wrong_password_is_one_sentence_without_it(broker, database, tmp_path):
    wrong = dataclasses.replace(database, password="geheim")
    with pytest.raises(
        ServiceFailed, match=r'^can\'t connect to .*password authentication failed for user "'
    ) as one:
        wrong.connect()
    with (
        pytest.raises(ServiceFailed, match=r"^connector 'wrong' can't start: password authentication") as two,
        running(Connector(tmp_path, broker, wrong, topic_prefix="wrong")),
    ):
        pass
    log = (tmp_path / "connect.log").read_text()
    assert "geheim" not in f"{one.value}{two.value}{wrong!r}{log}"
    assert database.password not in repr(database)


@pytest.mark.postgres
def test_the_password_file_is_for_its_owner_alone_and_libpq_reads_it(database, tmp_path):
    variables = database.environment(tmp_path / "pgpass")
    assert (tmp_path / "pgpass").stat().st_mode & 0o777 == 0o600
    assert database.password not in str(variables)
    program = "import psycopg; print(psycopg.connect('').execute('select current_database()').fetchone()[0])"
    done = subprocess.run(
        [sys.executable, "-c", program],
        env={**os.environ, **variables},
        stdout=subprocess.PIPE,
        text=True,
        check=True,
    )
    assert done.stdout.strip() == database.database


@pytest.mark.s3
def test_an_object_comes_back(object_store):
    bucket = object_store.create_bucket("services")
    object_store.client.put_object(Bucket=bucket, Key="a/b.json", Body=b"{}")
    assert object_store.client.get_object(Bucket=bucket, Key="a/b.json")["Body"].read() == b"{}"


@pytest.mark.kafka
@pytest.mark.postgres
def test_the_services_for_people_print_how_to_reach_them_and_leave_no_process(tmp_path):
    command = [sys.executable, "-m", "services", "--folder", str(tmp_path)]
    with subprocess.Popen(command, cwd=REPOSITORY, stdout=subprocess.PIPE, text=True) as process:
        try:
            lines = [process.stdout.readline().strip() for _ in range(11)]
        finally:
            process.terminate()
    names = [line.removeprefix("export ").partition("=")[0] for line in lines[:-1]]
    assert names == [
        "KAFKA_BOOTSTRAP_SERVERS", "PGHOST", "PGPORT", "PGUSER", "PGDATABASE", "PGPASSFILE",
        "CONNECT_URL", "AWS_ENDPOINT_URL", "AWS_REGION", "AWS_SHARED_CREDENTIALS_FILE",
    ]  # fmt: skip
    assert (tmp_path / "postgres" / "password").read_text() not in "".join(lines)
    assert not processes_of(tmp_path)
