"""The scripts of examples/ as users run them."""
