"""Built-in measurements, one file each; the file's name is the measurement's."""
