"""The version, which the packages' metadata (pyproject.toml, cuda13/pyproject.toml) read here."""

__version__ = "0.2.0"
