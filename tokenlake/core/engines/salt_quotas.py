"""Quotas of salts: the segments of one account (the requests with one salt) keep at most a share of their tenant's
memory at this node, so that one user of a tenant does not evict what all others have.

::

    a write is committed --> its account has more than its quota
        --> the segment of the account that was used longest ago, or the last one that continues it, leaves
            again, until the account is within its quota, or all that is left is in use

The account is part of the hints of a request (`Hints.account`). A prompt that is longer than the quota keeps its
beginning. Copies that were fetched from other nodes count too; they leave when the account writes. Segments without an
account, and those on disk, have no quota.
"""

from __future__ import annotations

import itertools
from collections import Counter, OrderedDict
from collections.abc import Iterable

from tokenlake.core.context import Context, Part
from tokenlake.identity import TenantId
from tokenlake.memory import Segment, State
from tokenlake.memory.removals import SALT_RULE
from tokenlake.metrics import Metric

TRIMMED = Metric(
    "tokenlake_evicted_salt_segments_total", "Segments evicted because their salt had more than its quota", "tenant"
)
MAX_TRIMMED = 256
"""Maximum number of segments that one write evicts for a quota."""
MAX_EXAMINED = 64
"""Maximum number of segments in use that are passed for one that is not."""
MAX_DESCENT = 1024
"""Maximum number of segments from one to the end of its prompt."""

Account = tuple[TenantId, str]


def salt_limit(context: Context, tenant: TenantId) -> int:
    """Returns the bytes that an account of the tenant may have at this node; 0 for no limit."""
    share = context.config.salt_quotas.get(tenant, 0.0)
    return int(share * context.store.regions.quota(tenant))


class SaltQuotas(Part):
    """The segments of this node by account, for the tenants that have quotas of salts."""

    def __init__(self, context: Context) -> None:
        self._context = context
        self._accounts: dict[Segment, Account] = {}
        self._used: dict[Account, OrderedDict[Segment, None]] = {}
        """The segments of each account, the one used longest ago first."""
        self._bytes: Counter[Account] = Counter()

    def arrived(self, segment: Segment) -> None:
        """A segment became READY in memory."""
        if segment.tenant not in self._context.config.salt_quotas or not segment.hints.account:
            return
        account = self._accounts[segment] = segment.tenant, segment.hints.account
        self._used.setdefault(account, OrderedDict())[segment] = None
        self._bytes[account] += segment.slot_bytes

    def left(self, segments: Iterable[Segment]) -> None:
        """Segments left the index."""
        for segment in segments:
            account = self._accounts.pop(segment, None)
            if account is None:
                continue
            self._bytes[account] -= segment.slot_bytes
            del self._used[account][segment]
            if not self._used[account]:
                del self._used[account], self._bytes[account]

    def read(self, segments: Iterable[Segment]) -> None:
        """Segments of one prompt were used."""
        if self._accounts:
            for segment in reversed(list(segments)):
                account = self._accounts.get(segment)
                if account is not None:
                    self._used[account].move_to_end(segment)

    def trim(self, written: Iterable[Segment]) -> None:
        """Evict segments of the accounts of these segments, which were just written, down to their quotas."""
        for account in dict.fromkeys(self._accounts[each] for each in written if each in self._accounts):
            limit = salt_limit(self._context, account[0])
            for _ in range(MAX_TRIMMED):
                victim = self._victim(account) if self._bytes[account] > limit else None
                if victim is None:
                    break
                self._context.store.evict(victim, self._context.now, SALT_RULE)
                self._context.counters.add_for(TRIMMED, 1, account[0])
                self.left([victim])

    def _victim(self, account: Account) -> Segment | None:
        """Returns the last segment of the prompt whose first segments were used longest ago; None if those that were
        examined are in use."""
        for segment in itertools.islice(self._used[account], MAX_EXAMINED):
            last = self._last(segment)
            if not last.pins:
                return last
        return None

    def _last(self, segment: Segment) -> Segment:
        """Returns the last segment of the same account in memory that continues `segment`, or `segment`."""
        pool = self._context.store.pool(*segment.pool)
        assert pool is not None
        for _ in range(MAX_DESCENT):
            children = pool.children.get(segment.key, {})
            child = next((each for each in children if self._same(each, segment)), None)
            if child is None:
                break
            segment = child
        return segment

    def _same(self, child: Segment, segment: Segment) -> bool:
        return self._accounts.get(child) == self._accounts.get(segment)

    # -- checks

    def census(self) -> dict[str, int]:
        return {"segments with quotas": len(self._accounts)}

    def check_integrity(self) -> None:
        """Raises AssertionError when the maps differ."""
        assert sum(map(len, self._used.values())) == len(self._accounts)
        assert all(segment in self._used[account] for segment, account in self._accounts.items())
        assert all(self._used.values())
        assert self._bytes == Counter(
            {account: sum(segment.slot_bytes for segment in each) for account, each in self._used.items()}
        )
        assert all(segment.state is State.READY for segment in self._accounts)
