"""FSDP2 backend for dense families, sharded across all ranks.

The only package that uses `torch.distributed.fsdp` and transformers' modelling classes.
"""
