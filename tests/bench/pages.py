"""The parts of the documentation that benchmarks generate: `python -m tests.bench.pages` writes them."""

from __future__ import annotations

from tests.house.pages import Part, write
from tokenlake_bench.engine_model import EngineModel, gpus_named, model_named

GIB = 1 << 30


def break_even() -> str:
    """For instances of which the engine model knows the speed, the rate at which a fetch takes as long as computing, as
    a table in Markdown."""
    rows = [
        "| instance | prompt | computed in | bytes of its cache | as long as a fetch at |",
        "|---|---|---|---|---|",
    ]
    for name, gpu in (("llama-3-8b", "h100"), ("llama-3-70b", "h100"), ("llama-3-70b", "a100-80g")):
        engine = EngineModel.fitting(model_named(name), gpus_named(gpu)[0])
        for tokens in (2000, 8000, 32_000):
            size, seconds = tokens * engine.model.cache_bytes, engine.prefill_s(tokens)
            instance, rate = f"{name} on {engine.gpus} {gpu}", f"{size * 8 / seconds / 1e9:.0f} Gbit/s"
            rows.append(f"| {instance} | {tokens:,} tokens | {seconds:.2f} s | {size / GIB:.2f} GiB | {rate} |")
    return "\n".join(rows) + "\n"


PARTS = (Part("docs/operations/sizing.md", "break-even", break_even, "tests.bench.pages"),)

if __name__ == "__main__":
    write(PARTS)
