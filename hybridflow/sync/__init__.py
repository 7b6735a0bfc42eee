"""The wire of a weight sync: sessions, streams, staging memory, checksums and transports."""
