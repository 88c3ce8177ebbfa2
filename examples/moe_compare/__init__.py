"""Parts of examples/compare.py."""
