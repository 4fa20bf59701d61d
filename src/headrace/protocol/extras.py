"""Optional parts of the installation.

Owns: how_to_install. Runs in: everywhere. Must not know: what the packages are for.
"""


def how_to_install(extra: str) -> str:
    """The way out for who lacks the packages of an extra, as the end of a message."""
    return f"install the extra {extra} (in a checkout: pip install -e '.[{extra}]')"
