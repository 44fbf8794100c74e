"""Which weights the cache is computed with from now on, where they change in place. Imports no engine.

An epoch is a weights digest in the keys of all prompts that are hashed in it::

    start          the layout's own digest
    reset          a random version: nothing is shared, neither with what was stored before nor with other engines
    named          the trainer's version: shared with engines that started from the same weights and say the same
                   version. Taken only right after a reset that emptied the engine's own cache, before anything was
                   computed; else what other weights computed could be stored under the version's name
"""

from __future__ import annotations

import secrets

from tokenlake_client.weights import digest_of_version

__all__ = ["WeightsEpoch"]

RANDOM_BYTES = 16


class WeightsEpoch:
    """Of one engine. For the scheduler's thread."""

    def __init__(self, base: str) -> None:
        """`base`: the layout's digest, of the weights that the engine started with."""
        self._base = base
        self._clean = False
        """The engine's own cache is empty, and nothing was computed since it was emptied."""

    def reset(self, *, empty: bool) -> str:
        """The weights may be others from now on; the digest for the keys. `empty`: the engine's own cache is."""
        self._clean = empty
        # Not a counter: two engines, or one before and after a restart, must not come to the same.
        return digest_of_version(self._base, f"random {secrets.token_hex(RANDOM_BYTES)}")

    def named(self, version: str) -> str | None:
        """The digest for the keys, now that the weights have this version; None where the name cannot be used."""
        return digest_of_version(self._base, version) if self._clean else None

    def computes(self) -> None:
        """The engine computes."""
        self._clean = False
