"""flk: train PyTorch on Kubernetes."""
