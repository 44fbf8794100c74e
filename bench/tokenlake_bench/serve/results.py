"""The result of a run as JSON and as a table, alone or beside an earlier one."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Final

import msgspec
import numpy as np

from tokenlake.errors import TokenLakeError
from tokenlake_bench.report import format_duration, format_share
from tokenlake_bench.serve.api import Answer
from tokenlake_bench.serve.pages import DaemonTokens, EngineTokens

LATE_SHARE: Final = 0.1
LATE_S: Final = 0.02
"""A client is late from this share of the median time to the first token, and these seconds on."""
BUSY: Final = 0.8
"""Share of its core from which on the client is."""
PART_OF_BLOCK: Final = 64
"""Tokens by request that are found in a block of the trace that is not repeated whole."""
QUANTILES: Final = ("median", "p90", "p99")
Row = tuple[str, float | None, Callable[[float], str]]


class Quantiles(msgspec.Struct, frozen=True):
    """Of seconds: median, 90th and 99th percentile."""

    p50_s: float
    p90_s: float
    p99_s: float


class Settings(msgspec.Struct, frozen=True, kw_only=True):
    """What a run was given. Two runs compare where these are equal."""

    workload: str
    seed: int
    requests: int
    rate: float | None
    concurrency: int | None
    servers: int
    route: str
    model: str
    form: str
    longest_prompt: int
    objective: dict[str, float]


class ServerRow(msgspec.Struct, frozen=True, kw_only=True):
    """One of the servers."""

    url: str
    requests: int
    answered: int
    ttft: Quantiles | None


class ServeResult(msgspec.Struct, frozen=True, kw_only=True):
    """The JSON of `tokenlake bench serve`. `sent` requests have ended: those `answered`, and `errors` by kind, with one
    text of each kind in `said`. Times and tokens are of the answered ones. `duration_s`: from the first request to the
    last end. `in_objective`: number of the answered requests within all limits; None without limits.
    `repeated_tokens`: those of all prompts of the plan that an earlier one has. `not_read`: by address of a metrics
    page, why it could not be read. `late`: of the client itself, from the time of an arrival to the sending. `busy`:
    share of the duration in which the client's process computed. `complete`: the run was not interrupted."""

    settings: Settings
    sent: int
    answered: int
    errors: dict[str, int]
    said: dict[str, str]
    duration_s: float
    prompt_tokens: int
    output_tokens: int
    ttft: Quantiles | None
    tpot: Quantiles | None
    between_tokens: Quantiles | None
    e2e: Quantiles | None
    in_objective: int | None
    planned_tokens: int
    repeated_tokens: int
    cut: int
    engines: EngineTokens | None
    daemons: DaemonTokens | None
    cached_tokens: int | None
    """Tokens of prompts that the answers name as cached; None where no answer does."""
    not_read: dict[str, str]
    servers: list[ServerRow]
    late: Quantiles | None
    busy: float
    complete: bool


class ResultFileError(TokenLakeError):
    """Raised where the file of an earlier result cannot be used; the message names it and why."""


def read_result(path: Path) -> ServeResult:
    """The result in a file that `--save` wrote. Raises `ResultFileError`."""
    try:
        return msgspec.json.decode(path.read_bytes(), type=ServeResult)
    except OSError as error:
        raise ResultFileError(f"{path}: {error.strerror}; expected a file that `--save` wrote") from error
    except msgspec.MsgspecError as error:
        raise ResultFileError(f"{path} is no result of `bench serve`: {error}") from error


def quantiles(seconds: Sequence[float]) -> Quantiles | None:
    """None of nothing."""
    if not seconds:
        return None
    return Quantiles(*map(float, np.quantile(np.asarray(seconds), (0.5, 0.9, 0.99))))


def in_objective(answer: Answer, limits: Mapping[str, float]) -> bool:
    """True where an answer is within all limits."""
    has = {"ttft": answer.ttft_s, "tpot": answer.tpot_s or 0.0, "e2e": answer.e2e_s}
    return all(has[name] <= limit for name, limit in limits.items())


class Measured(msgspec.Struct, frozen=True, kw_only=True):
    """What a run leaves: see `ServeResult`."""

    answers: list[Answer]
    urls: list[str]
    planned_tokens: int
    repeated_tokens: int
    cut: int
    engines: EngineTokens | None
    daemons: DaemonTokens | None
    not_read: dict[str, str]
    busy_s: float
    complete: bool


def result_of(settings: Settings, measured: Measured) -> ServeResult:
    """The figures of a run."""
    answers = measured.answers
    good = [each for each in answers if not each.error]
    gaps = [later - earlier for each in good for earlier, later in zip(each.at_s, each.at_s[1:], strict=False)]
    duration_s = max((each.end_s for each in answers), default=0.0) - min(
        (each.sent_s for each in answers), default=0.0
    )
    cached = [each.cached_tokens for each in good if each.cached_tokens is not None]
    failed = [each for each in answers if each.error]
    return ServeResult(
        settings=settings,
        sent=len(answers),
        answered=len(good),
        errors=dict(Counter(each.error for each in failed).most_common()),
        said={each.error: each.said for each in reversed(failed)},
        duration_s=duration_s,
        prompt_tokens=sum(each.prompt_tokens for each in good),
        output_tokens=sum(each.output_tokens for each in good),
        ttft=quantiles([each.ttft_s for each in good]),
        tpot=quantiles([each.tpot_s for each in good if each.tpot_s is not None]),
        between_tokens=quantiles(gaps),
        e2e=quantiles([each.e2e_s for each in good]),
        in_objective=sum(in_objective(each, settings.objective) for each in good) if settings.objective else None,
        planned_tokens=measured.planned_tokens,
        repeated_tokens=measured.repeated_tokens,
        cut=measured.cut,
        engines=measured.engines,
        daemons=measured.daemons,
        cached_tokens=sum(cached) if cached else None,
        not_read=measured.not_read,
        servers=[
            ServerRow(
                url=url,
                requests=sum(each.server == number for each in answers),
                answered=sum(each.server == number for each in good),
                ttft=quantiles([each.ttft_s for each in good if each.server == number]),
            )
            for number, url in enumerate(measured.urls)
        ],
        late=quantiles([max(0.0, each.sent_s - each.due_s) for each in answers]),
        busy=measured.busy_s / duration_s if duration_s else 0.0,
        complete=measured.complete,
    )


def rows(result: ServeResult) -> list[Row]:
    """The counts and rates of a result in the order of the table: name, value or None, and how the value is written."""
    seconds = result.duration_s or float("nan")
    found: list[Row] = [
        ("requests answered", result.answered, _count),
        ("requests failed", result.sent - result.answered, _count),
    ]
    if result.in_objective is not None:
        limits = ", ".join(f"{name} {format_duration(limit)}" for name, limit in result.settings.objective.items())
        found.append((f"in objective ({limits})", result.in_objective / max(1, result.sent), format_share))
        found.append(("requests/s in objective", result.in_objective / seconds, _rate))
    return [
        *found,
        ("requests/s", result.answered / seconds, _rate),
        ("prompt tokens/s", result.prompt_tokens / seconds, _rate),
        ("answer tokens/s", result.output_tokens / seconds, _rate),
    ]


def times(result: ServeResult) -> dict[str, Quantiles]:
    """The times of the answers by name; those that were measured."""
    found = {
        "first token (TTFT)": result.ttft,
        "per further token (TPOT)": result.tpot,
        "between parts (ITL)": result.between_tokens,
        "whole answer": result.e2e,
    }
    return {name: each for name, each in found.items() if each is not None}


def time_rows(result: ServeResult) -> list[Row]:
    """A row for each quantile of the times."""
    return [
        (f"{name}, {which}", value, format_duration)
        for name, each in times(result).items()
        for which, value in zip(QUANTILES, msgspec.structs.astuple(each), strict=True)
    ]


def token_rows(result: ServeResult) -> list[Row]:
    """The prompt tokens by source, by the engines' counters; empty where they are not known."""
    tokens = result.engines
    if tokens is None:
        cached = result.cached_tokens
        return [] if cached is None else [("found by the engine (its answers)", cached, _count)]
    found: list[Row] = [
        ("the engine's own cache", tokens.own, _count),
        ("the pool, from this node", tokens.pool_here, _count),
        ("the pool, from other nodes", tokens.pool_elsewhere, _count),
        ("another connector", tokens.other, _count),
        ("computed", tokens.computed, _count),
    ]
    return [
        *(row for row in found if row[1] or row[0] != "another connector"),
        ("prompt tokens", tokens.prompt, _count),
    ]


def daemon_rows(result: ServeResult) -> list[Row]:
    """The tokens that the daemons were asked for."""
    tokens = result.daemons
    if tokens is None:
        return []
    found: list[Row] = [("asked", tokens.asked, _count), ("the engine had them", tokens.engine_had, _count)]
    found += [(f"supplied, {source}", count, _count) for source, count in tokens.supplied.items()]
    found += [(f"missed, {reason}", count, _count) for reason, count in tokens.missed.items()]
    return found


def differences(before: Settings, now: Settings) -> list[str]:
    """The settings in which two runs differ, for people."""
    return [
        f"{name} {getattr(before, name)} and {getattr(now, name)}"
        for name in Settings.__struct_fields__
        if getattr(before, name) != getattr(now, name)
    ]


def warnings(result: ServeResult) -> Iterator[str]:
    """What a reader must know beside the figures."""
    for url, why in result.not_read.items():
        yield f"not read: {url}: {why}"
    for kind, count in result.errors.items():
        yield f"failed: {count} x {kind}: {result.said[kind]}"
    if result.cut:
        yield f"{result.cut} prompts were cut to the model's context"
    late, ttft = result.late, result.ttft
    if late is not None and ttft is not None and late.p99_s > max(LATE_S, LATE_SHARE * ttft.p50_s):
        yield (
            f"this client was late: {format_duration(late.p99_s)} at the 99th percentile, which the servers are not "
            "charged for, but fewer requests came at once: lower --rate, or run it on an idle machine"
        )
    if result.busy > BUSY:
        yield (
            f"this client computed {format_share(result.busy)} of the time on one core, so that the times contain its "
            "own: run several clients with shares of the rate"
        )
    tokens, daemons = result.engines, result.daemons
    if tokens is not None and result.complete and not result.errors and tokens.prompt != result.prompt_tokens:
        yield (
            f"the engines counted {tokens.prompt:,} prompt tokens and the answers {result.prompt_tokens:,}: other "
            "requests came in the run, or the pages of some engines were not given (--metrics)"
        )
    found = 0
    if tokens is not None:
        found = tokens.prompt - tokens.computed
    elif daemons is not None:
        found = daemons.engine_had + sum(daemons.supplied.values())
    if found > 1.02 * result.repeated_tokens + PART_OF_BLOCK * result.sent:
        yield (
            f"{found:,} tokens were found and the workload repeats {result.repeated_tokens:,}: the caches had prompts "
            "of an earlier run. Restart the servers and daemons, or give another --seed"
        )


def _count(value: float) -> str:
    return f"{value:,.0f}"


def _rate(value: float) -> str:
    return f"{value:,.2f}" if value < 100 else f"{value:,.0f}"
