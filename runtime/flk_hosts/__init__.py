"""Adapters that let flk keep the state of other packages' loops. Each module is for the package of its name."""
