"""`python -m converter.to_maxtext`: takes what `python -m maxtext.checkpoint_conversion.to_maxtext` takes."""

import sys

from converter.cli import to_maxtext

if __name__ == "__main__":
    sys.exit(to_maxtext(sys.argv[1:]))
