"""Cases that cannot pass, by (suite, name) or (suite, name, dtype), and why."""

KNOWN: dict[tuple[str, ...], str] = {}
