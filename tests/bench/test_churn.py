"""`bench churn`: its figures, and a short run with real daemons and etcd."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
from rich.console import Console

from tokenlake.errors import ConfigurationError
from tokenlake.identity import SegmentKey
from tokenlake_bench import churn
from tokenlake_bench.churn import ChurnArguments, findable, run_churn
from tokenlake_bench.live_client import Served
from tokenlake_bench.load import Answer, Asked
from tokenlake_testing.etcd import etcd_version


def request(number: int, found: int, *, fixed: bool = True, match_ms: float = 1.0) -> Answer:
    served = Served([SegmentKey(bytes(32))] * 8, hits=found, match_s=match_ms / 1e3)
    return Answer(0.0, Asked(np.zeros(1, np.uint32), not fixed, fixed, number), served)


def arguments(**changed: object) -> ChurnArguments:
    values: dict[str, object] = {
        "nodes": 3,
        "changes": ("join",),
        "rounds": 1,
        "rate": 20.0,
        "change_s": 3.0,
        "seed": 3,
    }
    return ChurnArguments(**{**values, **changed})  # type: ignore[arg-type]


def test_findable_counts_what_was_found_before() -> None:
    before = [request(1, 8), request(2, 4), request(3, 0)]
    assert findable(before, [request(1, 8), request(2, 8), request(3, 8), request(4, 0)]) == 1.0
    assert findable(before, [request(1, 2), request(2, 4)]) == 0.5
    assert findable(before, [request(1, 0, fixed=False)]) == 1.0
    assert findable([], []) == 1.0


@pytest.mark.parametrize(
    ("field", "value"), [("nodes", 2), ("nodes", 17), ("rounds", 0), ("rate", 0.0), ("change_s", 0.0)]
)
def test_arguments_out_of_range(field: str, value: float) -> None:
    with pytest.raises(ConfigurationError, match=field.replace("_", "-")):
        arguments(**{field: value})


@pytest.mark.rest
@pytest.mark.live
@pytest.mark.timeout(300)
@pytest.mark.skipif(etcd_version() is None, reason="etcd is not installed: make install-tools")
def test_a_short_run(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    for name in ("BEFORE_S", "AFTER_S"):
        monkeypatch.setattr(churn, name, 3.0)
    written = {"json_file": tmp_path / "churn.json"}
    results = run_churn(arguments(changes=("join", "drain"), **written), Console(quiet=True))
    assert [each.change for each in results] == ["join", "drain"]
    assert [entry["change"] for entry in json.loads(written["json_file"].read_text())] == ["join", "drain"]
    for each in results:
        assert each.wrong_bytes == 0
        assert each.evicted == 0
        assert each.token_hit_rate_after > 0
        assert each.findable_during > 0.9
        assert each.findable_after > 0.9
