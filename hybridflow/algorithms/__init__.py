"""Reinforcement-learning maths: advantages, losses, KL, aggregation. Tensors in, tensors out;
imports torch only."""
