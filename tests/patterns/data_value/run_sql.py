"""Runs the SQL statement in a file on a session of its own: what a kill test ends in the middle.

python -m tests.patterns.data_value.run_sql FILE FOLDER_OF_THE_SESSION
"""

import sys
from pathlib import Path

from tests.support.session import start_session

if __name__ == "__main__":
    start_session(Path(sys.argv[2])).sql(Path(sys.argv[1]).read_text(encoding="utf-8"))
