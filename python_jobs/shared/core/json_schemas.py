"""JSON Schemas that a parameter names: which values fit them."""

from __future__ import annotations

import jsonschema_rs

from python_jobs.shared.core.failures import WrongUse
from python_jobs.shared.core.intervals import full_timestamp
from python_jobs.shared.core.yaml_files import read_yaml


def schema_validator(path: str) -> jsonschema_rs.Validator:
    """Return the validator of a JSON Schema (a file in JSON or YAML, without references to other files).

    ``format: date-time`` is a timestamp with date, hour and minute, in UTC unless it names an offset.

    Raises:
        WrongUse: the file is no JSON Schema.
    """
    schema = read_yaml(path, "JSON Schema")
    try:
        return jsonschema_rs.validator_for(
            schema,
            formats={"date-time": lambda text: full_timestamp(text) is not None},
            validate_formats=True,
            ignore_unknown_formats=False,
            offline=True,
        )
    except (jsonschema_rs.ValidationError, ValueError, TypeError) as failure:
        said = str(failure).splitlines()[0]
        raise WrongUse(f"'{path}' is no JSON Schema that can be used: {said}") from None
