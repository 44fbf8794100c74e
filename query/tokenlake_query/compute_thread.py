"""The thread that computes attention of many requests and engines over cached segments, a batch per layer.

::

    A attends to  s0 s1 s2 s3            s0 s1  queries of A and B together
    B attends to  s0 s1 t2        ->     s2 s3  queries of A                  then merged per task
                                         t2     queries of B

A batch is every task of one tenant that was submitted while the tenant's batch before it was computed. Tasks that
attend to the same segment are computed together, so that the segment is read once for all of them.

A batch is computed in slices. Before each slice the thread chooses the tenant that has used the least computing time,
so that a tenant's huge query delays a query of another tenant by one slice::

    red   [0 .. 5 ms]          [.. 10 ms][.. 15 ms]
    blue             [0..1 ms]
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from tokenlake.attention import AttentionShape, Partial, Stored, empty_partial, merge
from tokenlake.errors import LimitReached
from tokenlake.layout import DTYPE_BYTES, Layout
from tokenlake_query.kernels import Kernel, kernel_for
from tokenlake_query.segments import Segments

log = logging.getLogger(__name__)

MAX_HEADS = 1024
"""Maximum query heads of a view."""
MAX_ROW = 1 << 19
"""Maximum elements of the queries, or of the outputs, of one query token: 1,024 heads of 512."""
MAX_PRODUCTS = 1 << 30
"""Maximum multiplications per query token and segment. This is the least work of a slice; an absorbed MLA of 128 heads
over segments of 4,096 tokens has half of it."""
MAX_KERNELS = 16
"""Maximum number of kernels that are kept for later batches; the least recently used one is dropped. Bounded because
each kernel has threads and a scratch buffer, and engines may ask for any number of heads and any scale."""
SLICE_S = 0.005
"""Seconds that a slice should take while several tenants have queries. A shorter slice of many queries would spend more
of its time on reading the segments and on merging results."""
ALONE_SLICE_S = 0.050
"""Seconds that a slice should take while one tenant alone has had queries for `ALONE_S`."""
ALONE_S = 10.0
LEAST_ROWS, MOST_ROWS = 32, 512
"""Limits of a slice that does not have all query tokens: at least `LEAST_ROWS` rows per KV head (a row is one query
token and one query head that reads the KV head) and at most `MOST_ROWS` query tokens. With fewer, reading the segments
takes longer; with more, fewer segments fit, and the time to merge the results of slices counts."""
SLICE_BYTES = 16 << 20
"""Limit of the float32 outputs of one slice; a slice has at least one query token."""
MAX_JOINED, MAX_JOINED_BYTES = 4096, 64 << 20
"""Maximum query tokens, and float32 outputs, of a batch of several tasks: their queries are copied in one step, during
which no other tenant is served, and more of them read a segment no faster."""
MAX_WAITING = 1 << 15
"""Maximum number of tasks of one tenant that wait for a batch."""
SWEPT = 256
"""Number of waiting tasks of a tenant below which tasks that are not wanted any more stay in the queue."""
GROUPED = 4096
"""Number of segments, counted once per task, that are grouped in one slice."""
READING_ROWS = 8
"""The time to read a segment from memory, as a number of query tokens: attention of this
many tokens to the segment is estimated to take as long as reading it."""
FIRST_RATE = 1e10
"""Multiplications per second that are assumed of a kernel before its first slice is measured."""
MEASURED_NS = 1_000_000
"""Slices that take less than this time do not raise the estimate: the fixed costs of a call are a large part of
them."""


class Attention(NamedTuple):
    """Layout of the segments and shape of the attention that a task computes. Tasks of one layer whose `Attention` is
    equal are computed together."""

    layout: Layout
    shape: AttentionShape

    @classmethod
    def of(cls, layout: Layout, heads: int, scale: float) -> Attention:
        """Attention with `heads` query heads over segments of `layout`. Raises LayoutRefused for heads that do not fit
        the layout, and LimitReached for more work or memory per query token than this process accepts."""
        shape = AttentionShape.of(layout, heads, scale)
        if heads > MAX_HEADS:
            raise LimitReached(f"attention with {heads} heads; at most {MAX_HEADS}")
        if (row := heads * max(shape.key_dim, shape.value_dim)) > MAX_ROW:
            raise LimitReached(f"attention with {row} elements per query token; at most {MAX_ROW}")
        products = heads * layout.segment_tokens * (shape.key_dim + shape.value_dim)
        if products > MAX_PRODUCTS:
            raise LimitReached(
                f"attention with {products} multiplications per query token and segment; at most {MAX_PRODUCTS}"
            )
        return cls(layout, shape)

    def step_bytes(self, tokens: int) -> int:
        """Bytes of the queries of `tokens` query tokens, or of their float32 outputs, whichever are more; the limit is
        `wire.query.MAX_STEP_BYTES`."""
        shape = self.shape
        widest = max(shape.key_dim * DTYPE_BYTES[self.layout.dtype], shape.value_dim * 4)
        return tokens * shape.q_heads * widest


@dataclass(frozen=True, slots=True, eq=False)
class Task:
    """A piece of work for the computing thread: attention of some queries of one layer over some segments."""

    attention: Attention
    layer: int
    segments: Segments
    queries: Stored
    """The queries of the task, `[tokens, heads, key dim]` in the layout's dtype; borrowed until `done` is called."""
    wanted: Callable[[], bool]
    """Function that the computing thread calls before it computes the task; where it returns False, the task is
    skipped."""
    done: Callable[[Partial | None], None]
    """Function that the computing thread calls once with the task's attention: `out` `[tokens, heads, value dim]` and
    `lse` `[tokens, heads]`; with None when the task failed or was not wanted any more."""
    spent: Callable[[int], None] = lambda ns: None
    """Function that the computing thread calls before `done` for a task that was computed, with its share of the
    nanoseconds that its batch took."""


class _Cost:
    """The time that a kernel takes, estimated from earlier slices."""

    def __init__(self, attention: Attention) -> None:
        shape = attention.shape
        self._ns = (
            shape.q_heads * attention.layout.segment_tokens * (shape.key_dim + shape.value_dim) / FIRST_RATE * 1e9
        )
        """Nanoseconds per query token and segment."""
        self._least_rows = max(1, LEAST_ROWS // shape.group)
        self._most_rows = max(1, SLICE_BYTES // _output_bytes(shape))

    def measured(self, rows: int, segments: int, ns: int) -> None:
        """Record that `rows` query tokens over `segments` segments took `ns` nanoseconds."""
        measured = max(1e-3, ns / ((rows + READING_ROWS) * segments))
        if ns >= MEASURED_NS or measured < self._ns:
            self._ns = (self._ns + measured) / 2

    def slice_of(self, rows: int, segments: int, seconds: float) -> tuple[int, int]:
        """The numbers of query tokens and segments, of `rows` and `segments`, that take about `seconds` together; at
        least one segment and `LEAST_ROWS` rows."""
        products = seconds * 1e9 / self._ns
        rows = min(rows, self._most_rows)
        if (rows + READING_ROWS) * segments <= products:
            return rows, segments
        fewer = min(rows, max(self._least_rows, min(MOST_ROWS, int(products / READING_ROWS))))
        return fewer, max(1, min(segments, int(products / (fewer + READING_ROWS))))


class ComputeThread:
    """The thread that computes attention, in batches of tasks. `submit` is thread-safe."""

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._waiting: dict[str, list[Task]] = {}
        """Tasks of the next batch, by tenant."""
        self._wanted: dict[str, int] = {}
        """By tenant, the number of waiting tasks after those that are not wanted any more were last removed."""
        self._submitted: dict[str, float] = {}
        """The time at which each tenant last submitted tasks, in monotonic seconds."""
        self._batches: dict[str, Iterator[None]] = {}
        """By tenant, the batch that is being computed: each step of the iterator computes one slice. For the computing
        thread alone, as all attributes below."""
        self._slice_began: float | None = None
        """The monotonic time at which the present slice began; written by the computing thread, read by others."""
        self._used: dict[str, int] = {}
        """By tenant, the nanoseconds of computing time that it has used; a tenant that was idle begins with `_least`,
        so that idle time is not saved up."""
        self._least = 0
        """The least use of the tenants that had tasks when the last slice was given. It never falls: a tenant that
        returns would otherwise get all the time that others used meanwhile."""
        self._kernels: dict[Attention, tuple[Kernel, _Cost]] = {}
        """Kernels that were made for earlier batches, in order of use, the most recently used last."""

    def start(self) -> None:
        """Start the thread."""
        threading.Thread(target=self._run, name="compute", daemon=True).start()

    def submit(self, tasks: Sequence[Task], tenant: str) -> None:
        """Queue tasks of `tenant` for its next batch. Where more than `MAX_WAITING` would wait, the tasks fail at once:
        their `done` is called with None in this thread."""
        with self._changed:
            waiting = self._waiting.get(tenant, [])
            accepted = len(waiting) + len(tasks) <= MAX_WAITING
            if accepted and tasks:
                waiting.extend(tasks)
                self._waiting[tenant] = waiting
                self._submitted[tenant] = time.monotonic()
                self._changed.notify()
        if not accepted:
            for task in tasks:
                task.done(None)

    def slice_lasts(self) -> float:
        """Seconds for which the slice that is being computed has lasted; 0 while none is."""
        began = self._slice_began
        return 0.0 if began is None else time.monotonic() - began

    def _run(self) -> None:
        while True:
            self._compute_slice()

    def _compute_slice(self) -> None:
        """Wait for tasks and compute one slice. This is a function of its own so that its local variables are gone when
        the thread waits again: a reference to a task keeps the segments of the task leased."""
        tenant = self._next_tenant()
        self._drop_unwanted()
        batch = self._batches.pop(tenant, None) or self._take_batch(tenant)
        began = time.perf_counter_ns()
        self._slice_began = time.monotonic()
        try:
            next(batch)
            self._batches[tenant] = batch
        except StopIteration:
            pass
        except Exception:
            # A batch that fails must not end this thread, which computes for other tenants too.
            log.exception("a batch failed")
        finally:
            self._slice_began = None
        self._used[tenant] += time.perf_counter_ns() - began

    def _next_tenant(self) -> str:
        """Wait for tasks, and return the tenant of the next slice."""
        with self._changed:
            self._changed.wait_for(lambda: self._waiting or self._batches)
            active = dict.fromkeys([*self._batches, *self._waiting])
        least = self._least
        # The use of an idle tenant is forgotten once it is not more than that with which it would begin.
        idle = {tenant: used for tenant, used in self._used.items() if used > least}
        self._used = idle | {tenant: max(least, self._used.get(tenant, 0)) for tenant in active}
        self._least = min(self._used[tenant] for tenant in active)
        return min(active, key=self._used.__getitem__)

    def _drop_unwanted(self) -> None:
        """Remove waiting tasks that are not wanted any more, of each tenant whose waiting tasks have doubled since the
        last time. A tenant whose queries are cancelled as fast as it sends them thus has few tasks in memory."""
        dropped: list[Task] = []
        with self._changed:
            for tenant, waiting in self._waiting.items():
                if len(waiting) > max(SWEPT, 2 * self._wanted.get(tenant, 0)):
                    wanted: list[Task] = []
                    for task in waiting:
                        (wanted if task.wanted() else dropped).append(task)
                    waiting[:] = wanted
                    self._wanted[tenant] = len(wanted)
        _deliver(dropped, {})

    def _take_batch(self, tenant: str) -> Iterator[None]:
        with self._changed:
            self._wanted.pop(tenant, None)
            return self._compute_all(self._waiting.pop(tenant))

    def _compute_all(self, tasks: Sequence[Task]) -> Iterator[None]:
        alike: dict[tuple[Attention, int], list[Task]] = {}
        for task in tasks:
            alike.setdefault((task.attention, task.layer), []).append(task)
        for number, batch in enumerate(each for some in alike.values() for each in _batches(some)):
            if number:
                yield
            yield from self._compute(batch)

    def _compute(self, batch: Sequence[Task]) -> Iterator[None]:
        """Compute tasks of one layer and `Attention`, in slices, and deliver their results."""
        partials: dict[Task, Partial | None] = {}
        try:
            wanted = [task for task in batch if task.wanted()]
            if wanted:
                results = yield from self._attend_together(wanted)
                partials = dict(zip(wanted, results, strict=True))
        except Exception:
            log.exception("attention over layer %d failed", batch[0].layer)
            if len(batch) > 1:
                # One task may be the cause: each of the others gets its result.
                for task in batch:
                    yield
                    yield from self._compute([task])
                return
        _deliver(batch, partials)

    def _attend_together(self, batch: Sequence[Task]) -> Generator[None, None, list[Partial | None]]:
        """The result of each task of `batch`, in order; None for tasks that are not wanted any more. All tasks have the
        same layer and the same `Attention`."""
        results: list[Partial | None] = [None for _ in batch]
        lacking: set[int] = set()
        spent = 0
        groups = yield from _shared_segments(batch)
        for number, (members, segments) in enumerate(groups):
            if number:
                yield
            tasks = [batch[member] for member in members]
            partial, ns = yield from self._attend(tasks, segments)
            spent += ns
            if partial is None:
                lacking.update(members)
                continue
            ends = np.cumsum([len(task.queries) for task in tasks])[:-1]
            outs, lses = np.split(partial.out, ends), np.split(partial.lse, ends)
            for member, out, lse in zip(members, outs, lses, strict=True):
                # Merged at once, so that a task has one result in memory, however many groups its segments are in.
                before, new = results[member], Partial(out, lse)
                results[member] = new if before is None else merge([before, new])
        _share(spent, batch)
        return [
            None if number in lacking else _over_nothing(task) if result is None else result
            for number, (task, result) in enumerate(zip(batch, results, strict=True))
        ]

    def _attend(self, tasks: Sequence[Task], segments: Segments) -> Generator[None, None, tuple[Partial | None, int]]:
        """Attention of the queries of all `tasks`, joined, over all `segments`, and the nanoseconds that it took. None
        once no task is wanted any more."""
        kernel, cost = self._kernel(tasks[0].attention)
        queries = [task.queries for task in tasks]
        joined = queries[0] if len(queries) == 1 else np.concatenate(queries)
        whole: Partial | None = None
        row = ns = 0
        while row < len(joined):
            rows, _ = cost.slice_of(len(joined) - row, len(segments), self._slice_s)
            part: Partial | None = None
            first = 0
            while first < len(segments):
                if row or first:
                    yield
                    if not any(task.wanted() for task in tasks):
                        return None, ns
                _, count = cost.slice_of(rows, len(segments) - first, self._slice_s)
                began = time.perf_counter_ns()
                new = kernel.attend(joined[row : row + rows], segments.slots[first : first + count], tasks[0].layer)
                part = new if part is None else merge([part, new])
                took = time.perf_counter_ns() - began
                cost.measured(rows, count, took)
                ns += took
                first += count
            if rows == len(joined):
                return part, ns
            assert part is not None
            if whole is None:
                shape = tasks[0].attention.shape
                whole = Partial(
                    np.empty((len(joined), shape.q_heads, shape.value_dim), np.float32),
                    np.empty((len(joined), shape.q_heads), np.float32),
                )
            whole.out[row : row + rows], whole.lse[row : row + rows] = part
            row += rows
        return whole, ns

    @property
    def _slice_s(self) -> float:
        """Seconds that a slice should take now."""
        since = time.monotonic() - ALONE_S
        with self._changed:
            self._submitted = {tenant: at for tenant, at in self._submitted.items() if at > since}
            return SLICE_S if len(self._submitted) > 1 else ALONE_SLICE_S

    def _kernel(self, attention: Attention) -> tuple[Kernel, _Cost]:
        kernel = self._kernels.pop(attention, None)
        if kernel is None:
            kernel = kernel_for(attention.layout, attention.shape), _Cost(attention)
            if len(self._kernels) >= MAX_KERNELS:
                del self._kernels[next(iter(self._kernels))]
        self._kernels[attention] = kernel
        return kernel


def _batches(tasks: Sequence[Task]) -> Iterator[list[Task]]:
    """Split tasks of one `Attention` into batches of at most `MAX_JOINED` query tokens and `MAX_JOINED_BYTES`; a task
    of more is a batch of its own."""
    most = min(MAX_JOINED, MAX_JOINED_BYTES // _output_bytes(tasks[0].attention.shape))
    batch: list[Task] = []
    tokens = 0
    for task in tasks:
        if batch and tokens + len(task.queries) > most:
            yield batch
            batch, tokens = [], 0
        batch.append(task)
        tokens += len(task.queries)
    yield batch


def _share(ns: int, batch: Sequence[Task]) -> None:
    """Divide the `ns` nanoseconds that a batch took among its tasks, in proportion to the number of their queries times
    that of their segments."""
    products = [len(task.queries) * len(task.segments) for task in batch]
    whole = max(1, sum(products))
    for task, product in zip(batch, products, strict=True):
        task.spent(ns * product // whole)


def _deliver(tasks: Sequence[Task], partials: Mapping[Task, Partial | None]) -> None:
    """Call `done` of each task with its result; None where it has none."""
    for task in tasks:
        try:
            task.done(partials.get(task))
        except Exception:
            log.exception("a result of layer %d could not be delivered", task.layer)


def _output_bytes(shape: AttentionShape) -> int:
    """Bytes of the float32 output of one query token."""
    return 4 * shape.q_heads * shape.value_dim


def _over_nothing(task: Task) -> Partial:
    shape = task.attention.shape
    return empty_partial(len(task.queries), shape.q_heads, shape.value_dim)


def _shared_segments(batch: Sequence[Task]) -> Generator[None, None, list[tuple[tuple[int, ...], Segments]]]:
    """The segments of all tasks of `batch`, each segment once, grouped by the tasks that attend to it (indices into
    `batch`). Yields after `GROUPED` segments, so that other tenants are served meanwhile."""
    if len(batch) == 1:
        return [((0,), batch[0].segments)] if batch[0].segments else []
    readers: dict[int, list[int]] = {}
    slots = {}
    grouped = 0
    for number, task in enumerate(batch):
        if grouped > GROUPED:
            yield
            grouped = 0
        grouped += len(task.segments)
        for address, slot in zip(task.segments.addresses, task.segments.slots, strict=True):
            readers.setdefault(address, []).append(number)
            slots[address] = slot
    groups: dict[tuple[int, ...], list[int]] = {}
    for address, members in readers.items():
        groups.setdefault(tuple(members), []).append(address)
    return [(members, Segments([slots[address] for address in group])) for members, group in groups.items()]
