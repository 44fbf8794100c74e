"""vLLM's own offloading to host memory, where vLLM is built for CPUs.

vLLM 0.32 refuses its `CPUOffloadingSpec` on a CPU, because its transfers are operations of a GPU. `HostOffloadingSpec`
has the same manager, which decides what is kept, found and evicted, and copies the pages with torch.
"""

from __future__ import annotations

from typing import Any

import torch
from vllm.v1.kv_offload.base import CanonicalKVCaches, OffloadingWorker, TransferResult
from vllm.v1.kv_offload.cpu.spec import CPUOffloadingSpec


class HostOffloadingSpec(CPUOffloadingSpec):  # type: ignore[misc]
    """For chunks of one block, vLLM's default."""

    def get_worker(self, kv_caches: CanonicalKVCaches) -> OffloadingWorker:
        """vLLM's hook on a rank."""
        assert self.blocks_per_chunk == 1
        return HostOffloadingWorker(kv_caches, self.num_chunks)


class HostOffloadingWorker(OffloadingWorker):  # type: ignore[misc]
    """Copies the pages of each job at once."""

    def __init__(self, kv_caches: CanonicalKVCaches, chunks: int) -> None:
        self._pages = [tensor.tensor.flatten(1) for tensor in kv_caches.tensors]
        self._kept = [torch.zeros((chunks, pages.shape[1]), dtype=pages.dtype) for pages in self._pages]
        self._groups = [[ref.tensor_idx for ref in refs] for refs in kv_caches.group_data_refs]
        self._finished: list[TransferResult] = []

    def submit_store(self, job_id: int, src_spec: Any, dst_spec: Any) -> bool:
        """vLLM's hook."""
        return self._copy(job_id, src_spec, dst_spec.chunk_ids, into_blocks=False)

    def submit_load(self, job_id: int, src_spec: Any, dst_spec: Any) -> bool:
        """vLLM's hook."""
        return self._copy(job_id, dst_spec, src_spec.chunk_ids, into_blocks=True)

    def _copy(self, job: int, blocks: Any, chunks: Any, *, into_blocks: bool) -> bool:
        start = 0
        for tables, count in zip(self._groups, blocks.group_sizes, strict=True):
            own, kept = (torch.as_tensor(each[start : start + count]) for each in (blocks.block_ids, chunks))
            start += count
            for table in tables:
                pages, host = self._pages[table], self._kept[table]
                if into_blocks:
                    pages[own] = host[kept]
                else:
                    host[kept] = pages[own]
        self._finished.append(TransferResult(job, True, start, 0.0))
        return True

    def get_finished(self) -> list[TransferResult]:
        """vLLM's hook."""
        finished, self._finished = self._finished, []
        return finished

    def wait(self, job_ids: set[int]) -> None:
        """vLLM's hook: each job has ended when it was submitted."""
