"""YAML files that a parameter names: schemas, contracts, policies, conditions."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import yaml

from python_jobs.shared.core.failures import WrongUse


def read_yaml(path: str, what: str) -> Any:
    """Return the content of a YAML (or JSON) file; ``what`` names the file in messages, such as ``contract``.

    Raises:
        WrongUse: the file is missing or is no YAML.
    """
    file = Path(path)
    if not file.is_file():
        raise WrongUse(f"the {what} '{path}' doesn't exist")
    try:
        return yaml.safe_load(file.read_bytes())
    except yaml.YAMLError:
        raise WrongUse(f"the {what} '{path}' is no YAML") from None
