"""Floor 1: bytes. The format on disk, writing, reading, checksums and the commit."""
