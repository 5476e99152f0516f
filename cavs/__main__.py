"""`python -m cavs` is `cavs`."""

import sys

from cavs.cli import main

sys.exit(main())
