"""One file per `model_type`, named after the model_type that it supports."""
