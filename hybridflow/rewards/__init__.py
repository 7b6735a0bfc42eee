"""Rewards: built-in verifiers, selected by data source, and custom functions. Both map the text of
a response to a score."""

from hybridflow.rewards.manager import RewardManager
from hybridflow.rewards.verifiers.base import ScoreResult

__all__ = ["RewardManager", "ScoreResult"]
