"""Set up the project on a fresh machine: virtual environment, pins, jars, Java, activate script.

It needs only the system's Python 3.11 or 3.12 and its standard library. A step is skipped if its result already exists
for the current pins, so a second run does nothing and an interrupted run resumes.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import re
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
VENV = ROOT / ".venv"
PYTHON = VENV / "bin" / "python"
JAVA_PACKAGE = "openjdk-17-jre-headless"
MARK = "# lakehouse-patterns: below this line written by tools/setup.py"


class SetupFailed(Exception):
    """A requirement is missing; the message is one sentence for the user."""


def main() -> int:
    """Run every step in order; return the exit code."""
    steps: list[tuple[str, Callable[[], str]]] = [
        ("python", check_python),
        ("java", ensure_java),
        ("virtual environment", make_environment),
        ("python packages", install_packages),
        ("jars", fetch_jars),
        ("jars of the services", fetch_service_jars),
        ("activate script", write_activation),
    ]
    for number, (name, step) in enumerate(steps, start=1):
        print(f"[{number}/{len(steps)}] {name}: ", end="", flush=True)
        try:
            print(step(), flush=True)
        except SetupFailed as failure:
            print(f"failed\n{failure}", file=sys.stderr)
            return 1
        except subprocess.CalledProcessError as failure:
            print(f"failed: `{' '.join(map(str, failure.cmd))}` exited {failure.returncode}", file=sys.stderr)
            return 1
    return 0


def check_python() -> str:
    """Refuse a Python that the pins do not install on."""
    version = ".".join(map(str, sys.version_info[:3]))
    if not (3, 11) <= sys.version_info[:2] <= (3, 12):
        raise SetupFailed(
            f"Python 3.11 or 3.12 is needed, this is {version}; run `make PYTHON=python3.11 …`."
        )
    return version


def java_version() -> int | None:
    """Return the major version of the Java that Spark would start, or None."""
    home = os.environ.get("JAVA_HOME")
    java = str(Path(home) / "bin" / "java") if home else shutil.which("java")
    if not java or not Path(java).exists():
        return None
    answer = subprocess.run([java, "-version"], capture_output=True, text=True, check=False)
    found = re.search(r'version "(\d+)', answer.stderr + answer.stdout)
    return int(found.group(1)) if found else None


def ensure_java() -> str:
    """Check for Java 17 or newer; install it if that is possible without a question, else say what to do."""
    version = java_version()
    if version is None and shutil.which("apt-get") and os.geteuid() == 0:
        print(f"installing {JAVA_PACKAGE} … ", end="", flush=True)
        for command in (["apt-get", "update", "-qq"], ["apt-get", "install", "-y", "-qq", JAVA_PACKAGE]):
            subprocess.run(command, check=True, stdout=subprocess.DEVNULL)
        version = java_version()
    if version is None or version < 17:
        found = f"found Java {version}" if version else "found no Java"
        raise SetupFailed(
            f"Spark needs Java 17 or newer ({found}): install it, on Debian or Ubuntu with "
            f"`sudo apt-get install {JAVA_PACKAGE}`, or point JAVA_HOME to it, then run this again."
        )
    return f"version {version}"


def make_environment() -> str:
    """Create .venv; an unusable .venv (from an interrupted creation) is recreated."""
    probe = [str(PYTHON), "-m", "pip", "--version"]
    if PYTHON.exists() and subprocess.run(probe, capture_output=True, check=False).returncode == 0:
        return "there"
    subprocess.run([sys.executable, "-m", "venv", "--clear", str(VENV)], check=True)
    return f"created {VENV.name}/"


def install_packages() -> str:
    """Install the pins of requirements.txt and the project itself, editable."""
    stamp = _Stamp("packages", ROOT / "requirements.txt", ROOT / "pyproject.toml")
    if stamp.is_current():
        return "there"
    print("installing, about a minute … ", end="", flush=True)
    pip = [str(PYTHON), "-m", "pip", "install", "--quiet", "--disable-pip-version-check"]
    subprocess.run([*pip, "--requirement", str(ROOT / "requirements.txt")], check=True)
    # The compatible mode puts the whole checkout on the path: the case study and the services are run from here.
    compatible = ["--config-settings", "editable_mode=compat"]
    subprocess.run([*pip, "--no-deps", *compatible, "--editable", str(ROOT)], check=True)
    stamp.write()
    return "installed"


def fetch_jars() -> str:
    """Fetch the jars of conf/jars.txt into Spark's own jars/, without their dependencies.

    Every Spark process finds them there: dbt's session, spark-submit, Thrift Server sessions and executors.
    `spark.jars.packages` would be resolved at each start, and the Thrift Server wouldn't find the jars.
    """
    jars = _spark_jars()
    missing = [c for (c,) in _lines("jars.txt") if not (jars / _jar_name(c)).exists()]
    if not missing:
        return "there"
    with _retrieved(missing, transitive=False) as fetched:
        for jar in fetched.glob("*.jar"):
            shutil.move(jar, jars / jar.name)
    return f"fetched {len(missing)}"


def fetch_service_jars() -> str:
    """Fetch the jars of conf/service_jars.txt with their dependencies, into one folder for each service.

    A folder is published in one move when all its jars are fetched, so if its first jar is missing, all are.
    """
    services: dict[str, list[str]] = {}
    for folder, coordinate in _lines("service_jars.txt"):
        services.setdefault(folder, []).append(coordinate)
    made = []
    for name, coordinates in services.items():
        folder = VENV / "services" / name
        if all((folder / _jar_name(coordinate)).exists() for coordinate in coordinates):
            continue
        print(f"{name} … ", end="", flush=True)
        with _retrieved(coordinates, transitive=True) as fetched:
            shutil.rmtree(folder, ignore_errors=True)
            folder.parent.mkdir(parents=True, exist_ok=True)
            shutil.move(fetched, folder)
        made.append(name)
    return f"fetched {', '.join(made)}" if made else "there"


def _lines(name: str) -> list[list[str]]:
    """Return the words of each line of a file in conf/."""
    lines = (ROOT / "conf" / name).read_text(encoding="utf-8").splitlines()
    return [line.split() for line in lines if line.strip() and not line.startswith("#")]


def _jar_name(coordinate: str) -> str:
    _, artifact, version = coordinate.split(":")
    return f"{artifact}-{version}.jar"


def _spark_jars() -> Path:
    return next((VENV / "lib").glob("python3*/site-packages/pyspark/jars"))


@contextlib.contextmanager
def _retrieved(coordinates: list[str], *, transitive: bool) -> Iterator[Path]:
    """Fetch jars with pyspark's Ivy into a temporary folder that exists until the block ends.

    A partly fetched jar is therefore never on a class path. Downloaded files stay in Ivy's cache, so an interrupted
    run continues.
    """
    java = str(Path(os.environ["JAVA_HOME"]) / "bin" / "java") if os.environ.get("JAVA_HOME") else "java"
    ivy = next(_spark_jars().glob("ivy-*.jar"))
    with tempfile.TemporaryDirectory(dir=VENV, ignore_cleanup_errors=True) as scratch:
        description = Path(scratch) / "ivy.xml"
        description.write_text(_ivy_description(coordinates, transitive), encoding="utf-8")
        fetched = Path(scratch) / "fetched"
        pattern = f"{fetched}/[artifact]-[revision](-[classifier]).[ext]"
        command = [java, "-jar", str(ivy), "-ivy", str(description), "-cache", str(VENV / "ivy-cache")]
        subprocess.run(
            [*command, "-confs", "default", "-types", "jar", "bundle", "-retrieve", pattern],
            check=True,
            stdout=subprocess.DEVNULL,
        )
        yield fetched


def _ivy_description(coordinates: list[str], transitive: bool) -> str:
    scope = 'conf="default->default"' if transitive else 'transitive="false" conf="default->master"'
    dependencies = "\n".join(
        '    <dependency org="{}" name="{}" rev="{}" {}/>'.format(*coordinate.split(":"), scope)
        for coordinate in coordinates
    )
    return (
        '<ivy-module version="2.0">\n  <info organisation="lakehouse" module="jars"/>\n'
        '  <configurations><conf name="default"/></configurations>\n'
        f"  <dependencies>\n{dependencies}\n  </dependencies>\n</ivy-module>\n"
    )


def write_activation() -> str:
    """Append the project's environment to .venv/bin/activate, so that the documented commands work unchanged.

    dbt finds profiles.yml in the repository root by itself; DBT_PROFILES_DIR would hide the profiles of other projects.
    """
    activate = VENV / "bin" / "activate"
    text = activate.read_text(encoding="utf-8")
    block = f"""{MARK}
export LAKEHOUSE_ROOT="${{LAKEHOUSE_ROOT:-{ROOT}/lakehouse}}"
export DBT_SEND_ANONYMOUS_USAGE_STATS=false
export SPARK_CONF_DIR="{ROOT}/conf"
export PYSPARK_PYTHON="{PYTHON}"
export PYSPARK_DRIVER_PYTHON="{PYTHON}"
export SPARK_LOCAL_IP="${{SPARK_LOCAL_IP:-127.0.0.1}}"
export TZ=UTC
"""
    wanted = text.split(MARK)[0] + block
    if text == wanted:
        return "there"
    activate.write_text(wanted, encoding="utf-8")
    return f"written; `source {VENV.name}/bin/activate` makes dbt, spark-submit and pytest work from here"


class _Stamp:
    """Remembers that a step was done for the current content of its inputs."""

    def __init__(self, name: str, *inputs: Path) -> None:
        self.path = VENV / f".{name}.stamp"
        self.digest = hashlib.sha256(b"".join(i.read_bytes() for i in inputs)).hexdigest()

    def is_current(self) -> bool:
        return self.path.exists() and self.path.read_text() == self.digest

    def write(self) -> None:
        self.path.write_text(self.digest)


if __name__ == "__main__":
    sys.exit(main())
