"""Everything that a save and a load of live objects need."""
