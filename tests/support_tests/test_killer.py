"""The killer hits a real Delta writer at each of the three states, and says so when it can't."""

import pickle
import sys
from pathlib import Path

import pytest

from tests.support.killer import ProcessEndedError, StateNotReachedError, TableFiles, TableState, run_and_kill

APPEND_ROWS = [sys.executable, str(Path(__file__).with_name("append_rows.py"))]


@pytest.mark.kill
def test_a_delta_append_is_killed_at_each_state(tmp_path: Path) -> None:
    table = tmp_path / "numbers"
    argv = [*APPEND_ROWS, str(table)]

    assert run_and_kill(argv, table, TableState.DATA_WITHOUT_LOG) is TableState.DATA_WITHOUT_LOG
    orphans = TableFiles.of(table)
    assert len(orphans.data) == 1
    assert not orphans.log

    assert run_and_kill(argv, table, TableState.LOG_WRITTEN) is TableState.LOG_WRITTEN
    written = TableFiles.of(table)
    assert len(written.data) == 2
    assert written.log == {"00000000000000000000.json"}

    assert run_and_kill(argv, table, TableState.NO_NEW_FILE) is TableState.NO_NEW_FILE
    assert TableFiles.of(table) == written


def test_a_process_that_ends_too_early_is_an_error_with_its_output(tmp_path: Path) -> None:
    with pytest.raises(
        ProcessEndedError, match=r"(?s)exit code 1 before .*'log entry written'.*no such job"
    ) as ended:
        run_and_kill(["sh", "-c", "echo no such job; exit 1"], tmp_path / "t", TableState.LOG_WRITTEN)
    from_another_process = pickle.loads(pickle.dumps(ended.value))
    assert (str(from_another_process), from_another_process.exit_code) == (str(ended.value), 1)


def test_a_process_that_never_writes_is_killed_with_its_children(tmp_path: Path) -> None:
    pid_file = tmp_path / "pid"
    with pytest.raises(StateNotReachedError, match=r"0\.5 s were over"):
        run_and_kill(
            ["sh", "-c", f"sleep 100 & echo $! > {pid_file}; wait"],
            tmp_path / "t",
            TableState.DATA_WITHOUT_LOG,
            timeout=0.5,
        )
    status = Path(f"/proc/{pid_file.read_text().strip()}/status")
    assert not status.exists() or "State:\tZ" in status.read_text()


def test_a_write_that_went_past_the_state_is_reported_as_it_was_found(tmp_path: Path) -> None:
    log = tmp_path / "t" / "_delta_log"
    write_both = (
        f"mkdir -p {log} && touch {log}/{0:020}.json && echo x > {tmp_path}/t/part-0.parquet; sleep 9"
    )
    found = run_and_kill(["sh", "-c", write_both], tmp_path / "t", TableState.DATA_WITHOUT_LOG)
    assert found is TableState.LOG_WRITTEN


def test_checksums_checkpoints_and_empty_files_are_no_data(tmp_path: Path) -> None:
    for name in (
        ".part-0.parquet.crc",
        "_delta_log/_last_checkpoint",
        "_temporary/x",
        "date=2026-01-01/part-1.parquet",
    ):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text("x")
    (tmp_path / "part-2.parquet").touch()
    assert TableFiles.of(tmp_path).data == {str(tmp_path / "date=2026-01-01/part-1.parquet")}
