"""Model families, one file per supported `model_type`, named after it."""
