"""`python -m scripts.chart` writes the generated files of the chart; with the argument `archive` only the archive."""

import sys

from scripts.chart import generate, prepare

if sys.argv[1:] == ["archive"]:
    prepare()
else:
    generate()
