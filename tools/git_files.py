"""The files of a repository, as git lists them."""

import subprocess
from pathlib import Path


def git_files(repository: Path) -> list[str]:
    """Return the paths, below the repository, of the files that git has or would add; some may be deleted since."""
    listed = subprocess.run(
        ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"],
        cwd=repository,
        check=True,
        capture_output=True,
        text=True,
    )
    return [name for name in listed.stdout.split("\0") if name]
