"""The only room that uses `torch.distributed.fsdp` and transformers' modelling classes: dense families, sharded over
all ranks."""
