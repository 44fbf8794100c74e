"""Checks before a measurement that its picture can be drawn afterwards."""

from __future__ import annotations

from importlib.util import find_spec
from pathlib import Path

from tokenlake.errors import ConfigurationError


def check_plot(path: Path | None) -> None:
    """Check that `path` is a .png file and that matplotlib is installed; raises ConfigurationError if not. With None
    nothing is checked."""
    if path is None:
        return
    if path.suffix != ".png":
        raise ConfigurationError("plot", str(path), "a file name ending in .png")
    if find_spec("matplotlib") is None:
        raise ConfigurationError("plot", str(path), "matplotlib: pip install tokenlake-bench")
