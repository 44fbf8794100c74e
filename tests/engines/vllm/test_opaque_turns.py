"""Requests as people send them, to models with windows, chunks and recurrent states: prompts that share prefixes of
unequal length, fork in the middle, come back after their answer, and end with a block; with drafts on top."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from tests.engines.vllm.conftest import TIMEOUT_S, pool_of, prompt
from tests.engines.vllm.forked import ForkedEngine
from tests.engines.vllm.spoiling import spoil_all, tracebacks
from tests.engines.vllm.test_opaque import DRAFT, GUESSING, SIZES, WIDE
from tokenlake.errors import Unreachable
from tokenlake_testing.cluster import Cluster
from tokenlake_testing.engine_lines import Engine
from tokenlake_testing.families import save_chunked, save_hybrid, save_mistral, save_sliding_window
from tokenlake_testing.tiny_model import TinyModel, save_tiny_model

pytestmark = [pytest.mark.live, pytest.mark.timeout(600)]

UNIT = 32
BASE = prompt(1400, 1)


@dataclass(frozen=True, slots=True)
class Family:
    """A model, and vLLM's arguments for it."""

    save: Callable[[str | Path, TinyModel | None], Path]
    sizes: TinyModel
    grain: int
    """A prompt that was stored is found again up to the last multiple of this number of tokens before its last one."""
    answer: int
    """The tokens that are compared."""
    forks: int
    """The number of prompts with the same beginning and other ends that find nothing, before each one finds it."""
    arguments: Mapping[str, Any] = field(default_factory=dict)


FAMILIES = {
    # Linear attention runs in bfloat16 only, in which the third token may follow from how a prompt is divided already:
    # on some processors vLLM's own cache gives other tokens than vLLM without a cache.
    "hybrid": Family(save_hybrid, WIDE, UNIT, 2, 2, {"dtype": "bfloat16", "prefix_match_unit": UNIT}),
    "mixed": Family(save_sliding_window, SIZES, 256, 24, 2),
    "chunked": Family(save_chunked, SIZES, 256, 24, 1),
    "window": Family(save_mistral, SIZES, 256, 24, 4),
}
CASES_OF_EACH_RUN = [("hybrid", ""), ("mixed", ""), ("chunked", ""), ("window", "draft model")]
NIGHTLY = [("mixed", "n-gram"), ("window", ""), ("window", "n-gram")]
CASES = [
    *(pytest.param(case, id=" ".join(case)) for case in CASES_OF_EACH_RUN),
    *(pytest.param(case, id=" ".join(case), marks=pytest.mark.nightly) for case in NIGHTLY),
]


@dataclass(slots=True)
class Run:
    """The engines of one family."""

    family: Family
    cluster: Cluster
    plain: Engine
    """Without the pool."""
    engine: Engine
    expected: dict[tuple[int, ...], list[int]] = field(default_factory=dict)

    def answer(self, tokens: Sequence[int]) -> list[int]:
        """The tokens that vLLM generates for a prompt without the pool."""
        asked = tuple(tokens)
        if asked not in self.expected:
            self.plain.call("forget")
            self.expected[asked] = self.plain.generate([tokens], self.family.answer)[0]
        return self.expected[asked]

    def ask(self, tokens: Sequence[int]) -> int:
        """Generate for a prompt with an engine whose own cache is empty, and compare the tokens. Returns the number of
        prompt tokens that the pool supplied."""
        answer, cached = self.generate(tokens)
        assert answer == self.answer(tokens), f"{len(tokens)} tokens, {cached} of them cached"
        return cached

    def generate(self, tokens: Sequence[int]) -> tuple[list[int], int]:
        """The answer of the engine, whose own cache is emptied before, and the tokens that the pool supplied."""
        assert self.engine.call("forget")
        answer = self.engine.timed([tokens], self.family.answer)
        self.engine.call("flush")
        return answer.tokens[0], answer.cached

    def ask_until(self, tokens: Sequence[int], least: int) -> int:
        """Repeat a prompt until the pool supplies `least` tokens: beside busy programs its answer may be late."""
        until = time.monotonic() + TIMEOUT_S
        while (cached := self.ask(tokens)) < least:
            assert time.monotonic() < until, f"{cached} of {len(tokens)} tokens; expected {least}"
        return cached

    def found(self, tokens: Sequence[int]) -> int:
        """The tokens of a stored prompt that are found again."""
        return (len(tokens) - 1) // self.family.grain * self.family.grain


def arguments_of(family: Family, drafts: str, directory: Path) -> dict[str, Any]:
    """vLLM's arguments."""
    guessing: dict[str, Any] = {"n-gram": GUESSING}
    if drafts == "draft model":
        draft = str(save_tiny_model(directory / "draft", DRAFT))
        guessing[drafts] = {"method": "draft_model", "model": draft, "num_speculative_tokens": 3}
    return {**family.arguments, **({"speculative_config": guessing[drafts]} if drafts else {})}


@pytest.fixture(scope="module", params=CASES)
def run(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Run]:
    name, drafts = request.param
    family, directory = FAMILIES[name], tmp_path_factory.mktemp("turns")
    model = family.save(directory / "model", family.sizes)
    arguments = arguments_of(family, drafts, directory)
    with Cluster(1, "256MiB", "16MiB") as cluster:
        plain = ForkedEngine(model, directory / "plain.log", None, **arguments)
        engine = ForkedEngine(model, directory / "log", pool_of(cluster.nodes[0], match_ms=2000), **arguments)
        try:
            yield Run(family, cluster, plain, engine)
        finally:
            plain.close()
            engine.close()


def shapes(run: Run) -> list[list[int]]:
    """Prompts that share a prefix of 600, 1,000 and 1,200 tokens, come back after their answer, and have whole blocks
    or segments."""
    first = BASE[:1000]
    turn = [*first, *run.answer(first), *prompt(120, 3)]
    whole = [BASE[:length] for length in (128, 512, 640, 1024, 1280)]
    return [first, [*BASE[:600], *prompt(300, 2)], BASE[:1200], turn, *whole]


def test_shapes_of_prompts(run: Run) -> None:
    """Cold, warm, and after a restart of the daemon, which loses its memory."""
    many = shapes(run)
    for tokens in many:
        run.ask(tokens)
    for tokens in many:
        run.ask_until(tokens, run.found(tokens))
    run.engine.call("forget")
    run.cluster.nodes[0].kill()
    assert run.ask(many[0]) == 0
    run.cluster.nodes[0].start()
    run.cluster.wait_ready()
    for tokens in many:
        run.ask(tokens)
    for tokens in many:
        run.ask_until(tokens, run.found(tokens))
    counts = run.engine.call("counts")
    assert counts["loads_failed"] == 0


def test_conversations(run: Run) -> None:
    """Each turn finds the prompt of the turn before."""
    said: list[int] = []
    for turn in range(5):
        before, said = said, [*said, *prompt(300 + 170 * turn, 20 + turn)]
        cached = run.ask_until(said, run.found(before) if before else 0)
        assert cached < len(said)
        said += run.answer(said)


def test_prompts_that_fork(run: Run) -> None:
    """The second conversation with the same system prompt lets the pool have what the third needs to begin at its end.
    Attention within chunks needs nothing before the chunk. Where all layers see a window, the pool does not know of the
    fork."""
    for number in range(4):
        tokens = [*prompt(700, 31), *prompt(800, 40 + number)]
        if number < run.family.forks:
            assert run.ask(tokens) == 0
        else:
            assert run.ask_until(tokens, 1) <= 700


def test_other_bytes_change_the_tokens(run: Run) -> None:
    """The control: the engine does not verify its reads."""
    many = [prompt(1000, seed) for seed in (5, 6)]
    right, until = True, time.monotonic() + TIMEOUT_S
    while right:
        assert time.monotonic() < until, run.engine.log.read_text()[-2000:]
        for tokens in many:
            run.ask_until(tokens, run.found(tokens))
        spoil_all(run.cluster, run.engine)
        right = all(run.generate(tokens)[0] == run.answer(tokens) for tokens in many)


def test_no_hook_raised(run: Run) -> None:
    assert tracebacks(run.engine) == []


@pytest.mark.nightly
def test_what_vllm_itself_does_not_run(tmp_path: Path) -> None:
    """Controls without the pool: drafts beside recurrent states need Triton, and a draft model beside windows and full
    attention changes the tokens."""
    hybrid, mixed = FAMILIES["hybrid"], FAMILIES["mixed"]
    model = hybrid.save(tmp_path / "hybrid", hybrid.sizes)
    engine = ForkedEngine(model, tmp_path / "hybrid.log", None, **arguments_of(hybrid, "n-gram", tmp_path))
    with pytest.raises(Unreachable):
        engine.generate([BASE[:1000]])
    engine.close()
    assert "precopy_mamba_align_fused_kernel" in engine.log.read_text()
    model = mixed.save(tmp_path / "mixed", mixed.sizes)
    answers = []
    for drafts in ("", "draft model"):
        arguments = arguments_of(mixed, drafts, tmp_path)
        engine = ForkedEngine(model, tmp_path / f"{drafts}.log", None, enable_prefix_caching=False, **arguments)
        answers.append(engine.generate([BASE[:1000]], mixed.answer))
        engine.close()
    assert answers[0] != answers[1]
