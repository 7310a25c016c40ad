"""Tools of the project: the lists of public names and messages, the release, and the matrix of versions."""
