"""`python -m bitsandbytes`."""

import sys

from bitsandbytes.cli import main

sys.exit(main())
