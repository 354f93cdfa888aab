"""State the version, for pyproject.toml as well."""

__version__ = "0.1.0"
