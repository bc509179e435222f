"""Sinks of a run's metrics: TensorBoard, MLflow, Weights & Biases.

Rank 0 writes them: `flk_sinks.curves` gives each line of metrics to a `writer.Writer` for each sink.
"""
