"""Errors of a daemon's start that name the cure."""

from __future__ import annotations

import asyncio
import sys
from typing import Any

import pytest

from tokenlake.config import ServerConfig, load_config
from tokenlake.errors import ConfigurationError
from tokenlake_server.membership import opening


def settings(**flags: object) -> ServerConfig:
    return load_config(toml_text="", environ={}, flags={"node": "a", "memory": "1MiB", **flags}, uid=0).config


async def test_a_module_that_is_not_installed(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in [each for each in sys.modules if each.startswith("tokenlake_server.membership.etcd")]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, "grpc", None)
    thread: Any = None
    with pytest.raises(ConfigurationError) as caught:
        opening.open_membership(settings(etcd="127.0.0.1:1"), 1, asyncio.get_running_loop(), thread)
    assert str(caught.value) == "setting 'etcd' needs the module 'grpc': pip install 'tokenlake[etcd]'"
