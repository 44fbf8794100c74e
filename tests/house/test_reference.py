"""The reference names everything that a user can set, call, count or catch."""

import pytest

from tests.house.pages import PARTS, ROOT, Part, renewed
from tokenlake import errors
from tokenlake.command import SUMMARIES
from tokenlake.config import ServerConfig
from tokenlake.config.setting import settings_of
from tokenlake.wire import Code
from tokenlake_client import Deadlines, MatchOptions

REFERENCE = (ROOT / "docs" / "reference.md").read_text()
FLAGS = [name for name, setting in settings_of(ServerConfig).items() if not setting.secret]


@pytest.mark.parametrize("part", PARTS, ids=lambda part: part.name)
def test_generated_parts_are_up_to_date(part: Part) -> None:
    """If this fails, run `python -m tests.house.pages`."""
    page = (ROOT / part.page).read_text()
    assert renewed(part, page) == page


@pytest.mark.parametrize("code", [code.name for code in Code])
def test_every_code(code: str) -> None:
    assert f"\n| `{code}` |" in REFERENCE


@pytest.mark.parametrize("field", [*MatchOptions.__struct_fields__, *Deadlines.__struct_fields__])
def test_every_field_of_the_client_options(field: str) -> None:
    assert f"\n| `{field}` |" in REFERENCE


@pytest.mark.parametrize("error", list(errors.__all__))
def test_every_error(error: str) -> None:
    assert f"`{error}`" in REFERENCE


@pytest.mark.parametrize("command", list(SUMMARIES))
def test_every_command(command: str) -> None:
    assert f"`tokenlake {command}" in REFERENCE


def test_every_setting_but_the_secrets_and_tables_has_a_flag() -> None:
    serve = pytest.importorskip("tokenlake_server.cli").serve
    assert set(ServerConfig.__struct_fields__) - set(FLAGS) == {
        "tenants",
        "kv_events",
        "cluster_secret",
        "disk_keys",
        "etcd_password",
    }
    given = {parameter.name: parameter for parameter in serve.params}
    assert list(given) == ["file", *FLAGS]
    assert all(parameter.help for parameter in given.values())
    assert all(f"--{field.replace('_', '-')}" in given[field].opts for field in given if field != "file")
