"""`python -m scripts.chart`."""

from scripts.chart import generate

generate()
