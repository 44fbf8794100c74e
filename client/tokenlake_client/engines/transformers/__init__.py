"""The pool under Hugging Face transformers: `TokenLakeEngine` wraps a model's prefill and `generate`."""

from tokenlake_client.engines.transformers.counters import Counts
from tokenlake_client.engines.transformers.engine import Prefill, TokenLakeEngine
from tokenlake_client.engines.transformers.layout import layout_of
from tokenlake_client.engines.transformers.options import EngineOptions

__all__ = ["Counts", "EngineOptions", "Prefill", "TokenLakeEngine", "layout_of"]
