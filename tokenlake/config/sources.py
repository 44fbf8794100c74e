"""The sources of settings: a TOML file, the environment, flags. Each yields (name, raw value, origin) per setting.

This module does not read files or the environment of the process: both are passed in.
"""

from __future__ import annotations

import re
import tomllib
from collections.abc import Iterator, Mapping

from tokenlake.config.setting import Given, PlainRefusal

# Kubernetes sets variables in every container for each Service of the namespace. For a Service named `tokenlake`:
# TOKENLAKE_SERVICE_HOST, TOKENLAKE_SERVICE_PORT[_NAME], TOKENLAKE_PORT and TOKENLAKE_PORT_7440_TCP[_PROTO|_PORT|_ADDR].
_SERVICE_LINK = re.compile(
    r"[A-Z0-9_]+_(?:SERVICE_HOST|SERVICE_PORT(?:_[A-Z0-9_]+)?|PORT_[0-9]+_(?:TCP|UDP|SCTP)(?:_(?:PROTO|PORT|ADDR))?)"
)
_SERVICE_PORT = re.compile(r"(?:tcp|udp|sctp)://.*")


def is_service_link(variable: str, value: str) -> bool:
    """True for a variable that Kubernetes sets for a Service."""
    if variable.endswith("_PORT") and _SERVICE_PORT.fullmatch(value):
        return True
    return _SERVICE_LINK.fullmatch(variable) is not None


def of_toml(text: str, file: str) -> Iterator[Given]:
    """Settings of a TOML text. `file`: its name in errors and origins. Raises ConfigurationError for a text that is not
    TOML."""
    try:
        table = tomllib.loads(text)
    except tomllib.TOMLDecodeError as error:
        problem = f"the configuration file {file} is not valid TOML"
        raise PlainRefusal("configuration file", problem, _of_toml_error(str(error))) from None
    for name, raw in table.items():
        yield name, raw, f"{file}{_line(name, text)}"


def _of_toml_error(text: str) -> str:
    """The parser's message, with the usual cause of it."""
    if "Cannot overwrite" in text:
        return f"{text}: a setting is given twice"
    if "Invalid value" in text:
        return f'{text}: texts and sizes need quotes ("1GiB"); numbers, true and false have none'
    return text


def of_environment(environ: Mapping[str, str], prefix: str, others: tuple[str, ...] = ()) -> Iterator[Given]:
    """Settings of the variables that begin with `prefix` and not with one of `others`, without those of Kubernetes'
    Services."""
    for variable in sorted(environ):
        if (
            variable.startswith(prefix)
            and not variable.startswith(others)
            and not is_service_link(variable, environ[variable])
        ):
            yield variable.removeprefix(prefix).lower(), environ[variable], f"environment {variable}"


def of_flags(flags: Mapping[str, object]) -> Iterator[Given]:
    """Settings of the flags, by name; None for a flag that was not given."""
    for name, value in flags.items():
        if value is not None:
            yield name, value, f"flag --{name.replace('_', '-')}"


def _line(name: str, text: str) -> str:
    """Returns the text `, line N` for error messages: N is the line of the TOML text `text` on which the setting or
    table `name` begins. The line is found without a TOML parser; the result is empty where it is not found, for
    instance because the name is quoted."""
    pattern = re.compile(rf"\s*(?:\[\[?\s*)?{re.escape(name)}\s*[=.\]]")
    lines = [number for number, line in enumerate(text.split("\n"), 1) if pattern.match(line)]
    return f", line {lines[0]}" if lines else ""
