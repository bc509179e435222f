"""Files of weights: `Weights` reads a file or folder of weights for `Run.load_weights`."""

from flk_runtime.checkpoint.files.weights import Weights

__all__ = ["Weights"]
