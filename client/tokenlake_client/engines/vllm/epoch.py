"""The epoch of the weights: a weights digest in the keys of all prompts, for engines whose weights change in place.

The digest of an epoch depends on the event that began it::

    start          the digest of the layout
    reset          a digest with a random version: nothing is shared with earlier epochs or with other engines
    named version  a digest with the trainer's version: shared with all engines that started from the same weights and
                   have the same version. It is accepted only after a reset that emptied the engine's own cache and
                   before anything was computed; otherwise results of other weights could be stored under the version
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from tokenlake_client.weights import digest_of_version, random_version


class WeightsEpoch:
    """Makes the weights digest of each epoch of one engine. For the scheduler's thread."""

    def __init__(self, base: str | None) -> None:
        """`base`: the digest of the weights that the engine started with; None: not known, and nothing is shared."""
        self._base = base
        self._clean = False
        """True: the engine's own cache is empty, and nothing was computed since it was emptied."""

    def reset(self, *, empty: bool) -> str:
        """Begin an epoch with a random version, because the weights may have changed. Returns the digest for the keys.
        `empty`: the engine's own cache is empty."""
        self._clean = empty
        return digest_of_version(self._base or "", random_version())

    def named(self, version: str) -> str | None:
        """The weights digest for weights that have this version; None where the version cannot be accepted."""
        return digest_of_version(self._base, version) if self._clean and self._base is not None else None

    def computes(self) -> None:
        """Record that the engine computes a step: `named` accepts no version until the next reset."""
        self._clean = False


def set_weight_version(engine: Any, original: Callable[..., Any], weight_version: str) -> Any:
    """Report the version that a trainer sets (`finish_weight_update(weight_version)`, `update_weight_version`) to the
    connectors of vLLM's engine (`patches.VERSION`): vLLM keeps it in the scheduler's process and has no hook for it."""
    result = original(weight_version)
    connector = getattr(getattr(engine, "scheduler", None), "connector", None)
    # The connector may be vLLM's MultiConnector, which keeps the connectors within it in the list `_connectors`.
    for one in (connector, *getattr(connector, "_connectors", ())):
        if hasattr(one, "new_weights"):
            one.new_weights(weight_version)
    return result


def version_refused(version: str) -> str:
    """The log line for a version that `WeightsEpoch.named` does not accept."""
    return (
        f"nothing is shared under the weights' version {version!r}: it was not set directly after a reset of the "
        "caches (pause with clear_cache, or reset_prefix_cache with reset_connector)"
    )
