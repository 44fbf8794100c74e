"""Threads that may block are shared by tenants."""

from __future__ import annotations

import threading
from functools import partial as bind

import pytest

from tests.robustness.live import wait_until
from tokenlake.errors import LimitReached
from tokenlake_query.pace import Pace
from tokenlake_query.tenant_threads import CALL_BYTES, MAX_WAITING_BYTES, TenantThreads


def test_calls_that_block_leave_threads_to_other_tenants() -> None:
    threads = TenantThreads(4, "test", Pace())
    release, done = threading.Event(), list[str]()
    for _ in range(100):
        threads.submit("red", lambda: release.wait(30), 1)
    for _ in range(3):
        threads.submit("blue", bind(done.append, "blue"), 1)
    wait_until(lambda: len(done) == 3, "the other tenant is served")
    release.set()
    threads.submit("red", bind(done.append, "red"), 1)
    wait_until(lambda: done[-1] == "red", "all calls end")


def test_tenants_take_turns() -> None:
    threads = TenantThreads(1, "test", Pace())
    release, done = threading.Event(), list[str]()
    threads.submit("red", lambda: release.wait(30), 1)
    for tenant in ["red"] * 3 + ["blue"] * 3:
        threads.submit(tenant, bind(done.append, tenant), 1)
    release.set()
    wait_until(lambda: len(done) == 6, "all calls end")
    assert done in (["red", "blue"] * 3, ["blue", "red"] * 3)


def test_waiting_calls_are_bounded_per_tenant() -> None:
    threads = TenantThreads(1, "test", Pace())
    release, done = threading.Event(), list[str]()
    threads.submit("red", lambda: release.wait(30), 1)
    for _ in range(4):
        threads.submit("red", bind(done.append, "red"), MAX_WAITING_BYTES // 4 - CALL_BYTES)
    with pytest.raises(LimitReached, match="of this tenant"):
        threads.submit("red", bind(done.append, "red"), MAX_WAITING_BYTES // 4 - CALL_BYTES)
    threads.submit("blue", bind(done.append, "blue"), MAX_WAITING_BYTES // 4 - CALL_BYTES)
    release.set()
    wait_until(lambda: len(done) == 5, "all others end")
    threads.submit("red", bind(done.append, "red"), MAX_WAITING_BYTES // 4 - CALL_BYTES)


def test_a_call_that_fails_ends_nothing() -> None:
    threads = TenantThreads(1, "test", Pace())
    done = list[str]()
    threads.submit("red", lambda: [][0], 1)
    threads.submit("red", bind(done.append, "red"), 1)
    wait_until(lambda: done == ["red"], "the next call is made")


def test_calls_run_where_no_further_thread_can_be_started(monkeypatch: pytest.MonkeyPatch) -> None:
    threads = TenantThreads(4, "test", Pace())

    def full(thread: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    release, done = threading.Event(), list[str]()
    with monkeypatch.context() as patch:
        patch.setattr(threading.Thread, "start", full)
        with pytest.raises(LimitReached, match="can't start new thread"):
            threads.submit("red", bind(done.append, "refused"), 1)
    threads.submit("red", lambda: release.wait(30), 1)
    with monkeypatch.context() as patch:
        patch.setattr(threading.Thread, "start", full)
        for tenant in ("red", "blue", "blue", "green"):
            threads.submit(tenant, bind(done.append, tenant), 1)
        release.set()
        wait_until(lambda: len(done) == 4, "each call is made once")
    last, started = threading.Event(), threading.Barrier(5)
    for tenant in ("red", "red", "blue", "blue"):
        threads.submit(tenant, lambda: (started.wait(30), last.wait(30)), 1)
    started.wait(30)
    last.set()
