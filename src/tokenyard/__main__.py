"""`python -m tokenyard`: the `tokenyard` command where its script is not on the path."""

from __future__ import annotations

from tokenyard.tools.cli.app import main

if __name__ == "__main__":
    main()
