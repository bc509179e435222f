"""The first steps of a training, compared with those of the whole model in one process: `flk run --verify N`."""
