"""Files of weights: exporting a checkpoint to one safetensors file, importing one, and loading weights only.

`export_weights` and `import_weights` need neither a run nor a process group; ``python -m flk_runtime export`` and
``import`` call them. `Weights` reads a file or folder of weights for `Run.load_weights`.
"""

from flk_runtime.checkpoint.files.export import export_weights, import_weights, main
from flk_runtime.checkpoint.files.weights import SavedWeights, Weights

__all__ = ["SavedWeights", "Weights", "export_weights", "import_weights", "main"]
