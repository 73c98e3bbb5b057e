"""python -m data_tools: the same as the command stemdl-data."""

import sys

from data_tools.cli import main

sys.exit(main())
