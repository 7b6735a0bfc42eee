"""Rewards: built-in verifiers by data source, and functions of the user's own. Text in, score
out."""

from hybridflow.rewards.manager import RewardManager
from hybridflow.rewards.verifiers.base import ScoreResult

__all__ = ["RewardManager", "ScoreResult"]
