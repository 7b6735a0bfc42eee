"""The command line. Imports nothing heavy until a job starts, so that --help is instant."""
