"""transformers' `generate` as an engine, in the trainer's process."""

from hybridflow.engines.base import ENGINES
from hybridflow.engines.hf.engine import HfEngine

ENGINES.register("hf", HfEngine)
