"""A flash crowd: a workload in which from one moment on a share of the requests begins with a new common prefix."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterator
from typing import Final

import numpy as np

from tokenlake.errors import ConfigurationError
from tokenlake_bench.mixing import WORD, key_of
from tokenlake_bench.workload import Request, Workload, stream_tokens

FLASH_SEGMENTS: Final = 12
FLASH_SHARE: Final = 0.3
_VOCABULARY: Final = 32_000


class FlashCrowd:
    """The requests of `workload`, of which from time `at_s` on the share `FLASH_SHARE`, drawn by `seed`, begins with a
    new common prefix of `FLASH_SEGMENTS` segments of `segment_tokens` tokens."""

    def __init__(self, workload: Workload, at_s: float, segment_tokens: int, seed: int) -> None:
        if not 0 <= at_s < math.inf:
            raise ConfigurationError("flash_at", at_s, "seconds of trace time, at least 0")
        self.at_s = at_s
        self._workload = workload
        self._seed = seed & WORD
        stream = np.array([key_of(self._seed, FLASH_SEGMENTS)], dtype=np.uint64)
        self._prefix = stream_tokens(stream, FLASH_SEGMENTS * segment_tokens, _VOCABULARY)[0]

    @property
    def name(self) -> str:
        return f"{self._workload.name}, flash crowd at {self.at_s:g} s"

    def __len__(self) -> int:
        return len(self._workload)

    def __iter__(self) -> Iterator[Request]:
        return map(self.__getitem__, range(len(self)))

    def __getitem__(self, index: int) -> Request:
        request = self._workload[index]
        if request.at_s >= self.at_s and self._joins(request):
            return dataclasses.replace(request, tokens=np.concatenate([self._prefix, request.tokens]))
        return request

    def _joins(self, request: Request) -> bool:
        return key_of(self._seed, request.index) < FLASH_SHARE * WORD
