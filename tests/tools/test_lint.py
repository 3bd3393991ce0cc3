"""`make lint` runs every check although one fails, shows what failed, and fails itself."""

import sys

import pytest

from tools import lint

GOOD = [sys.executable, "-c", "print('quiet')"]
BAD = [sys.executable, "-c", "print('a finding'); raise SystemExit(3)"]


@pytest.mark.parametrize(
    ("checks", "code", "names_failed"), [({"a": GOOD}, 0, None), ({"a": BAD, "b": GOOD, "c": BAD}, 1, "a, c")]
)
def test_all_checks_run_and_failures_count(
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    checks: dict[str, list[str]],
    code: int,
    names_failed: str | None,
) -> None:
    monkeypatch.setattr(lint, "CHECKS", checks)
    monkeypatch.setattr(sys, "argv", ["lint", "--without-spark"])
    assert lint.main() == code
    printed = capsys.readouterr().out
    assert [name for name in checks if f"\n{name} " in f"\n{printed}"] == list(checks)
    assert ("a finding" in printed) is (code == 1)
    assert ("FAILED, exit code 3" in printed) is (code == 1)
    assert (f"failed: {names_failed}" in printed) is (code == 1)
    assert "quiet" not in printed
