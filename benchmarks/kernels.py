"""One training step of many adapters, done in seven ways; ``kernels_lib/main.py`` says which, and what comes out.

    python benchmarks/kernels.py --scale gpu

It is all there and not here because transformers looks for a package named ``kernels`` and, while this folder is on the
path, imports this file.
"""

import sys

if __name__ == "__main__":
    # Behind all others, so that Hugging Face's own ``kernels``, where it is installed, is found before this file.
    sys.path.append(sys.path.pop(0))

    from kernels_lib.main import main

    raise SystemExit(main())
