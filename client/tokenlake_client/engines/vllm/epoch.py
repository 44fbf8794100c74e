"""The epoch of the weights: a weights digest in the keys of all prompts, for engines whose weights change in place.

The digest of an epoch depends on the event that began it::

    start          the digest of the layout
    reset          a digest with a random version: nothing is shared with earlier epochs or with other engines
    named version  a digest with the trainer's version: shared with all engines that started from the same weights and
                   have the same version. It is accepted only after a reset that emptied the engine's own cache and
                   before anything was computed; otherwise results of other weights could be stored under the version

vLLM is imported where it is used.
"""

from __future__ import annotations

import functools
import secrets
from collections.abc import Callable
from typing import Any

from tokenlake_client.weights import digest_of_version

RANDOM_BYTES = 16
_WRAPPED = "_tokenlake_reports_versions"


class WeightsEpoch:
    """Makes the weights digest of each epoch of one engine. For the scheduler's thread."""

    def __init__(self, base: str) -> None:
        """`base`: the digest of the weights that the engine started with."""
        self._base = base
        self._clean = False
        """True: the engine's own cache is empty, and nothing was computed since it was emptied."""

    def reset(self, *, empty: bool) -> str:
        """Begin an epoch with a random version, because the weights may have changed. Returns the digest for the keys.
        `empty`: the engine's own cache is empty."""
        self._clean = empty
        # The version of the weights is random, because the values of a counter would repeat in another engine or after
        # a restart.
        return digest_of_version(self._base, f"random {secrets.token_hex(RANDOM_BYTES)}")

    def named(self, version: str) -> str | None:
        """The weights digest for weights that have this version; None where the version cannot be accepted."""
        return digest_of_version(self._base, version) if self._clean else None

    def computes(self) -> None:
        """Record that the engine computes a step: `named` accepts no version until the next reset."""
        self._clean = False


def on_weight_version(report: Callable[[Any, str], None]) -> None:
    """From now on, when the weight version of an engine is set, call `report(connector, version)` for each connector of
    the engine. A second call of this function does nothing.

    vLLM keeps the version that a trainer sets (`finish_weight_update(weight_version)`, `update_weight_version`) in the
    scheduler's process and has no hook for it, so the method that sets it is wrapped. In a version of vLLM without that
    method nothing is reported, and each change of the weights begins a random epoch.
    """
    try:
        from vllm.v1.engine.core import EngineCore
    except ImportError:
        return
    original = getattr(EngineCore, "set_weight_version", None)
    if original is None or getattr(original, _WRAPPED, False):
        return

    @functools.wraps(original)
    def set_weight_version(self: Any, weight_version: str) -> Any:
        result = original(self, weight_version)
        connector = getattr(getattr(self, "scheduler", None), "connector", None)
        # The connector may be vLLM's MultiConnector, which keeps the connectors within it in the list `_connectors`.
        for one in (connector, *getattr(connector, "_connectors", ())):
            report(one, weight_version)
        return result

    setattr(set_weight_version, _WRAPPED, True)
    EngineCore.set_weight_version = set_weight_version


def set_version(connector: Any, version: str) -> None:
    """Report the weights' version to a connector, if it is one of ours. For `on_weight_version`."""
    if hasattr(connector, "new_weights"):
        connector.new_weights(version)


def version_refused(version: str) -> str:
    """The log line for a version that `WeightsEpoch.named` does not accept."""
    return (
        f"nothing is shared under the weights' version {version!r}: it was not set directly after a reset of the "
        "caches (pause with clear_cache, or reset_prefix_cache with reset_connector)"
    )
