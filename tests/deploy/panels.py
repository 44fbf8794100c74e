"""What the dashboard shows: panels of a few lines each.

No query uses a recorded series. In queries, `{N` begins the selector of daemons' series, `{T` of those with a tenant,
`{E` of engines' series.
"""

from __future__ import annotations

from dataclasses import dataclass

HEIGHT = 8
PER_S, TOKENS_PER_S, SEGMENTS_PER_S = "cps", "count:tokens/s", "count:segments/s"
SHARE, SECONDS, BYTES, BYTES_PER_S, PLAIN = "percentunit", "s", "bytes", "Bps", "short"


@dataclass(frozen=True)
class Panel:
    """`queries`: pairs of an expression and the name of its series."""

    title: str
    unit: str
    meaning: str
    queries: tuple[tuple[str, str], ...]
    kind: str = "timeseries"
    width: int = 8
    height: int = HEIGHT
    stacked: bool = False
    red_from: float | None = None
    """For a stat: the value from which it is red."""


def _stat(title: str, unit: str, meaning: str, *queries: tuple[str, str], red_from: float | None = None) -> Panel:
    return Panel(title, unit, meaning, queries, "stat", 4, 4, red_from=red_from)


def _graph(title: str, unit: str, meaning: str, *queries: tuple[str, str]) -> Panel:
    return Panel(title, unit, meaning, queries)


def _stack(title: str, unit: str, meaning: str, *queries: tuple[str, str]) -> Panel:
    return Panel(title, unit, meaning, queries, stacked=True)


def _rate(metric: str, selector: str = "N", by: str = "") -> str:
    """The growth of a counter per second, summed over all labels but `by`."""
    return f"sum{f' by ({by})' if by else ''} (rate({metric}{{{selector}}}[$__rate_interval]))"


def _times(title: str, metric: str, meaning: str) -> Panel:
    """Quantiles of a histogram of daemons."""
    buckets = f"rate({metric}_bucket{{N}}[$__rate_interval])"
    return _graph(
        title,
        SECONDS,
        meaning,
        (f"histogram_quantile(0.99, sum by (le, instance) ({buckets}))", "p99 {{instance}}"),
        (f"histogram_quantile(0.5, sum by (le) ({buckets}))", "median of all"),
    )


def _engine_times(metric: str) -> str:
    return f"histogram_quantile(0.99, sum by (le) (rate({metric}_bucket{{E}}[$__rate_interval])))"


_UNREACHABLE = (
    'label_replace(count by (cluster, peer) (tokenlake_peer_state{N,state="unreachable"} == 1) '
    'unless on (cluster, peer) tokenlake_node_info{E}, "instance", "$1", "peer", "(.*)") '
    'unless on (cluster, instance) up{E,job="tokenlake"} == 0'
)
_PROBLEMS = {
    "does not answer Prometheus": 'up{N,job="tokenlake"} == 0',
    "is unreachable for other members, and has no target": _UNREACHABLE,
    "is no member of its cluster": "tokenlake_membership_known{N} == 0",
    "cannot read the members, or not follow them": "tokenlake_membership_problem{N} == 1",
    "has no connection with a peer that runs": 'tokenlake_peer_state{N,state!="connected"} == 1 '
    "and on (cluster, peer) tokenlake_node_info{E}",
    "does not use a disk": "tokenlake_disk_serving{N} == 0",
    "does not use its cold tier": "tokenlake_cold_serving{N} == 0",
    "has a query engine that does not serve": "tokenlake_query_engine_ready{N} == 0",
    "has a certificate in the last tenth of its validity": "(tokenlake_certificate_end_seconds{N} - time()) "
    "/ (tokenlake_certificate_end_seconds{N} - tokenlake_certificate_begin_seconds{N}) < 0.1",
    "found wrong bytes in the last hour": "increase(tokenlake_corrupt_segments_total{N}[1h]) "
    "+ increase(tokenlake_confirmed_segments_total{N}[1h]) > 0",
    "refused engines in the last 15 minutes": "sum by (cluster, instance) "
    '(increase(tokenlake_refused_engines_total{N,reason!~"session|declined"}[15m])) > 0',
}
PROBLEMS = "max by (cluster, instance, problem, peer, state, path) ({})".format(
    " or ".join(f'label_replace({query}, "problem", "{text}", "", "")' for text, query in _PROBLEMS.items())
)
"""A series for each problem of each node."""
_NEEDED = (
    "(sum{0} ({1}(tokenlake_asked_tokens_total{{T}}[{2}])) - sum{0} ({1}(tokenlake_engine_had_tokens_total{{T}}[{2}])))"
)

STATS = (
    _stat(
        "Tokens supplied by the pool",
        "count:tokens",
        "Tokens that engines read from the pool in the time range, and did not compute.",
        ("sum(increase(tokenlake_supplied_tokens_total{T}[$__range]))", "tokens"),
    ),
    _stat(
        "Prefill saved",
        SECONDS,
        "Time in which engines would have computed these tokens, as predicted by their own measurements. An engine "
        "counts from its ninth prefill on.",
        ("sum(increase(tokenlake_saved_prefill_milliseconds_total{T}[$__range])) / 1000", "saved"),
    ),
    _stat(
        "Hit rate",
        SHARE,
        "Share that the pool supplied of the tokens that engines did not have in their own caches, in the time range.",
        (
            "sum(increase(tokenlake_supplied_tokens_total{T}[$__range])) / "
            + _NEEDED.format("", "increase", "$__range"),
            "hit rate",
        ),
    ),
    _stat(
        "Free memory",
        BYTES,
        "Memory for segments that holds none. Near 0 in a pool that has run for a while: then see evictions.",
        ("sum(tokenlake_free_share{N} * tokenlake_memory_bytes{N})", "free"),
    ),
    _stat(
        "Daemons",
        PLAIN,
        "Targets that answer Prometheus, and all targets.",
        ('sum(up{N,job="tokenlake"})', "answer"),
        ('count(up{N,job="tokenlake"})', "targets"),
    ),
    _stat(
        "Problems",
        PLAIN,
        "Lines of the table of problems. They do not depend on the alert rules.",
        (f"count({PROBLEMS}) or vector(0)", "problems"),
        red_from=1,
    ),
)
ROWS: dict[str, tuple[Panel, ...]] = {
    "Tokens": (
        _stack(
            "Prompt tokens by origin",
            TOKENS_PER_S,
            "Where the tokens of prompts came from: the engine's own cache, the pool (this node's memory, another "
            "node, a disk, or a query that travelled to the cache), or nowhere: the engine computed them.",
            (_rate("tokenlake_engine_had_tokens_total", "T"), "engine's cache"),
            (_rate("tokenlake_supplied_tokens_total", "T", "source"), "pool: {{source}}"),
            (_rate("tokenlake_missed_tokens_total", "T"), "missed"),
        ),
        _graph(
            "Hit rate by tenant",
            SHARE,
            "Share that the pool supplied of the tokens that engines did not have themselves.",
            (
                _rate("tokenlake_supplied_tokens_total", "T", "tenant")
                + " / "
                + _NEEDED.format(" by (tenant)", "rate", "$__rate_interval"),
                "{{tenant}}",
            ),
        ),
        _graph(
            "Prefill saved by tenant",
            PLAIN,
            "Seconds of prefill that the pool saves each second: 2 means that two more engines would do nothing but "
            "prefill.",
            (_rate("tokenlake_saved_prefill_milliseconds_total", "T", "tenant") + " / 1000", "{{tenant}}"),
        ),
        _stack(
            "Misses by reason",
            TOKENS_PER_S,
            "Tokens that engines asked for and computed. never_stored and too_short are no faults of the pool; "
            "behind_a_gap follows a miss earlier in the prompt.",
            (_rate("tokenlake_missed_tokens_total", "T", "reason") + " > 0", "{{reason}}"),
        ),
        _graph(
            "Misses by cause, as a share",
            SHARE,
            "Share of the tokens that engines needed; tokens behind a gap count for the reason of the gap.",
            (
                _rate("tokenlake_missed_tokens_total", "T", "cause")
                + " / on () group_left () "
                + _NEEDED.format("", "rate", "$__rate_interval")
                + " > 0",
                "{{cause}}",
            ),
        ),
        _graph(
            "Segments stored, and not",
            SEGMENTS_PER_S,
            "Segments that engines stored; those that got no slot, by the code of the refusal; and those that got one "
            "at a later attempt, which need no action.",
            (_rate("tokenlake_stored_segments_total"), "stored"),
            (_rate("tokenlake_refused_segments_total", "T", "code"), "refused: {{code}}"),
            (_rate("tokenlake_retried_segments_total", "T", "code"), "later: {{code}}"),
        ),
    ),
    "Nodes": (
        Panel(
            "List of problems",
            PLAIN,
            "What is wrong now, by node. Empty: nothing. The runbook has a section for each.",
            ((PROBLEMS, ""),),
            "table",
            16,
        ),
        _graph(
            "Time since the start",
            SECONDS,
            "Since the start of each daemon, with its version. A restart empties the memory of the node.",
            (
                "(time() - tokenlake_start_time_seconds{N}) * on (cluster, instance) group_left (version) "
                "tokenlake_node_info{N}",
                "{{instance}} {{version}}",
            ),
        ),
        _graph(
            "Peers that are not connected",
            PLAIN,
            "Other nodes that a node has no connection with. One peer, seen from all nodes: that daemon. All peers, "
            "seen from one node: its network.",
            ('count by (instance, state) (tokenlake_peer_state{N,state!="connected"} == 1)', "{{instance}}: {{state}}"),
        ),
        _graph(
            "Engines",
            PLAIN,
            "Engines that are connected to each daemon.",
            ("sum by (instance) (tokenlake_engines{N})", "{{instance}}"),
        ),
        _graph(
            "Refused engines",
            PER_S,
            "Attempts of engines to connect that were refused. They serve without the pool; `tokenlake status` has the "
            "cure.",
            (_rate("tokenlake_refused_engines_total", "N", "instance, reason") + " > 0", "{{instance}}: {{reason}}"),
        ),
    ),
    "Times, queues and deadlines": (
        _times("Match", "tokenlake_match_seconds", "From the request of an engine for a prefix to the answer."),
        _times(
            "Fetch",
            "tokenlake_fetch_seconds",
            "Until the segments of other nodes, or of a disk, are in this node's memory.",
        ),
        _times("Store", "tokenlake_store_seconds", "From the reservation of slots to the commit of the last of them."),
        _times(
            "Wait for another engine",
            "tokenlake_in_flight_wait_seconds",
            "Matches that wait because another engine computes the same segment.",
        ),
        _graph(
            "Queue: requests under way",
            PLAIN,
            "Entries of the daemon's tables. matches, transfers, writes and sends are empty when no request is under "
            "way; one that only grows is a defect.",
            (
                'sum by (instance, map) (tokenlake_map_entries{N,map=~"matches|transfers|writes|sends|leases"})',
                "{{instance}}: {{map}}",
            ),
        ),
        _graph(
            "Deadlines missed",
            PER_S,
            "Requests to other nodes without an answer in time, transfers without bytes or not complete in time, and "
            "matches that asked again. They become misses. All on one node: its processor or its network.",
            (_rate("tokenlake_peer_timeouts_total", by="instance"), "{{instance}}: no answer"),
            (_rate("tokenlake_unanswered_fetches_total", by="instance"), "{{instance}}: no bytes"),
            (_rate("tokenlake_aborted_fetches_total", by="instance"), "{{instance}}: transfer late"),
            (_rate("tokenlake_unanswered_waits_total", by="instance"), "{{instance}}: asked again"),
        ),
        _graph(
            "Waits for other readers",
            PER_S,
            "Matches and lookups that waited for a segment that another engine computes, or that its owner sends to "
            "other nodes.",
            (_rate("tokenlake_in_flight_waits_total"), "another engine computes it"),
            (_rate("tokenlake_deferred_waits_total"), "sent to others"),
            (_rate("tokenlake_deferred_lookups_total"), "lookups deferred"),
        ),
        _graph(
            "Peers that became suspect",
            PER_S,
            "Peers that did not answer pings: frozen, overloaded, or behind a bad network. Their segments are misses.",
            (_rate("tokenlake_suspected_peers_total", by="instance"), "{{instance}}"),
        ),
        _graph(
            "Control loop in long callbacks",
            SHARE,
            "Share of the time that the control loop spends in callbacks over 1 ms; engines and peers wait meanwhile.",
            ("sum by (instance) (rate(tokenlake_long_callback_seconds{N}[$__rate_interval]))", "{{instance}}"),
        ),
    ),
    "Memory and evictions": (
        _stack(
            "Memory by tenant",
            BYTES,
            "Memory of slots that hold a segment, by tenant, and memory that holds none.",
            ("sum by (tenant) (tokenlake_used_bytes{T})", "{{tenant}}"),
            ("sum(tokenlake_free_share{N} * tokenlake_memory_bytes{N})", "free"),
        ),
        _graph(
            "Free memory by node",
            SHARE,
            "Share of a node's memory that holds no segment. Full nodes beside empty ones: let the router spread "
            "prompts.",
            ("tokenlake_free_share{N}", "{{instance}}"),
        ),
        _graph(
            "Evictions",
            SEGMENTS_PER_S,
            "Segments that left memory for want of room; segments that were not admitted because others are worth "
            "more; segments that lost the one before them in their prompt; and those beyond the quota of a salt.",
            (_rate("tokenlake_evicted_segments_total", by="instance"), "{{instance}}: evicted"),
            (_rate("tokenlake_not_admitted_segments_total"), "not admitted"),
            (_rate("tokenlake_orphaned_segments_total", "N", "rule"), "orphaned: {{rule}}"),
            (_rate("tokenlake_evicted_salt_segments_total", "T", "tenant"), "salt's quota: {{tenant}}"),
        ),
        _graph(
            "Time that memory keeps a segment",
            SECONDS,
            "Since the last access of the segment that would be evicted next. Prompts that come again later than this "
            "are misses.",
            ("tokenlake_victim_age_seconds{N}", "{{instance}}"),
        ),
        _stack(
            "Segments by kind",
            "count:segments",
            "dirty: being written; primary: the copy that the directory knows; cached: further copies, which leave "
            "first.",
            ("sum by (kind) (tokenlake_segments{T})", "{{kind}}"),
        ),
        _graph(
            "Slots in quarantine",
            "count:slots",
            "Slots that a process may still access although it has no right to them. Above 0 for long: a stopped "
            "process.",
            ("sum by (instance) (tokenlake_quarantined_slots{T})", "{{instance}}"),
        ),
    ),
    "Tenants": (
        _graph(
            "Use of the quota",
            SHARE,
            "Memory of a tenant's segments as a share of its quota, on each node. At 100 % its own segments are "
            "evicted.",
            ("tokenlake_used_bytes{T} / tokenlake_quota_bytes{T}", "{{tenant}} on {{instance}}"),
        ),
        _stack(
            "Tokens asked for",
            TOKENS_PER_S,
            "Tokens of the prompts of each tenant's engines.",
            (_rate("tokenlake_asked_tokens_total", "T", "tenant"), "{{tenant}}"),
        ),
        _graph(
            "Bytes read and written",
            BYTES_PER_S,
            "Bytes of segments that engines of each tenant read from the pool's memory and wrote into it.",
            (_rate("tokenlake_read_bytes_total", "T", "tenant"), "{{tenant}}: read"),
            (_rate("tokenlake_written_bytes_total", "T", "tenant"), "{{tenant}}: written"),
        ),
    ),
    "Between nodes": (
        _graph(
            "Bytes sent",
            BYTES_PER_S,
            "Bytes of segments that a node sends to others. Much more on one node: it owns a prefix that many read.",
            (_rate("tokenlake_sent_bytes_total", by="instance"), "{{instance}}"),
        ),
        _graph(
            "Bytes received",
            BYTES_PER_S,
            "Bytes of whole segments that a node receives from others.",
            (_rate("tokenlake_received_bytes_total", by="instance"), "{{instance}}"),
        ),
        _graph(
            "Segments between nodes",
            SEGMENTS_PER_S,
            "Segments that were sent for an engine, and those that another node took over because its memory is "
            "emptier.",
            (_rate("tokenlake_sent_to_readers_segments_total", by="instance"), "{{instance}}: for engines"),
            (_rate("tokenlake_handed_over_segments_total", by="instance"), "{{instance}}: handed over"),
        ),
    ),
    "Disks": (
        _graph(
            "Use of disks",
            SHARE,
            "Bytes of the segments on each device as a share of what they may take. Empty without the setting `disk`.",
            (
                "sum by (instance, path) (tokenlake_disk_used_bytes{T}) / sum by (instance, path) "
                "(tokenlake_disk_capacity_bytes{N})",
                "{{instance}} {{path}}",
            ),
        ),
        _graph(
            "Bytes of disks",
            BYTES_PER_S,
            "Bytes of segments that were read back from disks, and written to them.",
            (_rate("tokenlake_disk_read_bytes_total", "T", "instance"), "{{instance}}: read"),
            (_rate("tokenlake_disk_written_bytes_total", "T", "instance"), "{{instance}}: written"),
        ),
        _times(
            "Read from disk", "tokenlake_disk_read_seconds", "From the request to the end of a read, its wait included."
        ),
        _graph(
            "Segments of disks",
            SEGMENTS_PER_S,
            "Segments that memory evicted and the disk keeps; that left the disk for want of room; that it did not "
            "admit, by reason; and whose write or read failed.",
            (_rate("tokenlake_disk_kept_segments_total"), "kept"),
            (_rate("tokenlake_disk_evicted_segments_total"), "evicted"),
            (_rate("tokenlake_disk_refused_segments_total", "N", "reason"), "refused: {{reason}}"),
            (_rate("tokenlake_disk_failed_segments_total"), "write failed"),
            (_rate("tokenlake_disk_damaged_segments_total"), "damaged"),
        ),
        _graph(
            "Queue of disks",
            "count:segments",
            "Segments that wait to be read from a device or written to it.",
            ("sum by (instance, path) (tokenlake_disk_queued_segments{N})", "{{instance}} {{path}}"),
        ),
        _graph(
            "Errors of disks",
            PLAIN,
            "Since the start of the daemon: operations that failed, and places that held other bytes than were "
            "written.",
            ("sum by (instance, path, kind) (tokenlake_disk_errors{N})", "{{instance}} {{path}}: {{kind}}"),
        ),
    ),
    "Cold tier": (
        _graph(
            "Use of the cold tier",
            SHARE,
            "Bytes of all objects, of all nodes, as a share of `cold_size`. From 92 % on the longest unused ones "
            "expire. Empty without the setting `cold`.",
            ("sum by (instance) (tokenlake_cold_used_bytes{N} / tokenlake_cold_size_bytes{N})", "{{instance}}"),
        ),
        _graph(
            "Bytes of the cold tier",
            BYTES_PER_S,
            "Bytes of segments that each node read from the cold tier, and wrote to it.",
            (_rate("tokenlake_cold_read_bytes_total", "T", "instance"), "{{instance}}: read"),
            (_rate("tokenlake_cold_written_bytes_total", "T", "instance"), "{{instance}}: written"),
        ),
        _times(
            "Read from the cold tier",
            "tokenlake_cold_read_seconds",
            "From the request to the end of a read, its wait included.",
        ),
        _graph(
            "First byte from the cold tier",
            SECONDS,
            "Time from the begin of a read to its first byte, a moving mean.",
            ("sum by (instance) (tokenlake_cold_latency_seconds{N})", "{{instance}}"),
        ),
        _graph(
            "Age of the index of the cold tier",
            SECONDS,
            "Time since each node read what others did there. A node with an old index does not write.",
            ("sum by (instance) (tokenlake_cold_index_age_seconds{N})", "{{instance}}"),
        ),
        _graph(
            "Errors of the cold tier",
            PLAIN,
            "Since the start of the daemon: operations that failed, objects that were not what they should be, and "
            "objects that the index named and that were not there.",
            ("sum by (instance, kind) (tokenlake_cold_errors{N})", "{{instance}}: {{kind}}"),
        ),
    ),
    "Engines: vLLM": (
        _stack(
            "Prompt tokens by source",
            TOKENS_PER_S,
            "As vLLM's connector counts them. Empty where Prometheus does not scrape vLLM's pages.",
            (_rate("vllm:tokenlake_prompt_tokens_total", "E", "source"), "{{source}}"),
        ),
        _graph(
            "First token",
            SECONDS,
            "Time to the first token, of all requests of these engines (vLLM's own metric).",
            (_engine_times("vllm:time_to_first_token_seconds"), "p99"),
            (_engine_times("vllm:time_to_first_token_seconds").replace("0.99", "0.5"), "median"),
        ),
        _graph(
            "Queue: requests of engines",
            "count:requests",
            "Requests that run, and that wait to be scheduled (vLLM's own metrics).",
            ("sum by (instance) (vllm:num_requests_running{E})", "{{instance}}: running"),
            ("sum by (instance) (vllm:num_requests_waiting{E})", "{{instance}}: waiting"),
        ),
        _graph(
            "Times of a load, p99",
            SECONDS,
            "The wait of a request for its lookup, until its segments are on this node, and until they are in vLLM's "
            "blocks.",
            (_engine_times("vllm:tokenlake_lookup_wait_seconds"), "lookup"),
            (_engine_times("vllm:tokenlake_fetch_seconds"), "fetch"),
            (_engine_times("vllm:tokenlake_copy_seconds"), "copy"),
        ),
        _graph(
            "Deadlines missed and failures",
            PER_S,
            "Lookups without an answer in time, loads whose tokens were recomputed, errors of the pool, and requests "
            "that the pool cannot serve. No request fails for any of them.",
            (_rate("vllm:tokenlake_lookups_late_total", "E", "instance"), "{{instance}}: lookup late"),
            (_rate("vllm:tokenlake_loads_failed_total", "E", "instance"), "{{instance}}: load failed"),
            (_rate("vllm:tokenlake_failures_total", "E", "instance"), "{{instance}}: error"),
            (_rate("vllm:tokenlake_requests_not_served_total", "E", "instance"), "{{instance}}: not served"),
        ),
        _graph(
            "Tokens loaded and stored",
            TOKENS_PER_S,
            "Tokens that were copied into vLLM's blocks, stored in the pool, and not stored: known already, refused, "
            "or the queue was full.",
            (_rate("vllm:tokenlake_loaded_tokens_total", "E"), "loaded"),
            (_rate("vllm:tokenlake_stored_tokens_total", "E"), "stored"),
            (_rate("vllm:tokenlake_not_stored_tokens_total", "E"), "not stored"),
        ),
        _graph(
            "Time in the connector",
            SHARE,
            "Share of the time that vLLM spends in the connector's hooks, and that the thread that stores is busy.",
            (_rate("vllm:tokenlake_hook_seconds_total", "E", "instance"), "{{instance}}: hooks"),
            (_rate("vllm:tokenlake_save_seconds_total", "E", "instance"), "{{instance}}: storing"),
        ),
        _graph(
            "Prefills of another engine",
            PER_S,
            "Prompts that one engine computed for another (disaggregated prefill): offered, taken, and computed again.",
            (_rate("vllm:tokenlake_prefills_offered_total", "E"), "offered"),
            (_rate("vllm:tokenlake_prefills_taken_total", "E"), "taken"),
            (_rate("vllm:tokenlake_prefills_recomputed_total", "E"), "recomputed"),
        ),
        _graph(
            "Hints of routers",
            PER_S,
            "Actions that routers asked for with requests, by outcome.",
            (_rate("vllm:tokenlake_kv_hints_total", "E", "action, outcome") + " > 0", "{{action}}: {{outcome}}"),
        ),
    ),
    "Query engines": (
        _graph(
            "Queries answered",
            PER_S,
            "Queries of engines, one per step and layer; parts of their answers that were lost; and answers of others "
            "that came too late. Empty without the setting `query_engine`.",
            (_rate("tokenlake_query_engine_answers", by="instance"), "{{instance}}: answered"),
            (_rate("tokenlake_query_engine_lost_parts", by="instance"), "{{instance}}: parts lost"),
            (_rate("tokenlake_query_engine_late_results", by="instance"), "{{instance}}: too late"),
        ),
        _graph(
            "Time in attention for others",
            SHARE,
            "Share of the time that a node computes attention for other nodes. Much more on one node: it owns a prefix "
            "that many query.",
            (_rate("tokenlake_query_engine_result_seconds", by="instance"), "{{instance}}"),
        ),
        _graph(
            "Bytes of partial attention",
            BYTES_PER_S,
            "Bytes in the answers to other query engines.",
            (_rate("tokenlake_query_engine_result_bytes", by="instance"), "{{instance}}"),
        ),
    ),
}
