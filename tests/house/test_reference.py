"""The reference names everything that a user can set, call, count or catch."""

from pathlib import Path

import pytest

import tokenlake.core  # noqa: F401  declares metrics
import tokenlake_server.watchdog  # noqa: F401  declares one more
from tokenlake import errors
from tokenlake.command import SUMMARIES
from tokenlake.config import load_config
from tokenlake.metrics import Metric
from tokenlake.wire import Code

REFERENCE = (Path(__file__).parents[2] / "docs" / "reference.md").read_text()
SETTINGS = [field for field, _, _ in load_config(toml_text=None, environ={}, flags={}, uid=1000).describe()]
SECRETS = ("tenants", "cluster_secret")


@pytest.mark.parametrize("field", SETTINGS)
def test_every_setting(field: str) -> None:
    assert f"\n| `{field}` |" in REFERENCE


@pytest.mark.parametrize("code", [code.name for code in Code])
def test_every_code(code: str) -> None:
    assert f"\n| `{code}` |" in REFERENCE


@pytest.mark.parametrize("error", list(errors.__all__))
def test_every_error(error: str) -> None:
    assert f"`{error}`" in REFERENCE


@pytest.mark.parametrize("command", list(SUMMARIES))
def test_every_command(command: str) -> None:
    assert f"`tokenlake {command}" in REFERENCE


def test_every_metric_with_its_meaning() -> None:
    rows = [f"| `{metric.name}` | {metric.help} |" for metric in Metric.all()]
    assert [row for row in rows if row not in REFERENCE] == []


def test_every_setting_but_the_secrets_has_a_flag() -> None:
    serve = pytest.importorskip("tokenlake_server.cli").serve
    given = {parameter.name: parameter for parameter in serve.params}
    assert list(given) == ["file", *(field for field in SETTINGS if field not in SECRETS)]
    assert all(parameter.help for parameter in given.values())
    assert all(f"--{field.replace('_', '-')}" in given[field].opts for field in given if field != "file")


def test_every_failpoint_with_its_meaning() -> None:
    edges = pytest.importorskip("tokenlake_server.failpoints").EDGES
    assert [edge.name for edge in edges if f"\n| `{edge.name}` | {edge.meaning} |" not in REFERENCE] == []
