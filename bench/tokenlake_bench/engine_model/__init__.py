"""Computed durations of an engine's forward passes, by a roofline model from the dimensions of models and the rates of
GPUs. Formulae and sources: `docs/simulation.md`."""

from tokenlake_bench.engine_model.config_file import model_named
from tokenlake_bench.engine_model.gpus import GPUS, Gpu, gpus_named
from tokenlake_bench.engine_model.models import MODELS, Model
from tokenlake_bench.engine_model.roofline import Chunk, EngineModel

__all__ = ["GPUS", "MODELS", "Chunk", "EngineModel", "Gpu", "Model", "gpus_named", "model_named"]
