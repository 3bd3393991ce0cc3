"""Runs one writer over a folder in a process of its own: what the torture kills.

python -m tests.torture.process WRITER FOLDER
"""

import sys
from pathlib import Path

from tests.support.session import start_session
from tests.torture.writers import WRITERS

if __name__ == "__main__":
    folder = Path(sys.argv[2])
    WRITERS[sys.argv[1]].run(start_session(folder / "session"), folder)
