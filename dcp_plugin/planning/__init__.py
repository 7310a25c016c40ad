"""Floor 2: which rank writes and reads which bytes."""
