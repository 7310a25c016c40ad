"""Tools of the project: the lists of public names and messages, and the release."""
