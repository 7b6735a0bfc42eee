"""Configuration: typed schema, strict loading, cross-field checks. Imports no torch, so that --help
is instant."""
