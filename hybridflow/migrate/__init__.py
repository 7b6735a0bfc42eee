"""Translation of other trainers' launch scripts into recipes."""
