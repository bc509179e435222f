"""Files of weights: exporting a checkpoint to one safetensors file, and loading weights only.

`export_weights` needs neither a run nor a process group; ``python -m flk_runtime export`` calls it. `Weights` reads a
file or folder of weights for `Run.load_weights`.
"""

from flk_runtime.checkpoint.files.export import export_weights, main
from flk_runtime.checkpoint.files.weights import SavedWeights, Weights

__all__ = ["SavedWeights", "Weights", "export_weights", "main"]
