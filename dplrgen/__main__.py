"""``python -m dplrgen`` is the command line."""

from __future__ import annotations

from dplrgen.cli import main

__all__: list[str] = []

if __name__ == "__main__":
    raise SystemExit(main())
