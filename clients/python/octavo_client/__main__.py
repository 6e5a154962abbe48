"""`python -m octavo_client` is the octavo command."""

from __future__ import annotations

import sys

from octavo_client.cli import main

if __name__ == "__main__":
    sys.exit(main())
