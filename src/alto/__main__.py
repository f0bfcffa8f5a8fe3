"""``python -m alto`` is the command ``alto``."""

from __future__ import annotations

from alto.cli import main

if __name__ == "__main__":
    main()
