"""One file for each `model_type`; the file's name is the model_type that it serves."""
