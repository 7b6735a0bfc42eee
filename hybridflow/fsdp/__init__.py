"""FSDP2 backend, sharded across all ranks.

The only package that uses `torch.distributed.fsdp` and transformers' modelling classes.
"""
