"""The command line. Heavy imports are deferred until a job starts, so --help is instant."""
