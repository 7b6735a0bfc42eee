"""Reinforcement learning maths: advantages, losses, KL and aggregation. Tensors in, tensors out;
depends only on torch."""
