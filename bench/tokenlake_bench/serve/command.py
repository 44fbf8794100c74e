"""`tokenlake bench serve`: runs a plan against servers, and prints what was measured."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import aiohttp
from rich.console import Console

from tokenlake.errors import ConfigurationError
from tokenlake_bench.progress import LiveProgress
from tokenlake_bench.report import write_json
from tokenlake_bench.serve.api import Answer, Form, ServeError, base_of, connection, form_of, model_of
from tokenlake_bench.serve.load import Load
from tokenlake_bench.serve.pages import Pages, page_of
from tokenlake_bench.serve.plan import Plan, Sizes, generated, objective, recorded
from tokenlake_bench.serve.printing import print_result
from tokenlake_bench.serve.results import Measured, ServeResult, Settings, read_result, result_of

REQUESTS: Final = 200
RATE: Final = 1.0
ANSWER_TOKENS: Final = 128
CONTEXT: Final = 32_768
"""Tokens for which a workload is generated where the server does not tell its context."""

TEXT_SHARE: Final = 0.85
"""Share of the context that prompts of text and their answers may take: some words, and the template of a chat, have
more tokens."""


@dataclass(frozen=True, slots=True)
class ServeArguments:
    """The options of the command."""

    urls: tuple[str, ...]
    workload: str
    trace: Path | None
    requests: int | None
    rate: float | None
    concurrency: int | None
    route: str
    answer_tokens: int | None
    pause: float
    context: int | None
    objective: str | None
    model: str | None
    api: str
    prompts: str
    vocabulary: int | None
    key_variable: str
    timeout: float
    metrics: tuple[str, ...]
    daemons: tuple[str, ...]
    seed: int
    json_file: Path | None
    against: Path | None


def run_serve(arguments: ServeArguments) -> ServeResult:
    """Run the plan and print the result. Ctrl-C ends the run early: what was measured is printed. Raises
    `TokenLakeError` where the run cannot begin."""
    limits = objective(arguments.objective) if arguments.objective else {}
    before = read_result(arguments.against) if arguments.against is not None else None
    for name, value, least in (("requests", arguments.requests, 1), ("concurrency", arguments.concurrency, 1)):
        if value is not None and value < least:
            raise ConfigurationError(name, value, f"at least {least}")
    for name, number in (("rate", arguments.rate), ("timeout", arguments.timeout)):
        if number is not None and not 0 < number < float("inf"):
            raise ConfigurationError(name, number, "a number above 0")
    if arguments.rate is not None and arguments.concurrency is not None:
        raise ConfigurationError("concurrency", arguments.concurrency, "either --rate or --concurrency")
    with asyncio.Runner(loop_factory=_loop_factory()) as runner:
        result = runner.run(_run(arguments, limits))
    write_json(result, arguments.json_file)
    print_result(result, before)
    return result


def _loop_factory() -> type[asyncio.AbstractEventLoop] | None:
    """uvloop's where it is installed: a part of an answer costs two thirds of the time."""
    with contextlib.suppress(ImportError):
        import uvloop

        loop: type[asyncio.AbstractEventLoop] = uvloop.Loop
        return loop
    return None


async def _run(arguments: ServeArguments, limits: dict[str, float]) -> ServeResult:
    notes = Console(stderr=True)
    bases = [base_of(url) for url in arguments.urls]
    # The pages may be of other hosts, which are sent no key.
    async with connection(os.environ.get(arguments.key_variable)) as client, connection(None) as reader:
        model, context = await _models(client, bases, arguments)
        form = await form_of(
            client, bases[0], model, arguments.api, arguments.prompts, arguments.vocabulary, arguments.timeout
        )
        if not form.vocabulary:
            context = int((context or CONTEXT) * TEXT_SHARE)
        plan = _plan(arguments, context)
        longest = max(each.prompt_tokens for each in plan.requests)
        settings = Settings(
            workload=plan.name,
            seed=arguments.seed,
            requests=len(plan.requests),
            rate=None if arguments.concurrency else arguments.rate or (None if arguments.trace else RATE),
            concurrency=arguments.concurrency,
            servers=len(bases),
            route=arguments.route if len(bases) > 1 else "-",
            model=model,
            form=str(form),
            longest_prompt=longest,
            objective=limits,
        )
        said = f"{plan.name}, seed {arguments.seed}: {len(plan.requests)} requests, prompts up to {longest:,} tokens"
        notes.print(f"{said}; model {model}: {form}", soft_wrap=True, highlight=False)
        pages = Pages(_pages(arguments.metrics or bases), _pages(arguments.daemons))
        await pages.read_before(reader)
        answers, busy_s, complete = await _load(client, bases, form, plan, arguments)
        await pages.read_after(reader)
    measured = Measured(
        answers=answers,
        urls=bases,
        planned_tokens=sum(each.prompt_tokens for each in plan.requests),
        repeated_tokens=plan.repeated_tokens,
        cut=plan.cut,
        engines=pages.engine_tokens(),
        daemons=pages.daemon_tokens(),
        not_read=pages.unread,
        busy_s=busy_s,
        complete=complete,
    )
    return result_of(settings, measured)


def _pages(addresses: Sequence[str]) -> list[str]:
    return list(dict.fromkeys(page_of(each) for each in addresses))


async def _models(
    client: aiohttp.ClientSession, bases: Sequence[str], arguments: ServeArguments
) -> tuple[str, int | None]:
    """The model of all servers, and its least context where they tell it. Raises `ServeError`."""
    found = [await model_of(client, base, arguments.model, arguments.key_variable) for base in bases]
    names = {each.id for each in found}
    if len(names) > 1:
        raise ServeError(f"the servers have different models: {', '.join(sorted(names))}; name one with --model")
    contexts = [each.max_model_len for each in found if each.max_model_len]
    if arguments.context is not None:
        contexts.append(arguments.context)
    return found[0].id, min(contexts, default=None)


def _plan(arguments: ServeArguments, context: int | None) -> Plan:
    if arguments.trace is not None:
        return recorded(
            arguments.trace,
            limit=arguments.requests,
            seed=arguments.seed,
            rate=arguments.rate,
            context=context,
            answer_tokens=arguments.answer_tokens,
        )
    sizes = Sizes(
        requests=arguments.requests or REQUESTS,
        rate=arguments.rate or RATE,
        context=context or CONTEXT,
        answer_tokens=arguments.answer_tokens or ANSWER_TOKENS,
        pause_s=arguments.pause,
        seed=arguments.seed,
    )
    return generated(arguments.workload, sizes)


async def _load(
    client: aiohttp.ClientSession, bases: Sequence[str], form: Form, plan: Plan, arguments: ServeArguments
) -> tuple[list[Answer], float, bool]:
    """The answers, the seconds for which this process computed, and whether the run was complete."""
    with LiveProgress("requests", len(plan.requests)) as progress:
        failed = 0

        def told(answer: Answer) -> None:
            nonlocal failed
            failed += bool(answer.error)
            if answer.error and failed <= 3:
                progress.say(f"request {answer.number} at {bases[answer.server]}: {answer.error}: {answer.said}")
            progress.update(len(load.answers), f"{failed} failed" if failed else "")

        load = Load(client, bases, form, plan, route=arguments.route, wait_s=arguments.timeout, told=told)
        run = load.closed(arguments.concurrency) if arguments.concurrency else load.open()
        task = asyncio.ensure_future(run)
        loop, began = asyncio.get_running_loop(), time.process_time()
        loop.add_signal_handler(signal.SIGINT, task.cancel)
        try:
            await task
        except asyncio.CancelledError:
            progress.say("interrupted: the figures are of the requests that have ended")
        finally:
            loop.remove_signal_handler(signal.SIGINT)
        return load.answers, time.process_time() - began, len(load.answers) == len(plan.requests)
