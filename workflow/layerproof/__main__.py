"""`python -m layerproof VERB`, the same as `layerproof VERB`."""

import sys

from layerproof.cli import main

if __name__ == "__main__":
    sys.exit(main())
