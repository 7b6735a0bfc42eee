"""Built-in measurements, one per file. A file is named after its measurement."""
