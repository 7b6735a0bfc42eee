"""Configuration: typed schema, strict loading and cross-field checks. Does not import torch, so
that --help is instant.
"""
