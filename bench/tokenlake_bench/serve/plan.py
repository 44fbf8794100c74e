"""The requests of a run: those of a trace, or of a workload that is generated to fit the model's context."""

from __future__ import annotations

import tempfile
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Final

import click

from tokenlake.errors import ConfigurationError
from tokenlake_bench import sessions
from tokenlake_bench.baselines import Accesses
from tokenlake_bench.sessions import SessionTrace
from tokenlake_bench.trace_formats import read_trace
from tokenlake_bench.traces import BLOCK_TOKENS, MooncakeTrace
from tokenlake_bench.workload import Tokens
from tokenlake_bench.workloads.command import generate, write_lines

LEAST_ROOM: Final = 2 * BLOCK_TOKENS
"""Tokens of a prompt that a generated workload needs."""


@dataclass(frozen=True, slots=True)
class Planned:
    """One request before it is sent. `at_s`: its arrival in seconds from the begin of the run. `follows`: the number of
    the request whose answer it waits for. With a `pause_s` it then comes so many seconds behind that answer, without
    one at `at_s`, or behind the answer if that is later."""

    number: int
    at_s: float
    conversation: int
    prompt_tokens: int
    output_tokens: int
    follows: int | None = None
    pause_s: float | None = None


@dataclass(frozen=True, slots=True)
class Plan:
    """The requests of a run in order of time."""

    name: str
    requests: list[Planned]
    repeated_tokens: int
    """Prompt tokens that an earlier request of the run has as a prefix, in full blocks of the trace: what a cache that
    never evicts can supply."""
    cut: int
    """Prompts that were cut to the model's context."""
    trace: MooncakeTrace | SessionTrace

    def tokens(self, number: int) -> Tokens:
        """The tokens of a prompt, below `VOCABULARY`; equal prefixes of the trace are equal tokens."""
        return self.trace[number].tokens[: self.requests[number].prompt_tokens]


@dataclass(frozen=True, slots=True)
class Sizes:
    """What a workload is generated for. `context`: tokens of a prompt and its answer together."""

    requests: int
    rate: float
    context: int
    answer_tokens: int
    pause_s: float
    seed: int

    @property
    def room(self) -> int:
        """Tokens of the longest prompt, beside an answer of up to four times the mean."""
        return self.context - min(4 * self.answer_tokens, self.context // 2)


def _chats(sizes: Sizes) -> dict[str, object]:
    room = sizes.room
    return {
        "system_blocks": 1 if room >= 8 * BLOCK_TOKENS else 0,
        "document_share": 0,
        "first_median": max(32, min(2_000, room // 6)),
        "paste_median": max(32, min(1_500, room // 8)),
        "output_mean": sizes.answer_tokens,
        "gap_median_s": sizes.pause_s,
        "longest": room,
        "turns_exponent": 1,
        "most_turns": 8,
    }


def _documents(sizes: Sizes) -> dict[str, object]:
    question = max(16, min(100, sizes.room // 32))
    blocks = max(1, min(32, (sizes.room - 8 * question) // BLOCK_TOKENS))
    return {
        "documents": max(1, sizes.requests // 8),
        "document_tokens": blocks * BLOCK_TOKENS,
        "question_mean": question,
        "output_mean": sizes.answer_tokens,
    }


def _agents(sizes: Sizes) -> dict[str, object]:
    system = min(8, sizes.room // 4 // BLOCK_TOKENS)
    return {
        "session_median": 12,
        "system_blocks": system,
        "systems": 4,
        "first_median": max(system * BLOCK_TOKENS + 64, min(12_000, sizes.room // 3)),
        "resumed_share": 0,
        "growth_median": max(32, min(670, sizes.room // 24)),
        "output_median": sizes.answer_tokens,
        "output_sigma": 0.5,
        "gap_median_s": sizes.pause_s,
        "pause_share": 0,
        "longest": sizes.room,
    }


WORKLOADS: Final = {
    "chats": ("conversation", _chats),
    "documents": ("documents", _documents),
    "agents": ("agent", _agents),
}
"""By name: the generator of `tokenlake workload`, and its settings for some sizes."""


def generated(name: str, sizes: Sizes) -> Plan:
    """The plan of a generated workload. Turns of a conversation wait for the answer before them. Raises
    `ConfigurationError` for a context that is too short."""
    if sizes.room < LEAST_ROOM:
        expected = f"at least {2 * LEAST_ROOM:,} tokens; for a shorter context give prompts with --trace"
        raise ConfigurationError("context", sizes.context, expected)
    generator, settings = WORKLOADS[name]
    values = settings(sizes) | {"requests": sizes.requests, "rate": sizes.rate, "seed": sizes.seed}
    lines = generate(generator, values)
    with tempfile.TemporaryDirectory() as directory:
        path = Path(directory, f"{name}.jsonl")
        write_lines(lines, path)
        trace = read_trace(path, seed=sizes.seed)
    return _plan(name, trace, sizes.context, turns=name != "documents", most_answer=sizes.context - sizes.room)


def recorded(
    path: Path, *, limit: int | None, seed: int, rate: float | None, context: int | None, answer_tokens: int | None
) -> Plan:
    """The plan of a trace file. `rate`: requests per second, by stretching the arrivals (None: as recorded).
    `context`: prompts are cut so that their answers fit (None: they are not). `answer_tokens`: length of all answers
    (None: as recorded). Raises as `read_trace`."""
    trace = read_trace(path, limit=limit, seed=seed)
    plan = _plan(path.name, trace, context, turns=False, answer_tokens=answer_tokens)
    last_s = plan.requests[-1].at_s
    if rate is None or not last_s:
        return plan
    stretch = len(plan.requests) / rate / last_s
    return replace(plan, requests=[replace(each, at_s=each.at_s * stretch) for each in plan.requests])


def _plan(
    name: str,
    trace: MooncakeTrace | SessionTrace,
    context: int | None,
    *,
    turns: bool,
    most_answer: int | None = None,
    answer_tokens: int | None = None,
) -> Plan:
    accesses = trace.accesses(trace.block_tokens if isinstance(trace, MooncakeTrace) else sessions.BLOCK_TOKENS)
    before: dict[int, int] = {}
    requests = []
    cut = 0
    first_s = accesses.prompts[0].at_s
    for number, prompt in enumerate(accesses.prompts):
        answer = max(1, answer_tokens or prompt.output_tokens)
        answer = answer if most_answer is None else min(answer, most_answer)
        length = prompt.tokens
        if context is not None and length + answer > context:
            answer = min(answer, max(1, context // 2))
            length = min(length, context - answer)
            cut += length < prompt.tokens
        follows, pause_s = prompt.follows, prompt.pause_s if prompt.follows is not None else None
        if turns:
            follows = before.get(prompt.conversation)
            before[prompt.conversation] = number
        at_s = prompt.at_s - first_s
        requests.append(Planned(number, at_s, prompt.conversation, length, answer, follows, pause_s))
    return Plan(name, requests, _repeated(accesses, requests), cut, trace)


def _repeated(accesses: Accesses, requests: Sequence[Planned]) -> int:
    """Tokens in full segments that an earlier prompt begins with."""
    seen: set[int] = set()
    tokens = 0
    for prompt, request in zip(accesses.prompts, requests, strict=True):
        chain = prompt.chain[: request.prompt_tokens // accesses.segment_tokens]
        found = next((at for at, segment in enumerate(chain) if segment not in seen), len(chain))
        tokens += found * accesses.segment_tokens
        seen.update(chain)
    return tokens


def objective(text: str) -> dict[str, float]:
    """Seconds by name (`ttft`, `tpot`, `e2e`) of an objective such as `ttft=2s,tpot=100ms`. Raises
    `click.BadParameter`."""
    limits: dict[str, float] = {}
    for part in text.split(","):
        name, _, value = part.strip().partition("=")
        unit = "ms" if value.endswith("ms") else "s"
        try:
            seconds = float(value.removesuffix(unit)) / (1000 if unit == "ms" else 1)
        except ValueError:
            seconds = 0.0
        if name not in ("ttft", "tpot", "e2e") or not value.endswith("s") or not 0 < seconds < float("inf"):
            raise click.BadParameter(
                f"{part.strip()!r} is no limit; expected ttft=, tpot= or e2e= with seconds or milliseconds, as in "
                "'ttft=2s,tpot=100ms'"
            )
        limits[name] = seconds
    return limits
