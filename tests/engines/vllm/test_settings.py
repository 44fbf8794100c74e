"""An invalid setting ends the start of vLLM with an error that names it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("vllm", exc_type=ImportError)

from tests.engines.vllm.conftest import prompt
from tests.engines.vllm.forked import ForkedEngine
from tokenlake.errors import ConfigurationError, Unreachable
from tokenlake_client.engines.vllm import TokenLakeConnector


def test_settings_are_checked_before_the_model_is_loaded() -> None:
    """vLLM's front-end process calls this class method where CUDA graphs are in use."""
    assert not TokenLakeConnector.requires_piecewise_for_cudagraph({"socket": "/s"})
    with pytest.raises(ConfigurationError, match="did you mean 'socket'"):
        TokenLakeConnector.requires_piecewise_for_cudagraph({"sokcet": "/s"})


@pytest.mark.live
@pytest.mark.timeout(300)
@pytest.mark.parametrize(
    ("settings", "error"),
    [
        ({"sokcet": "/s"}, "unknown setting 'sokcet' .*did you mean 'socket'"),
        ({"segment_tokens": 100}, "setting 'segment_tokens' is 100; expected a multiple of vLLM's block size"),
    ],
)
def test_an_invalid_setting_ends_the_start(model: Path, tmp_path: Path, settings: dict[str, Any], error: str) -> None:
    engine = ForkedEngine(model, tmp_path / "log", settings)
    with pytest.raises(Unreachable, match=error):
        engine.generate([prompt(300, 1)])
    engine.close()
