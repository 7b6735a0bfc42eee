"""The command line. Heavy imports are deferred until a job starts so that --help is instant."""
