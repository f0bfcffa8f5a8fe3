"""Write ``docs/reference.md`` from the code.

python -m tools.make_reference
"""

from __future__ import annotations

from tools.make_reference.page import PAGE, ROOT, page

if __name__ == "__main__":
    PAGE.write_text(page(), encoding="utf-8")
    print(f"wrote {PAGE.relative_to(ROOT)}")
