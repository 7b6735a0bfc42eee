"""Rewards: built-in verifiers by data source, and the loader of a user's own function. Text in, score out."""

from hybridflow.rewards.manager import RewardManager
from hybridflow.rewards.verifiers import VERIFIERS, ScoreResult, extract_gsm8k_answer

__all__ = ["VERIFIERS", "RewardManager", "ScoreResult", "extract_gsm8k_answer"]
