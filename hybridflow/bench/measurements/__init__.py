"""Built-in measurements, one per file. Each file is named after its measurement."""
