"""Floor 2: host copies of the state, which make a save asynchronous."""
