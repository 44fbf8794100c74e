"""Where prompt tokens came from, by the metrics pages of engines and daemons: their growth over a run."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Final

import aiohttp
import msgspec
from prometheus_client.parser import text_string_to_metric_families

from tokenlake_bench.serve.api import DIAL_S, reason

SETTLE_S: Final = 5.0
"""Limit of the seconds for which the pages are read until they no longer change."""
POLL_S: Final = 0.25
DAEMON_S: Final = 1.5
"""Seconds without a change behind which the counters of daemons count as settled: an engine releases its last match
some time behind the answer."""

Series = tuple[str, tuple[tuple[str, str], ...]]
Page = dict[Series, float]
"""The values of a page by name and labels of their series."""


class EngineTokens(msgspec.Struct, frozen=True, kw_only=True):
    """The prompt tokens of the engines by source. `other`: those of connectors and tiers that are not the pool's."""

    prompt: int
    own: int
    pool_here: int
    pool_elsewhere: int
    other: int
    computed: int


class DaemonTokens(msgspec.Struct, frozen=True, kw_only=True):
    """The tokens that engines asked the daemons for. `supplied`: by source; `missed`: by reason."""

    asked: int
    engine_had: int
    supplied: dict[str, int]
    missed: dict[str, int]


@dataclass(slots=True)
class Pages:
    """The metrics pages of a run. `unread`: by address of a page, why it could not be read."""

    engines: Sequence[str]
    daemons: Sequence[str]
    before: dict[str, Page] = field(default_factory=dict)
    after: dict[str, Page] = field(default_factory=dict)
    unread: dict[str, str] = field(default_factory=dict)

    async def read_before(self, client: aiohttp.ClientSession) -> None:
        """Read all pages before the run."""
        self.before = await self._settled(client)

    async def read_after(self, client: aiohttp.ClientSession) -> None:
        """Read them again. A page that could not be read before is not used."""
        self.after = await self._settled(client)

    async def _settled(self, client: aiohttp.ClientSession) -> dict[str, Page]:
        """The pages once no counter of tokens changes, because engines and daemons count behind the answer."""
        loop = asyncio.get_running_loop()
        until = loop.time() + SETTLE_S
        pages, changed_s = await self._read(client), loop.time()
        while loop.time() < until and loop.time() - changed_s < (DAEMON_S if self.daemons else POLL_S):
            await asyncio.sleep(POLL_S)
            again = await self._read(client)
            if any(_tokens(page) != _tokens(again.get(url, {})) for url, page in pages.items()):
                changed_s = loop.time()
            pages = again
        return pages

    async def _read(self, client: aiohttp.ClientSession) -> dict[str, Page]:
        wanted = [url for url in dict.fromkeys([*self.engines, *self.daemons]) if url not in self.unread]
        found = await asyncio.gather(*(_page(client, url) for url in wanted))
        self.unread |= {url: page for url, page in zip(wanted, found, strict=True) if isinstance(page, str)}
        return {url: page for url, page in zip(wanted, found, strict=True) if not isinstance(page, str)}

    def engine_tokens(self) -> EngineTokens | None:
        """The growth of the engines' counters; None where no engine's page was read, or one of them was not, so that a
        part of the tokens would be missing."""
        grown = [self._grown(url) for url in self.engines]
        known = [None if page is None else _engine(page) for page in grown]
        for url, page, tokens in zip(self.engines, grown, known, strict=True):
            if page is not None and tokens is None:
                self.unread[url] = "it has no counters of prompt tokens of vLLM or SGLang"
        return _sum([each for each in known if each is not None]) if known and None not in known else None

    def daemon_tokens(self) -> DaemonTokens | None:
        """The growth of the daemons' counters; None where one of their pages was not read, or there is none."""
        grown = [self._grown(url) for url in self.daemons]
        pages = [page for page in grown if page is not None]
        for url, page in zip(self.daemons, grown, strict=True):
            if page is not None and not any(name == "tokenlake_memory_bytes" for name, _ in page):
                self.unread[url] = "it is not the metrics page of a daemon"
                return None
        if not pages or len(pages) < len(grown):
            return None
        return DaemonTokens(
            asked=sum(_of(page, "tokenlake_asked_tokens_total") for page in pages),
            engine_had=sum(_of(page, "tokenlake_engine_had_tokens_total") for page in pages),
            supplied=_by(pages, "tokenlake_supplied_tokens_total", "source"),
            missed=_by(pages, "tokenlake_missed_tokens_total", "reason"),
        )

    def _grown(self, url: str) -> Page | None:
        if url in self.unread or url not in self.before or url not in self.after:
            return None
        before = self.before[url]
        grown = {series: value - before.get(series, 0.0) for series, value in self.after[url].items()}
        if any(value < 0 for (name, _), value in grown.items() if name.endswith("_total")):
            self.unread[url] = "its counters fell: the process was restarted in the run"
            return None
        return grown


def page_of(address: str) -> str:
    """The address of a metrics page, by that of a process: HOST:PORT, or a URL with a path of its own."""
    full = (address if "://" in address else f"http://{address}").rstrip("/")
    return full if full.partition("://")[2].partition("/")[2] else f"{full}/metrics"


def parsed(text: str) -> Page:
    """The series of engines and daemons on a page in Prometheus's format, without histograms' buckets. Raises
    ValueError for another text."""
    return {
        (sample.name, tuple(sorted(sample.labels.items()))): sample.value
        for family in text_string_to_metric_families(text)
        for sample in family.samples
        if sample.name.startswith(("vllm:", "sglang:", "tokenlake_")) and "_bucket" not in sample.name
    }


async def _page(client: aiohttp.ClientSession, url: str) -> Page | str:
    """The page, or why it could not be read."""
    try:
        async with client.get(url, timeout=aiohttp.ClientTimeout(total=DIAL_S)) as answer:
            if answer.status != 200:
                hint = "; SGLang serves it with --enable-metrics" if answer.status == 404 else ""
                return f"status {answer.status}{hint}"
            return parsed(await answer.text())
    except (aiohttp.ClientError, OSError) as error:
        return reason(error)
    except ValueError:
        return "it is no page of metrics"


def _tokens(page: Page) -> Page:
    return {series: value for series, value in page.items() if series[0].endswith("tokens_total")}


def _of(page: Page, name: str, **labels: str) -> int:
    """The sum of the series of a name that have these labels."""
    wanted = labels.items()
    return round(sum(value for (each, has), value in page.items() if each == name and wanted <= dict(has).items()))


def _by(pages: Sequence[Page], name: str, label: str) -> dict[str, int]:
    """The sums by the values of a label, without zeros, the largest first."""
    sums: dict[str, float] = {}
    for page in pages:
        for (each, labels), value in page.items():
            if each == name and value:
                key = dict(labels).get(label, "")
                sums[key] = sums.get(key, 0.0) + value
    return {key: round(value) for key, value in sorted(sums.items(), key=lambda item: -item[1])}


def _engine(page: Page) -> EngineTokens | None:
    """The tokens on the page of one server; None for a page of another kind."""
    names = {name for name, _ in page}
    if "vllm:prompt_tokens_total" in names:
        return _vllm(page, "vllm:prompt_tokens_by_source_total" in names)
    return _sglang(page) if "sglang:prompt_tokens_total" in names or "sglang:num_requests_total" in names else None


def _vllm(page: Page, by_source: bool) -> EngineTokens:
    prompt = _of(page, "vllm:prompt_tokens_total")
    if by_source:
        name = "vllm:prompt_tokens_by_source_total"
        own = _of(page, name, source="local_cache_hit")
        external = _of(page, name, source="external_kv_transfer")
    else:
        own = _of(page, "vllm:prefix_cache_hits_total")
        external = _of(page, "vllm:external_prefix_cache_hits_total")
    counts = "vllm:tokenlake_prompt_tokens_total"
    here, elsewhere = _of(page, counts, source="this_node"), _of(page, counts, source="other_nodes")
    # The pool counts what it gave; the engine computes one of these tokens again where a prompt was found whole.
    here = min(here, external)
    elsewhere = min(elsewhere, external - here)
    return EngineTokens(
        prompt=prompt,
        own=own,
        pool_here=here,
        pool_elsewhere=elsewhere,
        other=external - here - elsewhere,
        computed=prompt - own - external,
    )


def _sglang(page: Page) -> EngineTokens:
    prompt, cached = _of(page, "sglang:prompt_tokens_total"), "sglang:cached_tokens_total"
    storage = _of(page, cached, cache_source="storage")
    found: Mapping[str, int] = {
        source: _of(page, "sglang:tokenlake_looked_up_tokens_total", source=source)
        for source in ("this_node", "other_nodes")
    }
    pool = sum(found.values())
    # SGLang does not say from which node a page of its storage came; the shares are those of the lookups.
    here = round(storage * found["this_node"] / pool) if pool else 0
    all_cached = _of(page, cached)
    return EngineTokens(
        prompt=prompt,
        own=all_cached - storage,
        pool_here=here,
        pool_elsewhere=storage - here if pool else 0,
        other=0 if pool else storage,
        computed=prompt - all_cached,
    )


def _sum(tokens: Sequence[EngineTokens]) -> EngineTokens:
    fields: Any = EngineTokens.__struct_fields__
    return EngineTokens(**{name: sum(getattr(each, name) for each in tokens) for name in fields})
