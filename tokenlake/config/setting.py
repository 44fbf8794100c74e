"""The declaration of a setting, and the functions that follow from declarations.

A table of settings is a frozen `msgspec.Struct`. Each field is `Annotated`: its type says which values it takes
(`kinds.py`), and a `Setting` its meaning and the reason of its default. The flag, the variable, the TOML key, the
check, the line of `tokenlake config show` and the row of the reference page are made from both::

    class ServerConfig(msgspec.Struct, frozen=True, kw_only=True):
        lease_s: Annotated[Seconds, Setting("meaning", why="reason")] = 10.0
"""

from __future__ import annotations

import dataclasses
import difflib
import functools
import inspect
import re
import typing
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

import msgspec

from tokenlake.config.kinds import Form, Kind
from tokenlake.config.values import MASK
from tokenlake.errors import ConfigurationError

DEFAULT = "default"
"""The origin that is shown for a setting that no source gives."""
Given = tuple[str, object, str]
"""(name, raw value, origin) of a setting in one source."""

NOTHING: Mapping[str, str] = MappingProxyType({})
_PASSWORD = re.compile(r"(://).*@")
"""User and password in a URL."""
_SECRETIVE = ("tenant", "secret", "token", "credential")
LEAST_LIKENESS = 0.7
"""Least ratio of `difflib` from which on an unknown name is taken for a misspelt one: `memroy` has 0.83 with `memory`,
`eviction` 0.63 with `location`."""


class PlainRefusal(ConfigurationError):
    """A `ConfigurationError` with a text of its own, for what "setting 'X' is 'Y'; expected Z" would not describe: a
    setting that is missing, or a name that is no setting. Its `value` is masked and its `expected` is `cure`."""

    def __init__(self, field: str, problem: str, cure: str) -> None:
        super().__init__(field, MASK, cure)
        self.args = (f"{problem}: {cure}",)
        self.problem = problem
        self.cure = cure


_UNKNOWN = Kind(object, "", Form())


@dataclass(frozen=True, slots=True)
class Setting:
    """`meaning` and `why` are phrases without a final dot, for the reference; `meaning` is also the text of
    `--help`."""

    meaning: str
    why: str
    """The reason for the default value, a phrase for the reference page."""
    default: str = ""
    """Description of a default that is computed; empty: the reference shows the default of the field."""
    secret: bool = False
    """The value is never shown, and there is no flag, because other users of a machine can read a command line."""
    kind: Kind = _UNKNOWN
    """What the annotation says of the values; `settings_of` fills it in."""


@functools.cache
def settings_of(table: type[msgspec.Struct]) -> Mapping[str, Setting]:
    """The settings that `table` declares, its own before those of its bases. TypeError for a field without a
    declaration or a default."""
    hints = typing.get_type_hints(table, include_extras=True)
    fields = {field.name: field for field in msgspec.structs.fields(table)}
    own_first = {name: None for each in table.__mro__ for name in inspect.get_annotations(each)}
    found = {}
    for name in own_first:
        declared = [each for each in getattr(hints[name], "__metadata__", ()) if isinstance(each, Setting)]
        if len(declared) != 1 or fields[name].required:
            raise TypeError(f"{table.__name__}.{name} needs a default and one Setting")
        found[name] = dataclasses.replace(declared[0], kind=Kind.of(hints[name]))
    return found


def read(
    table: type[msgspec.Struct],
    given: Iterable[Given],
    elsewhere: Mapping[str, str] = NOTHING,
    listing: str = "",
) -> tuple[dict[str, Any], dict[str, str]]:
    """Check the settings of all sources, the weakest source first. A later value replaces an earlier one, which is
    checked too. Returns the values of the settings that were given, and the origin of every setting.

    `elsewhere`: by the name of a setting that is not of this table, a phrase that says where it belongs. `listing`: the
    place where the settings of a long table are listed; empty: the error for an unknown setting lists them.

    Raises ConfigurationError for the first setting that is unknown or invalid.
    """
    settings = settings_of(table)
    values: dict[str, Any] = {}
    origin = dict.fromkeys(settings, DEFAULT)
    for name, raw, source in given:
        if name not in settings:
            # The value is not shown: it may be a secret with a misspelt name.
            what = "table" if _is_table(raw) else "setting"
            shown = f"[{name}]" if what == "table" else repr(name)
            near = difflib.get_close_matches(name, settings, n=1, cutoff=LEAST_LIKENESS)
            if name in elsewhere:
                cure = elsewhere[name]
            elif near:
                cure = f"did you mean {near[0]!r}?"
            else:
                cure = listing or f"expected one of {', '.join(settings)}"
            raise PlainRefusal(name, f"unknown {what} {shown} (set by {source})", cure)
        try:
            values[name] = settings[name].kind.parse(raw)
        except ValueError as error:
            raise refusal(table, name, raw, str(error), source) from None
        origin[name] = source
    return values, origin


def describe(config: msgspec.Struct, origin: Mapping[str, str]) -> Iterator[tuple[str, str, str]]:
    """(name, value, origin) of each setting in the order of its table; secrets are masked."""
    for name, setting in settings_of(type(config)).items():
        yield name, setting.kind.show(getattr(config, name)), origin[name]


def refusal(table: type[msgspec.Struct], name: str, value: object, expected: str, source: str) -> ConfigurationError:
    """Returns the error that refuses the value of one setting. A value that may be a secret is masked."""
    setting = settings_of(table).get(name)
    # Tables are masked because those of tenants hold secrets; unknown names, because one may be a misspelt secret.
    if _is_table(value) or (setting is not None and setting.secret) or any(word in name for word in _SECRETIVE):
        value = MASK
    elif isinstance(value, str):
        value = _PASSWORD.sub(rf"\1{MASK}@", value)
    return ConfigurationError(name, value, f"{expected} (set by {source})")


def _is_table(value: object) -> bool:
    """True for a table of TOML, and for an array with a table in it."""
    return isinstance(value, dict) or (isinstance(value, list) and any(isinstance(each, dict) for each in value))


def table_of(table: type[msgspec.Struct]) -> str:
    """Returns the settings of `table` as a table in Markdown, for the reference page."""
    plain = table()
    rows = ["| setting | default | values | meaning | why this default |", "|---|---|---|---|---|"]
    for name, setting in settings_of(table).items():
        shown = setting.kind.show(getattr(plain, name))
        default = setting.default or (f"`{shown}`" if shown else "empty")
        rows.append(f"| `{name}` | {default} | {setting.kind.expected} | {setting.meaning} | {setting.why} |")
    return "\n".join(rows) + "\n"
