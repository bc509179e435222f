import sys

from flk_runtime.__main__ import main

sys.exit(main())
