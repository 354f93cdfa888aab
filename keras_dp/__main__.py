"""Run the command line as `python -m keras_dp`."""

import sys

from keras_dp.cli import main

sys.exit(main())
