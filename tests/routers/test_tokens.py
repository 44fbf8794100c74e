"""The tokens of a prompt: instances that fail, clients that go away, and many prompts at a time."""

from __future__ import annotations

import asyncio
import contextlib
import functools
import threading
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import pytest

from tokenlake_client.routers.tokens import Instance, LocalTokenizer, Prompt, RemoteTokenizer, TokenizerFailed

pytestmark = pytest.mark.rest

A, B = (Instance(f"http://{name}/v1", "m", None) for name in ("a", "b"))
PROMPT = Prompt({"prompt": "t1 t2", "add_special_tokens": True})
FAR_S = 1e6


def on_a_loop(test: Callable[..., Awaitable[None]]) -> Callable[..., None]:
    @functools.wraps(test)
    def run(**fixtures: Any) -> None:
        async def call() -> None:
            await test(**fixtures)

        asyncio.run(call())

    return run


class Instances(RemoteTokenizer):
    """Instances of which `silent` do not answer."""

    def __init__(self, *silent: Instance) -> None:
        super().__init__()
        self.silent = silent
        self.asked: list[Instance] = []

    async def _ask(self, prompt: Prompt, instance: Instance) -> bytes:
        self.asked.append(instance)
        if instance in self.silent:
            await asyncio.Event().wait()
        return b"tokens"


@on_a_loop
async def test_an_instance_that_does_not_answer_is_left_out() -> None:
    tokenizer = Instances(A)
    with pytest.raises(TimeoutError):
        await tokenizer.tokens(PROMPT, [A], 0.0)
    with pytest.raises(TokenizerFailed, match="no instance"):
        await tokenizer.tokens(PROMPT, [A], FAR_S)
    assert await tokenizer.tokens(PROMPT, [A, B], FAR_S) == b"tokens"
    assert tokenizer.asked == [A, B]


@on_a_loop
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


@on_a_loop
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
