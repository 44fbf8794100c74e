"""The tokens of a prompt: instances that fail, clients that go away, and many prompts at a time."""

from __future__ import annotations

import asyncio
import contextlib
import threading
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from tokenlake_client.routers import tokens
from tokenlake_client.routers.tokens import (
    Instance,
    LocalTokenizer,
    Prompt,
    PromptRefused,
    RemoteTokenizer,
    TokenizerFailed,
)

pytestmark = pytest.mark.rest

A, B, C = (Instance(f"http://{name}/v1", "m", None) for name in ("a", "b", "c"))
PROMPT = Prompt({"prompt": "t1 t2", "add_special_tokens": True})
FAR_S = 1e6


BAD = Prompt({"prompt": "bad"})


class Instances(RemoteTokenizer):
    """Instances of which `silent` do not answer, and `broken` fail. All fail in the same way with the prompt `BAD`, by
    `fault`."""

    def __init__(self, *silent: Instance, broken: Sequence[Instance] = (), fault: Exception | None = None) -> None:
        super().__init__()
        self.silent = silent
        self.broken = broken
        self.fault = fault
        self.asked: list[tuple[Instance, Prompt]] = []

    async def _ask(self, prompt: Prompt, instance: Instance) -> bytes:
        self.asked.append((instance, prompt))
        if instance in self.silent:
            await asyncio.Event().wait()
        if instance in self.broken:
            raise TokenizerFailed("status 500")
        if prompt is BAD and self.fault is not None:
            raise self.fault
        return b"tokens"

    async def settled(self) -> None:
        """Wait until no instance is doubted."""
        while self._doubted:
            await asyncio.sleep(0)


async def test_an_instance_that_does_not_answer_is_left_out(monkeypatch: pytest.MonkeyPatch) -> None:
    """It is asked for one word, and does not answer that either."""
    monkeypatch.setattr(tokens, "PROBE_S", 0.0)
    tokenizer = Instances(A, broken=[B])
    with pytest.raises(TimeoutError):
        await tokenizer.tokens(PROMPT, [A], 0.0)
    with pytest.raises(TokenizerFailed, match="status 500"):
        await tokenizer.tokens(PROMPT, [B], FAR_S)
    await tokenizer.settled()
    with pytest.raises(TokenizerFailed, match="no instance"):
        await tokenizer.tokens(PROMPT, [A, B], FAR_S)
    assert await tokenizer.tokens(PROMPT, [A, B, C], FAR_S) == b"tokens"
    assert tokenizer.asked[-1] == (C, PROMPT)


@pytest.mark.parametrize(
    ("fault", "raised", "asked"),
    [
        (PromptRefused("status 400"), PromptRefused, 1),
        (TokenizerFailed("status 500"), TokenizerFailed, 3),
        (TimeoutError(), TimeoutError, 1),
    ],
)
async def test_a_prompt_at_fault_pauses_no_instance(fault: Exception, raised: type[Exception], asked: int) -> None:
    """All instances refuse it, fail with it or answer it too late: they answer the next one."""
    tokenizer = Instances(fault=fault)
    for _ in range(5):
        before = len(tokenizer.asked)
        with pytest.raises(raised):
            await tokenizer.tokens(BAD, [A, B, C], FAR_S)
        assert sum(prompt is BAD for _, prompt in tokenizer.asked[before:]) == asked
        assert await tokenizer.tokens(PROMPT, [A, B, C], FAR_S) == b"tokens"
    await tokenizer.settled()
    assert await tokenizer.tokens(PROMPT, [A], FAR_S) == b"tokens"
    await tokenizer.close()


async def test_an_instance_in_doubt_is_asked_last() -> None:
    tokenizer = Instances(A)
    with pytest.raises(TimeoutError):
        await tokenizer.tokens(PROMPT, [A], 0.0)
    for _ in range(4):
        assert await tokenizer.tokens(PROMPT, [A, B], FAR_S) == b"tokens"
    assert [instance for instance, prompt in tokenizer.asked if prompt is PROMPT] == [A, B, B, B, B]
    await tokenizer.close()


async def test_a_prompt_that_is_no_json_asks_no_instance() -> None:
    tokenizer = RemoteTokenizer()
    with pytest.raises(PromptRefused, match="JSON"):
        await tokenizer.tokens(Prompt({"messages": object()}), [A], FAR_S)


async def test_a_client_that_goes_away_leaves_its_instance_in_use() -> None:
    tokenizer = Instances(A)
    until = asyncio.get_running_loop().time() + FAR_S
    waiting = asyncio.create_task(tokenizer.tokens(PROMPT, [A], until))
    while not tokenizer.asked:
        await asyncio.sleep(0)
    waiting.cancel()
    with pytest.raises(asyncio.CancelledError):
        await waiting
    tokenizer.silent = ()
    assert await tokenizer.tokens(PROMPT, [A], until) == b"tokens"


async def test_prompts_at_a_time_share_one_tokenizer(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    transformers = pytest.importorskip("transformers")
    from tokenlake_testing.tiny_model import save_tokenizer

    loads: list[str] = []
    go_on = threading.Event()
    load = transformers.AutoTokenizer.from_pretrained

    def recorded(directory: str) -> Any:
        loads.append(directory)
        go_on.wait()
        return load(directory)

    monkeypatch.setattr(transformers.AutoTokenizer, "from_pretrained", recorded)
    tokenizer = LocalTokenizer(str(save_tokenizer(tmp_path / "tokenizer")))
    until = asyncio.get_running_loop().time() + FAR_S
    waiting = [asyncio.create_task(tokenizer.tokens(PROMPT, [], until)) for _ in range(4)]
    while not loads:
        await asyncio.sleep(0)
    waiting.append(asyncio.create_task(tokenizer.tokens(Prompt({"never": "read"}), [], 0.0)))
    with contextlib.suppress(TimeoutError):
        await waiting.pop()
    go_on.set()
    assert await asyncio.gather(*waiting) == [bytes([1, 0, 0, 0, 2, 0, 0, 0])] * 4
    assert len(loads) == 1
    await tokenizer.close()


class Slow:
    """A tokenizer of 100 ids for each character, by a clock that it moves."""

    def __init__(self, clock: list[float], characters_per_s: float) -> None:
        self.clock = clock
        self.characters_per_s = characters_per_s

    def encode(self, text: str, add_special_tokens: bool) -> list[int]:
        self.clock[0] += len(text) / self.characters_per_s
        return [len(text)]


def test_a_prompt_that_takes_too_long_holds_up_no_other(monkeypatch: pytest.MonkeyPatch) -> None:
    """The thread does not begin what it cannot end by the deadline, and learns when it is faster again."""
    clock = [0.0]
    monkeypatch.setattr("tokenlake_client.routers.tokens.time.monotonic", lambda: clock[0])
    tokenizer = LocalTokenizer("directory")
    tokenizer._tokenizer = Slow(clock, 1e5)
    small, large = (Prompt({"prompt": "x" * size, "add_special_tokens": True}) for size in (10_000, 1_000_000))
    assert tokenizer._tokens(small, clock[0] + 1.0)
    with pytest.raises(TokenizerFailed, match="1000000 characters"):
        tokenizer._tokens(large, clock[0] + 1.0)
    assert clock[0] == pytest.approx(0.1)
    tokenizer._tokenizer.characters_per_s = 1e7
    for _ in range(50):
        with contextlib.suppress(TokenizerFailed):
            tokenizer._tokens(large, clock[0] + 1.0)
    assert tokenizer._tokens(large, clock[0] + 1.0) == (1_000_000).to_bytes(4, "little")
