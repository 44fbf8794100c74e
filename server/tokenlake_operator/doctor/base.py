"""A finding of the doctor."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from typing import Any, Literal, NamedTuple

import click

from tokenlake.errors import ConfigurationError, LimitReached
from tokenlake_operator.doctor.pages import page_of
from tokenlake_server.tables import print_rows

FOUND = 1
"""The exit status of a command where something was found."""
Severity = Literal["error", "warning"]


class Finding(NamedTuple):
    """One thing that is wrong. An error keeps a node or its engines from working; a warning costs speed or safety."""

    severity: Severity
    check: str
    """The name of the check, for scripts: it does not change."""
    where: str
    """The setting, file, node or pair of nodes."""
    problem: str
    cure: str

    @property
    def page(self) -> str:
        """The page of the documentation that has more on it."""
        return page_of(self.check)

    def plain(self) -> dict[str, Any]:
        """The finding as `--json` prints it."""
        return {**self._asdict(), "page": self.page}


def refusal(check: str, step: Callable[[], object]) -> Iterator[Finding]:
    """Yield a finding if `step`, which is a step of a daemon's start, refuses its settings or this machine."""
    try:
        step()
    except ConfigurationError as error:
        where = f"{error.field} = {error.value}"
        yield Finding("error", check, where, "the daemon does not start with it", f"give {error.expected}")
    except LimitReached as error:
        problem, _, cure = str(error).partition("; ")
        yield Finding("error", check, check.replace("-", "_"), problem, cure)


def print_findings(findings: Iterable[Finding]) -> None:
    """Print findings for people, and the pages that have more on them."""
    findings = list(findings)
    rows = [(each.severity, each.where, each.problem, each.cure) for each in findings]
    if rows:
        print_rows(("", "where", "problem", "cure"), rows)
        for page in dict.fromkeys(each.page for each in findings):
            click.echo(f"more: {page}")
    else:
        click.echo("no problem was found")
