"""The parts of the documentation that benchmarks generate: `python -m tests.bench.pages` writes them."""

from __future__ import annotations

from tests.bench.test_config_file import PUBLISHED
from tests.house.pages import Part, write
from tokenlake.core.cold_tier import PART_OF_COMPUTING
from tokenlake_bench.engine_model import GPUS, EngineModel
from tokenlake_bench.engine_model.config_file import model_of

GIB = 1 << 30
INSTANCES = (
    *(("Llama-3.1-8B", "h100"), ("Qwen3-32B", "h100"), ("Llama-3.1-70B", "a100-80g"), ("Llama-3.1-70B", "h100")),
    *(("Qwen3-235B-A22B", "h200"), ("DeepSeek-V3", "h200")),
)
"""The models and GPUs of the table; an instance has the fewest GPUs that leave room for a cache."""


def break_even() -> str:
    """The rate at which a fetch of the cache of a prompt takes as long as computing it, as a table in Markdown."""
    rows = [
        "| model | GPUs | prompt | computed in | bytes of its cache | as long as a fetch at |",
        "|---|---|---|---|---|---|",
    ]
    for name, gpu in INSTANCES:
        engine = EngineModel.fitting(model_of(PUBLISHED[name].config, name), GPUS[gpu])
        for tokens in (8000, 32_000):
            size, seconds = tokens * engine.model.cache_bytes, engine.prefill_s(tokens)
            rate, cache = f"{size * 8 / seconds / 1e9:.0f} Gbit/s", f"{size / GIB:.2f} GiB"
            rows.append(f"| {name} | {engine.gpus} {gpu} | {tokens:,} tokens | {seconds:.2f} s | {cache} | {rate} |")
    return "\n".join(rows) + "\n"


COLD_INSTANCES = (
    ("Llama-3.1-8B", "a100-80g"),
    ("Llama-3.1-8B", "h100"),
    ("Llama-3.1-70B", "h100"),
    ("DeepSeek-V3", "h200"),
)
LATENCIES_S = (0.002, 0.05)


def cold_break_even() -> str:
    """The rate of the cold tier from which on its segments are read, as a table in Markdown."""
    lengths = (2048, 8192, 32_768)
    columns = [f"{tokens:,} tokens, {seconds * 1e3:.0f} ms" for seconds in LATENCIES_S for tokens in lengths]
    rows = [f"| model | GPUs | {' | '.join(columns)} |", "|---|---" + "|---" * len(columns) + "|"]
    for name, gpu in COLD_INSTANCES:
        engine = EngineModel.fitting(model_of(PUBLISHED[name].config, name), GPUS[gpu])
        cells = []
        for seconds in LATENCIES_S:
            for tokens in lengths:
                left_s = PART_OF_COMPUTING * engine.prefill_s(tokens) - seconds
                rate = tokens * engine.model.cache_bytes / left_s / 1e9 if left_s > 0 else 0.0
                cells.append(f"{rate:.1f}" if rate else "never")
        rows.append(f"| {name} | {engine.gpus} {gpu} | {' | '.join(cells)} |")
    return "\n".join(rows) + "\n"


PARTS = (
    Part("docs/operations/sizing.md", "break-even", break_even, "tests.bench.pages"),
    Part("docs/results/cold-tier.md", "cold-break-even", cold_break_even, "tests.bench.pages"),
)

if __name__ == "__main__":
    write(PARTS)
