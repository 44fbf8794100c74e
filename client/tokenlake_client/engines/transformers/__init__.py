"""The pool for Hugging Face transformers: `TokenLakeEngine` wraps the prefill and `generate` of a model."""

from tokenlake_client.engines.transformers.counters import Counts
from tokenlake_client.engines.transformers.engine import Prefill, TokenLakeEngine
from tokenlake_client.engines.transformers.identity import layout_of
from tokenlake_client.engines.transformers.options import EngineOptions

__all__ = ["Counts", "EngineOptions", "Prefill", "TokenLakeEngine", "layout_of"]
