"""Tiny model folders, laid out file by file as each family publishes its own."""
