"""Weight sync over the wire: sessions, streams, staging memory, checksums and transports."""
