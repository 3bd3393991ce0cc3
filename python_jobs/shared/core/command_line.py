"""The command line of jobs and programs: typed parameters, ``--config``, ``--report``, exit codes.

A frozen dataclass of parameters becomes the flags; the report is the last line of standard output.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, NoReturn, TypeVar

from jsonargparse import ActionConfigFile, ArgumentParser, Namespace, set_parsing_settings

from python_jobs.shared.core.failures import (
    JobFailed,
)
from python_jobs.shared.core.json_text import json_text

Parameters = TypeVar("Parameters")
Report = Mapping[str, Any]

set_parsing_settings(docstring_parse_attribute_docstrings=True)


def parse_parameters(
    parameters_class: type[Parameters], argv: Sequence[str] | None
) -> tuple[Parameters, str | None]:
    """Read the command line into ``parameters_class``; return it with the path of ``--report``, if given."""
    parser = ArgumentParser(prog=Path(sys.argv[0]).name, description=parameters_class.__doc__)
    parser.add_argument("--config", action=ActionConfigFile, help="YAML file with the parameters below.")
    parser.add_argument("--report", type=str | None, help="Also write the JSON report to this file.")
    parser.add_class_arguments(parameters_class, as_group=False)
    _name_keyword_options(parser)
    namespace = parser.parse_args(argv)
    report_path = namespace.pop("report")
    namespace.pop("config")
    return _construct(parser, parameters_class, namespace), report_path


def _name_keyword_options(parser: ArgumentParser) -> None:
    """Show a field such as ``from_``, whose plain name is a Python keyword, as ``--from``."""
    for action in parser._actions:
        if action.dest.endswith("_"):
            plain = action.dest.removesuffix("_")
            action.option_strings, action.metavar = [f"--{plain}"], plain.upper()
            parser._option_string_actions[f"--{plain}"] = parser._option_string_actions.pop(
                f"--{action.dest}"
            )


def _construct(
    parser: ArgumentParser, parameters_class: type[Parameters], namespace: Namespace
) -> Parameters:
    instantiated = parser.instantiate_classes(namespace)
    return parameters_class(**instantiated.as_dict())


def run_program(
    parameters_class: type[Parameters],
    run: Callable[[Parameters], Report],
    argv: Sequence[str] | None = None,
) -> NoReturn:
    """Run a program without Spark under the contract of jobs: command line, report, exit code."""
    end(*program_outcome(parameters_class, run, argv))


def end(exit_code: int, report: str | None) -> NoReturn:
    """Print the report and end the process."""
    if report is not None:
        print(report)
    sys.exit(exit_code)


def program_outcome(
    parameters_class: type[Parameters],
    run: Callable[[Parameters], Report],
    argv: Sequence[str] | None = None,
) -> tuple[int, str | None]:
    """Run a program; return its exit code and its report as one line of JSON, None if it failed.

    The sentence of a known failure is printed on standard error; any other failure is raised.
    """
    try:
        parameters, report_path = parse_parameters(parameters_class, argv)
        report = run(parameters)
    except JobFailed as failure:
        print(f"{type(failure).__name__}: {failure}", file=sys.stderr)
        return failure.exit_code, None
    line = json_text(report, default=str, ensure_ascii=False)
    if report_path:
        Path(report_path).write_text(line + "\n", encoding="utf-8")
    return 0, line
