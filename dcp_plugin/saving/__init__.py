"""Layer 6: one save, from the gathered state to the published checkpoint.

Each stage takes one value and returns the next. Every stage that can fail ends in a collective in which all ranks go on
or all raise.
"""
