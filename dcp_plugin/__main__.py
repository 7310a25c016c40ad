"""``python -m dcp_plugin``: the command line, where the script is not on the path."""

from dcp_plugin.tools.cli import main

main()
