"""``python -m shardwright`` is the command line ``shardwright``."""

from __future__ import annotations

import sys

from shardwright.cli import main

if __name__ == "__main__":
    sys.exit(main())
