"""`bench restart`: its figures, and a short run with real daemons."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from rich.console import Console

from tokenlake.errors import ConfigurationError
from tokenlake_bench import restart
from tokenlake_bench.restart import RestartArguments, run_restart


def arguments(**changed: object) -> RestartArguments:
    values: dict[str, object] = {"nodes": 2, "requests": 10, "seed": 3}
    return RestartArguments(**{**values, **changed})  # type: ignore[arg-type]


@pytest.mark.parametrize(("field", "value"), [("nodes", 0), ("nodes", 17), ("requests", 0)])
def test_arguments_out_of_range(field: str, value: int) -> None:
    with pytest.raises(ConfigurationError, match=field):
        arguments(**{field: value})


@pytest.mark.rest
@pytest.mark.live
@pytest.mark.timeout(300)
def test_what_was_synced_is_found_after_each_restart(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(restart, "WARM", 30)
    written = {"json_file": tmp_path / "restart.json"}
    result = run_restart(arguments(**written), Console(quiet=True))
    assert [(each.signal, len(each.nodes)) for each in result.restarts] == [
        ("SIGTERM", 1),
        ("SIGTERM", 1),
        ("SIGKILL", 1),
        ("SIGKILL", 1),
        ("SIGTERM", 2),
        ("SIGKILL", 2),
    ]
    for each in result.restarts:
        assert each.wrong_bytes == 0
        assert each.synced_segments > 0
        assert each.recovered_share >= 0.99
        assert each.first_hit_s is not None
        assert each.down_s + each.first_hit_s < each.ready_s
        assert 0 < each.hit_rate_before <= each.ideal_before
        assert 0 < each.hit_rate_after <= each.ideal_after
    read = json.loads(written["json_file"].read_bytes())
    assert [each["synced_segments"] for each in read["restarts"]] == [each.synced_segments for each in result.restarts]
