"""``dcp_plugin.tools.report``: one page about a run, for a browser.

``collect`` gathers the figures, ``charts`` and ``page`` show them. The rule: every text from a file is escaped, and
the page needs no network.
"""
