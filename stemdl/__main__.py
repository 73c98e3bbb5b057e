import sys

from stemdl.cli import main

sys.exit(main())
