"""Layer 4: which rank writes and which rank reads which bytes.

The descriptions of what each rank holds or wants go in, one plan per rank comes out. No bytes are read or written.
"""
