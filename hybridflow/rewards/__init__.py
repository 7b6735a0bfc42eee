"""Rewards: built-in verifiers, selected by data source, and custom functions. Text in, score
out."""

from hybridflow.rewards.manager import RewardManager
from hybridflow.rewards.verifiers.base import ScoreResult

__all__ = ["RewardManager", "ScoreResult"]
